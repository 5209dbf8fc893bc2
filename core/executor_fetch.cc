// SPDX-License-Identifier: Apache-2.0
// An alltoall, or a scatter, in which everyone fetches its blocks from the memory of the others, by
// a system call that reads another process (outbox.h): each byte is copied once, not into an outbox
// and out of it.
//
//   entered    the line says what was called, and where this rank's array is; the own block is
//              copied
//   fetching   of each peer in turn, once its line is there; the root of a scatter only looks that
//              all called the same
//   told       all is fetched; an array that others read stays as it is until all have told
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
// An alltoall of large arrays, which are stored past the caches, goes by way of so much that stays
// in them: the kernel would first read what it is about to overwrite (16 MB between 2 ranks: 1.76
// to 1.60 ms). A scatter, where each rank stores one block, does not gain (0.80 to 1.15 ms).
constexpr size_t kWayBytes = 256 << 10;

}  // namespace

bool Executor::is_read() const {
  return plan_.collective == Collective::kAlltoall || plan_.rank == plan_.root;
}

int Executor::peers_to_hear() const {
  return is_read() ? plan_.ranks - 1 : 1;
}

// The peers in the order in which they are heard: from the next rank on, so that not all read the
// same one at once.
int Executor::peer_to_hear(int number) const {
  return is_read() ? (plan_.rank + 1 + number) % plan_.ranks : plan_.root;
}

void Executor::enter_to_fetch() {
  const auto at = reinterpret_cast<uintptr_t>(operation_->in);
  std::memcpy(links_.outboxes->payload(plan_.rank, links_.outbox_uses, sizeof at), &at, sizeof at);
  enter();
  heard_ = 0;
  fetched_ = 0;
  const size_t bytes = operation_->call.count * item_bytes_;
  if (bytes == 0 || !is_read()) return;
  copy_past_caches(place_of(plan_.rank), nullptr, operation_->in + size_t(plan_.rank) * bytes,
                   bytes);
  end_of_streaming();
}

// Where the block that comes from a rank goes.
std::byte* Executor::place_of(int rank) const {
  const size_t block = plan_.collective == Collective::kAlltoall ? size_t(rank) : 0;
  return operation_->out + block * operation_->call.count * item_bytes_;
}

Executor::Progress Executor::advance_fetch() {
  if (!entered_) {
    if (!may_enter()) return Progress::kBlocked;
    enter_to_fetch();
  }
  const size_t bytes = operation_->call.count * item_bytes_;
  const int peers = peers_to_hear();
  const bool reads = plan_.collective == Collective::kAlltoall || !is_read();
  for (; heard_ < peers; ++heard_, fetched_ = 0) {
    const int peer = peer_to_hear(heard_);
    if (fetched_ == 0 && !hear(peer)) return Progress::kBlocked;
    if (!reads) continue;
    fetch(peer);
    if (fetched_ < bytes) return Progress::kMoved;
  }
  if (heard_ == peers) {
    ++heard_;
    end_use();
  }
  return !is_read() || unfinished(links_.outbox_uses) < 0 ? Progress::kDone : Progress::kBlocked;
}

void Executor::fetch(int peer) {
  const size_t bytes = operation_->call.count * item_bytes_;
  const size_t step = std::min(bytes - fetched_, kAtOnceBytes);
  uintptr_t theirs;
  std::memcpy(&theirs, links_.outboxes->payload(peer, links_.outbox_uses, sizeof theirs),
              sizeof theirs);
  try {
    fetch_step(peer, theirs + size_t(plan_.rank) * bytes + fetched_, place_of(peer) + fetched_,
               step);
  } catch (const std::system_error& error) {
    raise(FailureCode::kPeerLost, peer,
          std::string("its memory cannot be read any more: ") + error.what());
  }
  fetched_ += step;
}

void Executor::fetch_step(int peer, uintptr_t from, std::byte* to, size_t bytes) {
  const size_t all = size_t(plan_.ranks) * operation_->call.count * item_bytes_;
  if (plan_.collective != Collective::kAlltoall || all < kStreamedBytes)
    return links_.outboxes->fetch(peer, from, to, bytes);
  scratch_.resize(kWayBytes);
  for (size_t at = 0; at < bytes; at += kWayBytes) {
    const size_t some = std::min(kWayBytes, bytes - at);
    links_.outboxes->fetch(peer, from + at, scratch_.data(), some);
    copy_past_caches(to + at, nullptr, scratch_.data(), some);
  }
  end_of_streaming();
}

int Executor::fetch_waits_for() const {
  return heard_ < peers_to_hear() ? peer_to_hear(heard_) : unfinished(links_.outbox_uses);
}

}  // namespace commute
