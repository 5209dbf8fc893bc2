// SPDX-License-Identifier: Apache-2.0
#include "store/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

namespace commute {
namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kHugePageBytes = 2 << 20;

size_t rounded_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Raises std::bad_alloc.
std::byte* mapped(size_t bytes) {
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(data);
}

// On a huge page's border: maps one more than is needed and gives the ends back.
std::byte* mapped_huge(size_t bytes) {
  std::byte* const data = mapped(bytes + kHugePageBytes);
  const size_t before = rounded_up(reinterpret_cast<uintptr_t>(data), kHugePageBytes) -
                        reinterpret_cast<uintptr_t>(data);
  if (before > 0) ::munmap(data, before);
  if (before < kHugePageBytes) ::munmap(data + before + bytes, kHugePageBytes - before);
  // Only a wish: without huge pages it works as well, slower.
  ::madvise(data + before, bytes, MADV_HUGEPAGE);
  return data + before;
}

}  // namespace

Pages::~Pages() {
  populator_.close();
  for (const Region& region : regions_) ::munmap(region.data, region.bytes);
}

void Pages::add_region(size_t at_least) {
  const size_t next = regions_.empty() ? kFirstRegionBytes : 2 * regions_.back().bytes;
  const size_t bytes =
      std::max(std::min(next, kRegionBytes), rounded_up(at_least, kHugePageBytes / 2));
  regions_.reserve(regions_.size() + 1);
  regions_.push_back({bytes < kHugePageBytes ? mapped(bytes) : mapped_huge(bytes), bytes, 0, 0});
}

// In steps of huge pages. Small stores have no large regions, and need no thread.
void Pages::ask_ahead(Region& region) {
  const size_t end = std::min(region.used + kAheadBytes, region.bytes);
  if (region.bytes < 2 * kAheadBytes || end < region.ready + kHugePageBytes) return;
  const size_t bytes = (end - region.ready) / kHugePageBytes * kHugePageBytes;
  populator_.ask({region.data + region.ready, bytes});
  region.ready += bytes;
}

std::byte* Pages::take(size_t bytes) {
  bytes = rounded_up(bytes, kLineBytes);
  std::byte*& first = free_[bytes];  // made here, so that `give` needs no memory
  std::byte* block = first;
  if (block != nullptr) {
    std::memcpy(&first, block, sizeof first);
    std::memset(block, 0, bytes);
  } else {
    if (regions_.empty() || regions_.back().bytes - regions_.back().used < bytes) add_region(bytes);
    block = regions_.back().data + regions_.back().used;
    regions_.back().used += bytes;
    ask_ahead(regions_.back());
  }
  taken_ += bytes;
  return block;
}

void Pages::give(std::byte* block, size_t bytes) noexcept {
  bytes = rounded_up(bytes, kLineBytes);
  std::byte*& first = free_.find(bytes)->second;
  std::memcpy(block, &first, sizeof first);
  first = block;
  taken_ -= bytes;
}

}  // namespace commute
