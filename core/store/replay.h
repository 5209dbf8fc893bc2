// SPDX-License-Identifier: Apache-2.0
// Proof that slots change by their ops alone: what is recorded, encoded and decoded, makes the same
// slots again, byte for byte. For tests; it holds everything twice.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "store/shard.h"

namespace commute {

class Replay {
 public:
  // To be given to shards; any thread.
  static Shard::Record recorder(const std::shared_ptr<Replay>& replay) {
    if (!replay) return {};
    return [replay](uint32_t slot, const SlotOp& op) { replay->record(slot, op); };
  }

  // Compares with the slots of a shard; call it when the shard does nothing more.
  void compare(const Shard& shard) {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, slot] : shard.slots()) {
      ++compared_;
      if (slot.image() == again_[number].image()) continue;
      differing_ += std::to_string(number);
      differing_ += " ";
    }
  }

  // "12 slots, 340 ops, equal", or which slots differ.
  std::string report() const {
    const std::lock_guard lock(mutex_);
    return std::to_string(compared_) + " slots, " + std::to_string(ops_) + " ops, " +
           (differing_.empty() ? "equal" : "DIFFERENT in slots " + differing_);
  }

 private:
  void record(uint32_t slot, const SlotOp& op) {
    const auto bytes = op.encode();
    const std::lock_guard lock(mutex_);
    again_[slot].apply(SlotOp::decode(bytes));
    ++ops_;
  }

  mutable std::mutex mutex_;
  std::map<uint32_t, Slot> again_;
  uint64_t ops_ = 0;
  uint64_t compared_ = 0;
  std::string differing_;
};

}  // namespace commute
