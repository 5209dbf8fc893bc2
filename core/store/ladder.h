// SPDX-License-Identifier: Apache-2.0
// How a thread of the store waits: look again for a while giving the core to others, then sleep.
// The while is shorter than in collectives, because what is waited for is often a copy that needs
// the core (2 workers and 2 servers on 2 cores, 16 MB: 30 ms with 200 us, 10 with 50).
//
//   moved        something happened: back to the first rung
//   rest         nothing happened; false once it is time to sleep
//
// Beside a process that computes, giving way costs its whole time slice, milliseconds, while a
// sleeper is scheduled at once when it is woken. So a long absence turns yielding off for a while.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "poller.h"

namespace commute {

class Ladder {
 public:
  using Clock = std::chrono::steady_clock;

  // Whether there is a core for everybody who takes part.
  void may_spin(bool yes) { may_spin_ = yes; }

  // Any thread, also while another rests.
  void moved() { idle_since_.store(kBusy, std::memory_order_relaxed); }

  // Whether it is time to see that this thread has a core of its own.
  bool should_spread() { return ++rests_ % kRestsPerSpread == 0; }

  // `asks_kernel`: whether news may come by a socket.
  bool rest(Poller& poller, bool asks_kernel) {
    const auto now = Clock::now();
    Clock::rep busy = kBusy;
    idle_since_.compare_exchange_strong(busy, now.time_since_epoch().count());
    const auto idle =
        busy == kBusy ? Clock::duration{0} : now.time_since_epoch() - Clock::duration{busy};
    if (may_spin_ && idle < kSpin) return true;
    if (crowded_ > 0) {
      --crowded_;
      return false;
    }
    if (idle >= kYield) return false;
    if (asks_kernel && ++yields_ % kYieldsPerLook == 0 && poller.sleep(0)) return true;
    sched_yield();
    if (Clock::now() - now > kSliceOfOthers) crowded_ = kCrowdedRests;
    return true;
  }

 private:
  static constexpr std::chrono::microseconds kSpin{4};
  static constexpr std::chrono::microseconds kYield{50};
  static constexpr std::chrono::milliseconds kSliceOfOthers{3};
  static constexpr uint32_t kYieldsPerLook = 4;
  static constexpr uint32_t kCrowdedRests = 200;
  static constexpr uint32_t kRestsPerSpread = 8;

  static constexpr Clock::rep kBusy = -1;

  std::atomic<Clock::rep> idle_since_{kBusy};  // since the clock's epoch
  bool may_spin_ = false;
  uint32_t rests_ = 0;
  uint32_t yields_ = 0;
  uint32_t crowded_ = 0;
};

}  // namespace commute
