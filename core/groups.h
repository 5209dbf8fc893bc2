// SPDX-License-Identifier: Apache-2.0
// The groups of one process, for its health thread: which engine is told what.
//
// Control frames name ranks of the world, and a group by its id; an engine knows only the ranks of
// its own group. This is where the two meet. Rules:
//   1. A process that is lost, or leaves, is gone from every group that it is in: all are told.
//   2. What breaks one group, and a goodbye to one group, is told to that group alone.
//   3. News of a group that has no engine here yet is kept until it has one: its members open it
//   one after the other. So is who is gone, for groups that are made later.
//
// Threads: every function may be called from any thread. Engines are told without locks held.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "engine.h"

namespace commute {

class Groups {
 public:
  explicit Groups(std::shared_ptr<Engine> world) : world_(std::move(world)) {}

  // Called with what breaks a group, in the ranks of the world: it tells the other processes. Set
  // before groups are added.
  void on_failure(std::function<void(const Failure&)> callback) { spread_ = std::move(callback); }

  // `ranks`: the members, by their ranks in the world, in the group's order.
  void add(uint64_t id, std::vector<int> ranks, std::shared_ptr<Engine> engine);
  void remove(uint64_t id);

  // What the health thread hears; ranks are those of the world.
  void failed(const Failure& failure);
  void left(int rank);
  void left_group(uint64_t id, int rank);

 private:
  struct Part {
    std::vector<int> ranks;
    std::shared_ptr<Engine> engine;
  };
  // Nobody keeps news of more groups than this that may never be opened here.
  static constexpr size_t kEarlyMax = 1024;

  static int place_of(int rank, const std::vector<int>& ranks);  // -1 when it is not there
  static Failure to_group(Failure failure, const std::vector<int>& ranks);
  static Failure to_world(Failure failure, uint64_t id, const std::vector<int>& ranks);

  const std::shared_ptr<Engine> world_;
  std::function<void(const Failure&)> spread_;
  std::mutex mutex_;  // guards everything below
  std::map<uint64_t, Part> parts_;
  std::map<uint64_t, Failure> early_failures_;       // of groups without an engine
  std::set<std::pair<uint64_t, int>> early_leaves_;  // likewise
  std::map<int, Failure> lost_;                      // by rank
  std::set<int> left_;
};

}  // namespace commute
