// SPDX-License-Identifier: Apache-2.0
// Arrays that local peers reach: blocks in the room of a rank's own segment.
//
//   room = block | block | ...     in page units; a block is somebody's, or free
//
// A block that was given back stays as it is, its pages touched, for the next one of its size: a
// page that is new to the process costs as much as reducing it several times. Beyond kKeptBytes of
// such blocks their memory goes back to the system, while their place stays.
//
// Invariants: 1. free blocks do not touch each other unless only one of them has memory. 2. What
// is taken lies below `top_`. 3. An array keeps its arena, and so the mapping, alive.
//
// Any thread may give a block back: an array's last reference goes when it goes.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "segment.h"

namespace commute {

class Arena {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kKeptBytes = 512 << 20;

  // In the room of the segment, from `begin` on.
  Arena(std::shared_ptr<Segment> segment, size_t begin, size_t kept_bytes = kKeptBytes)
      : segment_(std::move(segment)), top_(begin), kept_bytes_(kept_bytes) {}

  // Where in the segment a block of at least so many bytes begins; nothing when there is no memory.
  std::optional<size_t> take(size_t bytes);
  void give(size_t at, size_t bytes);

  std::byte* data(size_t at) const { return segment_->data() + at; }
  size_t kept() const;  // bytes that nobody uses

 private:
  struct Free {
    size_t bytes;
    bool reserved;  // there is memory
  };
  using Blocks = std::map<size_t, Free>;

  std::optional<size_t> take_free(size_t bytes);
  std::optional<size_t> take_new(size_t bytes);
  void join(Blocks::iterator block);

  std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  Blocks free_;  // by where they begin
  size_t top_;   // beyond, nothing was ever taken
  size_t kept_ = 0;
  size_t kept_bytes_;
  const pid_t maker_ = ::getpid();
};

}  // namespace commute
