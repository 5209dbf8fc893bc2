// SPDX-License-Identifier: Apache-2.0
// Who is told what, when ranks of the world go and groups of it break.
#include "../groups.h"

#include "check.h"

namespace {

using namespace commute;

std::shared_ptr<Engine> engine_of(int rank, int ranks, uint32_t group) {
  return std::make_shared<Engine>(Engine::Settings{rank, ranks, group, 1},
                                  std::make_shared<Poller>());
}

// This process is rank 1 of a world of four, and in two groups of it.
struct Process {
  std::shared_ptr<Engine> world = engine_of(1, 4, 0);
  std::shared_ptr<Engine> with = engine_of(1, 2, 7);     // ranks 3 and 1
  std::shared_ptr<Engine> without = engine_of(0, 2, 8);  // ranks 1 and 0
  Groups groups{world};
  std::vector<Failure> spread;

  Process() {
    groups.on_failure([this](const Failure& failure) { spread.push_back(failure); });
    groups.add(7, {3, 1}, with);
    groups.add(8, {1, 0}, without);
  }
};

TEST(a_lost_rank_is_lost_to_every_group_it_is_in) {
  Process process;
  process.groups.failed({FailureCode::kPeerLost, 3, -1, 0, "killed"});
  CHECK_EQ(process.world->failure().rank, 3);
  CHECK_EQ(process.with->failure().rank, 0);
  CHECK(process.with->failure().code == FailureCode::kPeerLost);
  CHECK_EQ(process.with->failure().text, std::string("killed"));
  CHECK(process.without->failure().code == FailureCode::kNone);
}

TEST(what_breaks_the_world_breaks_no_group) {
  Process process;
  process.groups.failed({FailureCode::kTimeout, 3, 3, 5, "too slow"});
  CHECK(process.world->failure().code == FailureCode::kTimeout);
  CHECK(process.with->failure().code == FailureCode::kNone);
}

TEST(what_breaks_a_group_breaks_that_one) {
  Process process;
  process.groups.failed({FailureCode::kMismatch, 1, 3, 5, "different", 7});
  CHECK(process.with->failure().code == FailureCode::kMismatch);
  CHECK_EQ(process.with->failure().rank, 1);
  CHECK_EQ(process.with->failure().by, 0);
  CHECK(process.world->failure().code == FailureCode::kNone);
  CHECK(process.without->failure().code == FailureCode::kNone);
}

TEST(a_group_tells_others_in_the_ranks_of_the_world) {
  Process process;
  process.with->fail({FailureCode::kTimeout, 0, 1, 9, "too slow"});
  CHECK_EQ(process.spread.size(), 1u);
  CHECK_EQ(process.spread[0].rank, 3);
  CHECK_EQ(process.spread[0].by, 1);
  CHECK_EQ(process.spread[0].group, 7u);
  CHECK_EQ(process.spread[0].operation, 9u);
}

TEST(a_goodbye_to_the_world_is_one_to_all_groups) {
  Process process;
  process.groups.left(3);
  CHECK(process.world->has_left(3) && process.with->has_left(0));
  CHECK(!process.without->has_left(0) && !process.without->has_left(1));
  process.groups.left_group(8, 0);
  CHECK(process.without->has_left(1));
  CHECK(!process.world->has_left(0));
  process.groups.left_group(8, 2);  // no member: nobody is meant
}

TEST(news_waits_for_a_group_that_is_opened_later) {
  Process process;
  process.groups.failed({FailureCode::kMismatch, 2, 0, 1, "different", 9});
  process.groups.left_group(10, 2);
  process.groups.failed({FailureCode::kPeerLost, 3, -1, 0, "killed"});
  process.groups.left(0);
  const auto broken = engine_of(0, 3, 9);
  process.groups.add(9, {1, 0, 2}, broken);
  CHECK(broken->failure().code == FailureCode::kMismatch);
  CHECK_EQ(broken->failure().rank, 2);
  CHECK_EQ(broken->failure().by, 1);
  CHECK(broken->has_left(1) && !broken->has_left(2));
  const auto left = engine_of(0, 2, 10);
  process.groups.add(10, {1, 2}, left);
  CHECK(left->has_left(1) && left->failure().code == FailureCode::kNone);
  const auto lost = engine_of(1, 2, 11);
  process.groups.add(11, {3, 1}, lost);
  CHECK(lost->failure().code == FailureCode::kPeerLost && lost->failure().rank == 0);
}

TEST(a_group_that_was_removed_is_not_told) {
  Process process;
  process.groups.remove(7);
  process.groups.failed({FailureCode::kPeerLost, 3, -1, 0, "killed"});
  CHECK(process.with->failure().code == FailureCode::kNone);
}

}  // namespace
