// SPDX-License-Identifier: Apache-2.0
#include "groups.h"

#include <algorithm>
#include <iterator>
#include <optional>

namespace commute {

int Groups::place_of(int rank, const std::vector<int>& ranks) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : int(std::distance(ranks.begin(), found));
}

Failure Groups::to_group(Failure failure, const std::vector<int>& ranks) {
  failure.rank = place_of(failure.rank, ranks);
  failure.by = place_of(failure.by, ranks);
  return failure;
}

Failure Groups::to_world(Failure failure, uint64_t id, const std::vector<int>& ranks) {
  const auto of_world = [&ranks](int rank) {
    return rank >= 0 && size_t(rank) < ranks.size() ? ranks[size_t(rank)] : -1;
  };
  failure.rank = of_world(failure.rank);
  failure.by = of_world(failure.by);
  failure.group = id;
  return failure;
}

void Groups::add(uint64_t id, std::vector<int> ranks, std::shared_ptr<Engine> engine) {
  engine->on_failure([spread = spread_, id, ranks](const Failure& failure) {
    if (spread) spread(to_world(failure, id, ranks));
  });
  std::vector<int> gone;
  std::optional<Failure> broken;
  {
    const std::lock_guard lock(mutex_);
    parts_[id] = {ranks, engine};
    for (const int rank : ranks) {
      if (left_.contains(rank) || early_leaves_.erase({id, rank}) > 0) gone.push_back(rank);
      if (const auto found = lost_.find(rank); !broken && found != lost_.end())
        broken = found->second;
    }
    if (const auto found = early_failures_.find(id); found != early_failures_.end()) {
      if (!broken) broken = found->second;
      early_failures_.erase(found);
    }
  }
  for (const int rank : gone) engine->peer_left(place_of(rank, ranks));
  if (broken) engine->fail(to_group(std::move(*broken), ranks));
}

void Groups::remove(uint64_t id) {
  const std::lock_guard lock(mutex_);
  parts_.erase(id);
}

void Groups::failed(const Failure& failure) {
  std::vector<Part> told;
  {
    const std::lock_guard lock(mutex_);
    if (failure.group != 0) {
      const auto found = parts_.find(failure.group);
      if (found != parts_.end())
        told.push_back(found->second);
      else if (early_failures_.size() < kEarlyMax)
        early_failures_.emplace(failure.group, failure);
    } else if (failure.code == FailureCode::kPeerLost && failure.rank >= 0) {
      lost_.emplace(failure.rank, failure);
      for (const auto& [id, part] : parts_)
        if (place_of(failure.rank, part.ranks) >= 0) told.push_back(part);
    }
  }
  if (failure.group == 0) world_->fail(failure);
  for (const Part& part : told) part.engine->fail(to_group(failure, part.ranks));
}

void Groups::left(int rank) {
  std::vector<Part> told;
  {
    const std::lock_guard lock(mutex_);
    left_.insert(rank);
    for (const auto& [id, part] : parts_)
      if (place_of(rank, part.ranks) >= 0) told.push_back(part);
  }
  world_->peer_left(rank);
  for (const Part& part : told) part.engine->peer_left(place_of(rank, part.ranks));
}

void Groups::left_group(uint64_t id, int rank) {
  Part part;
  {
    const std::lock_guard lock(mutex_);
    const auto found = parts_.find(id);
    if (found == parts_.end()) {
      if (early_leaves_.size() < kEarlyMax) early_leaves_.emplace(id, rank);
      return;
    }
    part = found->second;
  }
  part.engine->peer_left(place_of(rank, part.ranks));  // which knows what -1 means
}

}  // namespace commute
