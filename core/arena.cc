// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <unistd.h>

#include <utility>

namespace commute {
namespace {

size_t in_pages(size_t bytes) {
  const size_t pages = (bytes + Arena::kPageBytes - 1) / Arena::kPageBytes;
  return std::max<size_t>(pages, 1) * Arena::kPageBytes;
}

}  // namespace

std::optional<size_t> Arena::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > segment_->bytes()) return std::nullopt;
  bytes = in_pages(bytes);
  const auto found = take_free(bytes);
  return found ? found : take_new(bytes);
}

// The smallest that is large enough; one that has memory rather than one that has none.
std::optional<size_t> Arena::take_free(size_t bytes) {
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second.bytes < bytes) continue;
    const auto worth = [](const Free& free) { return std::pair(!free.reserved, free.bytes); };
    if (best == free_.end() || worth(block->second) < worth(best->second)) best = block;
  }
  if (best == free_.end()) return std::nullopt;
  const auto [at, found] = *best;
  if (!found.reserved) {
    if (!segment_->reserve(at, bytes)) return std::nullopt;
    segment_->populate(at, bytes);
  } else {
    kept_ -= bytes;
  }
  free_.erase(best);
  if (found.bytes > bytes) free_.emplace(at + bytes, Free{found.bytes - bytes, found.reserved});
  return at;
}

std::optional<size_t> Arena::take_new(size_t bytes) {
  if (bytes > segment_->bytes() - top_ || !segment_->reserve(top_, bytes)) return std::nullopt;
  segment_->populate(top_, bytes);
  return std::exchange(top_, top_ + bytes);
}

void Arena::give(size_t at, size_t bytes) {
  if (::getpid() != maker_) return;  // a forked child's: the memory is its parent's as well
  const std::lock_guard lock(mutex_);
  bytes = in_pages(bytes);
  const bool keeps = kept_ + bytes <= kept_bytes_;
  if (keeps)
    kept_ += bytes;
  else
    segment_->release(at, bytes);
  join(free_.emplace(at, Free{bytes, keeps}).first);
}

void Arena::join(Blocks::iterator block) {
  const auto touches = [&](Blocks::iterator one, Blocks::iterator other) {
    return one->first + one->second.bytes == other->first &&
           one->second.reserved == other->second.reserved;
  };
  if (const auto next = std::next(block); next != free_.end() && touches(block, next)) {
    block->second.bytes += next->second.bytes;
    free_.erase(next);
  }
  if (block != free_.begin() && touches(std::prev(block), block)) {
    std::prev(block)->second.bytes += block->second.bytes;
    free_.erase(block);
  }
}

size_t Arena::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_;
}

}  // namespace commute
