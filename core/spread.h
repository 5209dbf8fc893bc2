// SPDX-License-Identifier: Apache-2.0
// Spreading the ranks of a host over its cores.
//
// Ranks that outnumber cores and give way to each other never let a core fall idle, so the
// scheduler sees no reason to move one, and may leave three of them on one core and one on the
// other for as long as they work: everything then takes 3/2 of the time. While it waits, a rank
// therefore looks where the others last ran (they say so in their outboxes), and if it is the last
// one of a core that has at least two more than another, it moves there. Its affinity is given back
// at once; where it runs next is again the scheduler's business. Workers and shards do the same.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "operation.h"
#include "outbox.h"

namespace commute {

class Spread {
 public:
  // Called now and then by a rank that waits.
  void look(Outboxes& outboxes, Clock::time_point now);
  // The same for anybody who knows where the others run: `cores` are theirs and, last, mine.
  // Returns where this thread runs now.
  int look(std::vector<int> cores, Clock::time_point now);

 private:
  // A rank that computes elsewhere meanwhile must not be chased from core to core. A shard, which
  // alone moves, may move again soon: whom it wakes is most often woken on its own core.
  static constexpr std::chrono::milliseconds kRest{5};
  static constexpr std::chrono::microseconds kRestOfShard{100};

  int move(const std::vector<int>& cores, int self, Clock::time_point now);

  Clock::time_point not_before_{};
};

// The core to which the rank that runs on `mine` should move, or -1. `cores` are where the ranks
// run, by rank, -1 where unknown; `allowed` where this one may run.
int better_core(const std::vector<int>& cores, int rank, const cpu_set_t& allowed);

}  // namespace commute
