// SPDX-License-Identifier: Apache-2.0
#include "memory_link.h"

#include <algorithm>
#include <cstring>

namespace commute {

size_t MemoryPipe::write(const void* bytes, size_t count) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw LinkClosed("the peer closed its connection");
  count = std::min(count, ring_.size() - (written_ - read_));
  const size_t at = written_ % ring_.size();
  const size_t first = std::min(count, ring_.size() - at);
  std::memcpy(ring_.data() + at, bytes, first);
  std::memcpy(ring_.data(), static_cast<const char*>(bytes) + first, count - first);
  written_ += count;
  return count;
}

size_t MemoryPipe::read(void* into, size_t count) {
  const std::lock_guard lock(mutex_);
  if (closed_ && written_ == read_) throw LinkClosed("the peer closed its connection");
  count = std::min(count, written_ - read_);
  const size_t at = read_ % ring_.size();
  const size_t first = std::min(count, ring_.size() - at);
  std::memcpy(into, ring_.data() + at, first);
  std::memcpy(static_cast<char*>(into) + first, ring_.data(), count - first);
  read_ += count;
  return count;
}

void MemoryPipe::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

size_t MemoryLink::write(const iovec* pieces, int count) {
  size_t total = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].iov_len == 0) continue;
    const size_t moved = outgoing_->write(pieces[i].iov_base, pieces[i].iov_len);
    total += moved;
    if (moved < pieces[i].iov_len) break;
  }
  if (total > 0) peer_->wake();
  return total;
}

size_t MemoryLink::read(void* into, size_t bytes) {
  if (bytes == 0) return 0;
  const size_t moved = incoming_->read(into, bytes);
  if (moved > 0) peer_->wake();
  return moved;
}

void MemoryLink::close(std::chrono::steady_clock::time_point) {
  outgoing_->close();
  incoming_->close();
  peer_->wake();
}

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> memory_link_pair(std::shared_ptr<Poller> a,
                                                                         std::shared_ptr<Poller> b,
                                                                         size_t capacity_bytes) {
  auto there = std::make_shared<MemoryPipe>(capacity_bytes);
  auto back = std::make_shared<MemoryPipe>(capacity_bytes);
  return {std::make_unique<MemoryLink>(there, back, b),
          std::make_unique<MemoryLink>(back, there, a)};
}

}  // namespace commute
