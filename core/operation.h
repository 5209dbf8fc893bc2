// SPDX-License-Identifier: Apache-2.0
// One call of a rank: what the queue holds, what a handle points to.
//
// States: queued -> running -> done | failed. Only the thread that holds the engine's progress lock
// changes the state; `finish` publishes the result (release), `finished` reads it (acquire), from
// any thread. The caller keeps the arrays alive until `finished`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "combine.h"
#include "failure.h"
#include "frame.h"

namespace commute {

using Clock = std::chrono::steady_clock;

class Executor;

// An array that every rank has in its room, so that all reach all of them.
struct SharedArray {
  uint64_t number = 0;         // the same on all ranks
  std::vector<std::byte*> at;  // by rank

  // For the fingerprint of a call: ranks that name different arrays, or parts, must not meet.
  uint32_t mark(size_t offset) const {
    return static_cast<uint32_t>((number << 48 ^ offset) * 0x9e3779b97f4a7c15u >> 32);
  }
};

struct Operation {
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };

  Call call;
  uint64_t sequence =
      0;  // number of the operation in its group, or of the message in its pair and direction
  std::shared_ptr<Executor> executor;  // the bound plan; null for send and recv
  int peer = -1;                       // send and recv only
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::shared_ptr<const SharedArray> array;  // direct plans: what `out` is part of
  size_t array_offset = 0;                   // where in it `out` begins
  const Combine* combine = nullptr;          // of ReduceOp::kCustom; the caller's, like the arrays
  Clock::time_point deadline = Clock::time_point::max();
  double timeout_s = 0;  // what the deadline was made from, for messages
  uint64_t record = 0;   // its number in the recorder

  // Progress of a send or recv.
  bool begun = false;
  size_t moved = 0;

  Failure failure;  // valid once finished() and state == kFailed
  std::atomic<State> state{State::kQueued};

  bool finished() const { return state.load(std::memory_order_acquire) >= State::kDone; }
  void finish() { state.store(State::kDone, std::memory_order_release); }
  void fail(Failure why) {
    failure = std::move(why);
    state.store(State::kFailed, std::memory_order_release);
  }
};

}  // namespace commute
