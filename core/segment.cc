// SPDX-License-Identifier: Apache-2.0
#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace commute {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void raise_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; older headers lack the name
#endif
constexpr size_t kPageBytes = 4096;

std::byte* map_shared(int fd, size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) raise_errno("mapping shared memory");
  return static_cast<std::byte*>(at);
}

}  // namespace

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment Segment::create(size_t bytes, size_t room, Touch touch) {
  const int fd = ::memfd_create("commute", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) raise_errno("memfd_create");
  Segment segment(fd, nullptr, bytes + room);
  // fallocate fails here, with an error, where touching would end the process with a signal.
  errno = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (errno != 0) raise_errno("reserving shared memory");
  if (room > 0 && ::ftruncate(fd, static_cast<off_t>(bytes + room)) != 0)
    raise_errno("making room in shared memory");
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) raise_errno("sealing shared memory");
  segment.data_ = map_shared(fd, bytes + room);
  if (room > 0) ::madvise(segment.data_ + bytes, room, MADV_DONTDUMP);
  if (touch == Touch::kNow) segment.populate(0, bytes);
  return segment;
}

Segment Segment::map(int fd, size_t bytes, Touch touch) {
  Segment segment(fd, nullptr, 0);
  struct stat found{};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &found) != 0 ||
      static_cast<size_t>(found.st_size) < bytes)
    throw std::runtime_error("a peer passed something that is not its shared memory");
  segment.bytes_ = static_cast<size_t>(found.st_size);
  segment.data_ = map_shared(fd, segment.bytes_);
  // All that is there; nothing of its room is reserved when it is passed on.
  constexpr size_t kBlockBytes = 512;
  const size_t there = std::min(segment.bytes_, size_t(found.st_blocks) * kBlockBytes);
  if (touch == Touch::kNow) segment.populate(0, there);
  if (there < segment.bytes_)
    ::madvise(segment.data_ + there, segment.bytes_ - there, MADV_DONTDUMP);
  return segment;
}

bool Segment::reserve(size_t at, size_t bytes) const {
  return ::posix_fallocate(fd_, static_cast<off_t>(at), static_cast<off_t>(bytes)) == 0;
}

void Segment::release(size_t at, size_t bytes) const {
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
              static_cast<off_t>(bytes));
}

void Segment::populate(size_t at, size_t bytes) const {
  std::byte* const begin = data_ + at / kPageBytes * kPageBytes;
  std::byte* const end = data_ + at + bytes;
  if (begin == end || ::madvise(begin, size_t(end - begin), MADV_POPULATE_WRITE) == 0) return;
  for (std::byte* page = begin; page < end; page += kPageBytes)
    *static_cast<volatile std::byte*>(page);
}

}  // namespace commute
