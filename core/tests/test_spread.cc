// SPDX-License-Identifier: Apache-2.0
// Which rank moves to which core, and that its affinity survives the move.
#include "../spread.h"

#include <unistd.h>

#include "check.h"

using namespace commute;

namespace {

cpu_set_t cores(std::initializer_list<int> which) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : which) CPU_SET(core, &set);
  return set;
}

TEST(the_last_rank_of_a_crowded_core_moves) {
  const cpu_set_t both = cores({0, 1});
  CHECK_EQ(better_core({0, 0, 1, 0}, 3, both), 1);
  CHECK_EQ(better_core({0, 0, 1, 0}, 1, both), -1);  // not the last one there
  CHECK_EQ(better_core({0, 0, 1, 0}, 2, both), -1);
  CHECK_EQ(better_core({0, 0}, 1, both), 1);
  CHECK_EQ(better_core({1, 1, 1, 1}, 3, both), 0);
}

TEST(nobody_moves_where_nothing_is_won) {
  const cpu_set_t both = cores({0, 1});
  CHECK_EQ(better_core({0, 1, 0, 1}, 2, both), -1);
  CHECK_EQ(better_core({0, 1, 0}, 2, both), -1);
  CHECK_EQ(better_core({0}, 0, both), -1);
  CHECK_EQ(better_core({0, 0, 0}, 2, cores({0})), -1);  // it may not
  CHECK_EQ(better_core({-1, -1, 0}, 2, both), -1);      // the others have not said
}

TEST(the_emptiest_core_is_taken) {
  CHECK_EQ(better_core({0, 0, 0, 1, 2, 2}, 2, cores({0, 1, 2, 5})), 5);
  CHECK_EQ(better_core({7, 7, 7}, 2, cores({0, 1, 7})), 0);
}

TEST(looking_leaves_the_affinity_as_it_was) {
  cpu_set_t before, after;
  CHECK_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  Outboxes mine(1, 2, 4096), other(0, 2, 4096);
  mine.attach(0, other.own(), ::dup(0));
  other.runs_on(::sched_getcpu());
  Spread spread;
  spread.look(mine, Clock::now());
  CHECK_EQ(::sched_getaffinity(0, sizeof after, &after), 0);
  CHECK(CPU_EQUAL(&before, &after));
  CHECK(mine.core_of(1) >= 0);
}

}  // namespace
