// SPDX-License-Identifier: Apache-2.0
// Memory of a shard's rows: blocks cut from large regions that ask for huge pages.
//
// Rows are looked up all over hundreds of megabytes, and with small pages half of the time goes
// into walking page tables. Blocks of a few kilobytes, one after the other in regions of 32 MB (the
// first ones are smaller, for small stores), let a slot grow a little at a time, without
// holes and without a large table beside the old one. A block that is given back is used again for
// one of the same size; regions go with the last owner. Of large regions the next few megabytes are
// made ready by another thread.
//
// One thread at a time.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "store/populator.h"

namespace commute {

class Pages {
 public:
  Pages() = default;
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Zeros, aligned to 64 bytes. Raises std::bad_alloc.
  std::byte* take(size_t bytes);
  // `bytes` as they were taken.
  void give(std::byte* block, size_t bytes) noexcept;
  size_t bytes() const { return taken_; }  // in blocks that are out

 private:
  static constexpr size_t kFirstRegionBytes = 1 << 20;
  static constexpr size_t kRegionBytes = 32 << 20;

  static constexpr size_t kAheadBytes = 8 << 20;

  struct Region {
    std::byte* data;
    size_t bytes;
    size_t used;
    size_t ready;  // or asked for
  };
  void add_region(size_t at_least);
  void ask_ahead(Region& region);

  std::vector<Region> regions_;
  // By size: the first block to use again; each begins with the address of the next one.
  std::map<size_t, std::byte*> free_;
  size_t taken_ = 0;
  Populator populator_;
};

}  // namespace commute
