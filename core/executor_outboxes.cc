// SPDX-License-Identifier: Apache-2.0
// The executor's steps in shared memory, and the hand-written kernels.
//
// The kernels carry arrays of up to kLineBytes in the lines of outboxes (outbox.h): everyone
// publishes its line, everyone who needs it reads it, and that is all. Each has a plan that says
// the same (allreduce: one-shot; broadcast and barrier: shared), under the name "line"; it is what
// is proved and shown, and tests compare the two.
#include <cstring>

#include "executor.h"

namespace commute {

// --- from call to call ---

void Executor::begin_use() {
  ++links_.outbox_uses;
  uint64_t words[3];
  operation_->call.pack(words);
  uint64_t history = links_.history + operation_->sequence;
  for (const uint64_t word : words) {
    history = (history ^ word) * 0x9e3779b97f4a7c15u;
    history ^= history >> 29;
  }
  links_.history = history;
}

void Executor::end_use() {
  links_.outbox_settled = line_ || plan_.settled;
  links_.outbox_last_tiles = line_ ? 0 : tiles_;
  if (!line_) {
    links_.outbox_tiles += tiles_;
    for (size_t i = 0; i < plan_.signals_per_tile.size(); ++i)
      links_.signals[i] += tiles_ * plan_.signals_per_tile[i];
  }
  links_.outboxes->signal(kFinished);
}

// The line that this use publishes is free when all have finished the use before the last.
bool Executor::may_enter() const {
  return unfinished(links_.outbox_uses - std::min<uint64_t>(links_.outbox_uses, 2)) < 0;
}

bool Executor::enter() {
  if (!may_enter()) return false;
  links_.outboxes->publish(links_.outbox_uses, operation_->sequence, links_.history,
                           operation_->call, line_);
  entered_ = true;
  return true;
}

// A rank that has not finished so many operations with outboxes, or -1.
int Executor::unfinished(uint64_t uses) const {
  for (int peer = 0; peer < plan_.ranks; ++peer) {
    uint64_t& known = links_.finished[size_t(peer)];
    if (peer == plan_.rank || known >= uses) continue;
    // Looked at first: what a peer signalled before it left is seen below.
    const bool left = links_.left[size_t(peer)].load(std::memory_order_seq_cst);
    known = links_.outboxes->signalled(peer, kFinished);
    if (known >= uses) continue;
    if (left) raise(FailureCode::kPeerLost, peer, links_.goodbye());
    return peer;
  }
  return -1;
}

// Whether the slot of this tile has no reader left from the operation before.
bool Executor::slot_free(const Lane& lane) const {
  if (lane.tile >= kOutboxSlots || links_.outbox_settled) return true;
  if (lane.tile == 0 && links_.outbox_last_tiles < kOutboxSlots) return true;
  return unfinished(links_.outbox_uses - 1) < 0;
}

// --- steps of plans ---

void Executor::copy(const Lane& lane, const Instruction& step) {
  const int owner = step.src_space == Space::kOutbox ? step.peer : plan_.rank;
  const Run from = run_of(step.src_space, step.src, step.count, lane.tile, owner);
  const Run to = run_of(step.dst_space, step.dst, step.count, lane.tile, plan_.rank);
  const size_t bytes = std::min(from.bytes, to.bytes);
  if (bytes == 0) return;
  if (!streams(step)) {
    copy_bytes(to.at, from.at, bytes);
    return;
  }
  copy_past_caches(to.at, nullptr, from.at, bytes);
  end_of_streaming();
}

void Executor::put(const Lane& lane, const Instruction& step) {
  const Run from = run_of(step.src_space, step.src, step.count, lane.tile, plan_.rank);
  const Run to = run_of(Space::kOutbox, step.dst, step.count, lane.tile, plan_.rank);
  if (from.bytes == 0) return;
  const bool keeps = step.flags & kFlagKeep;
  std::byte* const kept =
      keeps ? run_of(Space::kOut, step.arg, step.count, lane.tile, plan_.rank).at : nullptr;
  if (keeps && streams(step)) {
    copy_past_caches(kept, to.at, from.at, from.bytes);
    end_of_streaming();
    return;
  }
  copy_bytes(to.at, from.at, from.bytes);
  if (keeps) copy_bytes(kept, from.at, from.bytes);
}

bool Executor::streams(const Instruction& step) const {
  const size_t blocks = plan_.blocks[static_cast<int>(Space::kOut)];
  return (step.flags & kFlagStreaming) &&
         blocks * operation_->call.count * item_bytes_ >= kStreamedBytes;
}

void Executor::reduce_many(const Lane& lane, const Instruction& step) {
  const Run to = run_of(step.dst_space, step.dst, step.count, lane.tile, plan_.rank);
  size_t targets = 0;
  targets_[targets++] = to.at;
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    const bool own = rank == plan_.rank;
    std::byte* const at = own ? run_of(step.src_space, step.src, step.count, lane.tile, rank).at
                              : run_of(Space::kOutbox, step.arg, step.count, lane.tile, rank).at;
    sources_[size_t(rank)] = at;
    if (!own && (step.flags & kFlagBack)) targets_[targets++] = at;
  }
  combine_all(targets, to.bytes);
}

bool Executor::signal_seen(const Lane& lane, const Instruction& step) const {
  if (lane.tile < step.lag()) return true;  // of an earlier call: slot_free looks after that
  const size_t counter = size_t(step.peer) * kSignals + step.signal();
  const uint64_t target = links_.signals[counter] + step.src +
                          (lane.tile - step.lag()) * plan_.signals_per_tile[counter];
  // Looked at first: what a peer signalled before it left is seen below.
  const bool left = links_.left[size_t(step.peer)].load(std::memory_order_seq_cst);
  if (links_.outboxes->signalled(step.peer, step.signal()) < target) {
    if (left) raise(FailureCode::kPeerLost, step.peer, links_.goodbye());
    return false;
  }
  // Its first signal of this operation: what it called stands in its outbox.
  if (lane.tile == 0 && step.lag() == 0) compare_call(step.peer, true);
  return true;
}

// --- the kernels ---

bool Executor::brings_data(int rank) const {
  if (plan_.collective == Collective::kBroadcast) return rank == plan_.root;
  return plan_.collective == Collective::kAllreduce;
}

// A barrier needs all, though they bring nothing; a broadcast only the root.
bool Executor::waits_for(int rank) const {
  if (rank == plan_.rank) return false;
  return plan_.collective != Collective::kBroadcast || rank == plan_.root;
}

Executor::Progress Executor::advance_line() {
  const size_t bytes = operation_->call.count * item_bytes_;
  const uint64_t use = links_.outbox_uses;
  if (!entered_) {
    if (bytes > kLineBytes) raise(FailureCode::kProtocol, -1, "the array does not fit a line");
    if (!may_enter()) return Progress::kBlocked;
    if (brings_data(plan_.rank) && bytes > 0)
      copy_bytes(links_.outboxes->payload(plan_.rank, use, bytes), operation_->out, bytes);
    enter();
    heard_ = 0;
  }
  for (; heard_ < plan_.ranks; ++heard_)
    if (waits_for(heard_) && !hear(heard_)) return Progress::kBlocked;
  if (plan_.collective == Collective::kAllreduce) {
    for (int rank = 0; rank < plan_.ranks; ++rank)
      sources_[size_t(rank)] =
          rank == plan_.rank ? operation_->out : links_.outboxes->payload(rank, use, bytes);
    targets_[0] = operation_->out;
    combine_all(1, bytes);
  } else if (plan_.rank != plan_.root && bytes > 0) {
    copy_bytes(operation_->out, links_.outboxes->payload(plan_.root, use, bytes), bytes);
  }
  finish();
  return Progress::kDone;
}

// Whether the peer's line of this operation is there.
bool Executor::hear(int peer) {
  const bool left = links_.left[size_t(peer)].load(std::memory_order_seq_cst);
  if (links_.outboxes->published(peer, links_.outbox_uses, operation_->sequence)) {
    compare_call(peer, true);
    return true;
  }
  if (left) raise(FailureCode::kPeerLost, peer, links_.goodbye());
  return false;
}

void Executor::wait_in_memory(std::set<int>& found) const {
  if (!entered_) {
    found.insert(unfinished(links_.outbox_uses - std::min<uint64_t>(links_.outbox_uses, 2)));
  } else if (fetches_) {
    wait_to_fetch(found);
  } else if (line_) {
    for (int peer = heard_; peer < plan_.ranks; ++peer)
      if (waits_for(peer) &&
          !links_.outboxes->published(peer, links_.outbox_uses, operation_->sequence))
        found.insert(peer);
  }
}

// --- mismatches ---

// Raises when the peer's outbox says that it called something else, here or before. `must`: it has
// signalled, so its call must stand there.
void Executor::compare_call(int peer, bool must) const {
  const uint64_t now = operation_->sequence;
  const Outboxes& outboxes = *links_.outboxes;
  if (outboxes.published(peer, links_.outbox_uses, now)) {
    if (outboxes.history(peer, links_.outbox_uses) == links_.history) {
      // What it published last it began after it had finished the use before.
      uint64_t& known = links_.finished[size_t(peer)];
      known = std::max(known, links_.outbox_uses - 1);
      return;
    }
    Call theirs;
    if (outboxes.called(peer, links_.outbox_uses, now, theirs) && theirs != operation_->call)
      explain_call(theirs, peer);
    explain_before(peer);
  }
  const uint64_t last = outboxes.last_published(peer);
  // Looked at once more: the peer may have come to this operation, and finished it, in between.
  if (last >= now && !outboxes.published(peer, links_.outbox_uses, now)) {
    if (last > now) explain_ahead(last, "", peer);
    explain_before(peer);  // it is in this operation, but has used its outbox more often or less
  }
  if (must) explain_before(peer);
}

// This plan sends messages. A line that names this very operation tells that the peer's does not;
// it stands there until we have finished a use of our own.
void Executor::find_in_outbox(int peer) const {
  Call theirs;
  for (const uint64_t use : {0, 1})
    if (links_.outboxes->called(peer, use, operation_->sequence, theirs))
      explain_call(theirs, peer);
}

// The peer's past does not fit: an earlier call of its differed, and no wait of ours could see it.
void Executor::explain_before(int peer) const {
  Call theirs;
  const uint64_t before = operation_->sequence - 1;
  std::string what = "something that " + named(links_.rank) + " did not call";
  if (links_.outboxes->called(peer, links_.outbox_uses - 1, before, theirs))
    what = theirs.describe() + ", and " + named(links_.rank) + " something else";
  raise(FailureCode::kMismatch, peer,
        "in operation " + std::to_string(before) + " " + named(peer) + " called " + what +
            kSameCalls);
}

}  // namespace commute
