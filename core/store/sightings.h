// SPDX-License-Identifier: Apache-2.0
// How often keys that have no row yet were pushed: a counting filter, so that a rare key costs a
// few bytes instead of a row.
//
//   entry = 28 bits of the key's hash | 4 bits of count        0: free
//
// Open addressing by the first bits of the 28. Two keys that share all 28, in one slot, are taken
// for one, and a row may be made too early: that is all the harm. When half of the entries are used
// their number is doubled; at kEntriesMax all counts are halved instead, which forgets the keys
// that were seen once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace commute {

class Sightings {
 public:
  static constexpr uint32_t kSeenMax = 15;
  static constexpr size_t kEntriesMax = 1 << 15;  // per slot and table

  // Counts this one; returns how often the key has been seen. `rest` is its hash within the slot.
  uint32_t see(uint64_t rest) {
    if (2 * used_ >= entries_.size()) make_room();
    uint32_t& entry = find(static_cast<uint32_t>(rest >> 36) << 4);
    used_ += entry == 0;
    if ((entry & kSeenMax) < kSeenMax)
      entry = (static_cast<uint32_t>(rest >> 36) << 4) | ((entry & kSeenMax) + 1);
    return entry & kSeenMax;
  }
  const std::vector<uint32_t>& entries() const { return entries_; }

 private:
  static constexpr size_t kEntriesFirst = 64;

  // The entry with this hash, or the free one where it belongs.
  uint32_t& find(uint32_t hash) {
    const int bits = std::countr_zero(entries_.size());
    size_t at = hash >> (32 - bits);
    while (entries_[at] != 0 && (entries_[at] & ~kSeenMax) != hash) at = (at + 1) % entries_.size();
    return entries_[at];
  }

  void make_room() {
    const bool forgets = entries_.size() >= kEntriesMax;
    const size_t size = forgets ? kEntriesMax : std::max(kEntriesFirst, 2 * entries_.size());
    const auto old = std::exchange(entries_, std::vector<uint32_t>(size));
    used_ = 0;
    for (const uint32_t entry : old) {
      const uint32_t count = forgets ? (entry & kSeenMax) / 2 : entry & kSeenMax;
      if (count == 0) continue;
      find(entry & ~kSeenMax) = (entry & ~kSeenMax) | count;
      ++used_;
    }
    if (forgets && 2 * used_ >= entries_.size()) make_room();
  }

  std::vector<uint32_t> entries_;  // a power of two
  size_t used_ = 0;
};

}  // namespace commute
