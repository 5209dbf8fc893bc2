// SPDX-License-Identifier: Apache-2.0
// A piece of memory that several processes map: a memfd, passed from process to process as a
// descriptor.
//
// It has no name in any file system, so a crash leaves no litter, and it does not live in /dev/shm,
// so a container's small one does no harm. Its size is sealed: a peer cannot shrink it under our
// feet.
//
// A segment may have room at its end that takes no memory until it is reserved, piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commute {

class Segment {
 public:
  Segment() = default;
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  // Whether whoever maps it touches its pages now, or some of them later, by `populate`.
  enum class Touch : uint8_t { kNow, kLater };

  // New memory, zero, and `room` more. Raises std::system_error.
  static Segment create(size_t bytes, size_t room = 0, Touch touch = Touch::kNow);
  // Maps a peer's segment; takes ownership of `fd`. Raises std::runtime_error when it is not a
  // sealed memfd of at least `bytes`.
  static Segment map(int fd, size_t bytes, Touch touch = Touch::kNow);

  // Of the room, whole pages: from now on there is memory. False when there is none.
  bool reserve(size_t at, size_t bytes) const;
  // Gives the memory back; what it held is lost, for all who map it.
  void release(size_t at, size_t bytes) const;
  // Touches pages now rather than at first use. They must be reserved, by whoever made the segment.
  void populate(size_t at, size_t bytes) const;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  Segment(int fd, std::byte* data, size_t bytes) : fd_(fd), data_(data), bytes_(bytes) {}

  int fd_ = -1;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace commute
