// SPDX-License-Identifier: Apache-2.0
// An alltoall in which everyone fetches its blocks from the memory of the others, by a system call
// that reads another process (outbox.h): each byte is copied once, not into an outbox and out of
// it.
//
//   entered    the line says what was called, and where this rank's array is; the own block is
//              copied
//   fetching   of each peer in turn, once its line is there
//   told       all is fetched; the array stays as it is until all others have fetched too
//
// Invariant: whoever has seen a rank's line may read its array until it has told that it is done,
// and the rank waits for that. A peer that gives up in between never tells, so what was read of
// memory that is somebody else's by then is never a result.
//
// It stands for a plan that is proved, shown and compared with, as the other kernels do.
#include <algorithm>
#include <cstring>
#include <system_error>

#include "copy.h"
#include "executor.h"

namespace commute {
namespace {

// Without looking up. A rank that asks for a great deal lets its thread see to other things too.
constexpr size_t kAtOnceBytes = 64 << 20;

}  // namespace

void Executor::enter_to_fetch() {
  const auto at = reinterpret_cast<uintptr_t>(operation_->in);
  std::memcpy(links_.outboxes->payload(plan_.rank, links_.outbox_uses, sizeof at), &at, sizeof at);
  enter();
  heard_ = 0;
  fetched_ = 0;
  const size_t bytes = operation_->call.count * item_bytes_;
  const size_t mine = size_t(plan_.rank) * bytes;
  if (bytes == 0) return;
  copy_past_caches(operation_->out + mine, nullptr, operation_->in + mine, bytes);
  end_of_streaming();
}

Executor::Progress Executor::advance_fetch() {
  if (!entered_) {
    if (!may_enter()) return Progress::kBlocked;
    enter_to_fetch();
  }
  const size_t bytes = operation_->call.count * item_bytes_;
  // From the next rank on, so that not all read the same one at once; the last would be this one.
  while (heard_ < plan_.ranks - 1) {
    const int peer = (plan_.rank + 1 + heard_) % plan_.ranks;
    if (fetched_ == 0 && !hear(peer)) return Progress::kBlocked;
    fetch(peer);
    if (fetched_ < bytes) return Progress::kMoved;
    fetched_ = 0;
    ++heard_;
  }
  if (heard_ < plan_.ranks) {
    ++heard_;
    end_use();
  }
  return unfinished(links_.outbox_uses) < 0 ? Progress::kDone : Progress::kBlocked;
}

void Executor::fetch(int peer) {
  const size_t bytes = operation_->call.count * item_bytes_;
  const size_t step = std::min(bytes - fetched_, kAtOnceBytes);
  uintptr_t theirs;
  std::memcpy(&theirs, links_.outboxes->payload(peer, links_.outbox_uses, sizeof theirs),
              sizeof theirs);
  try {
    links_.outboxes->fetch(peer, theirs + size_t(plan_.rank) * bytes + fetched_,
                           operation_->out + size_t(peer) * bytes + fetched_, step);
  } catch (const std::system_error& error) {
    raise(FailureCode::kPeerLost, peer,
          std::string("its memory cannot be read any more: ") + error.what());
  }
  fetched_ += step;
}

}  // namespace commute
