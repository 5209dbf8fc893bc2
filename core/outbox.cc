// SPDX-License-Identifier: Apache-2.0
#include "outbox.h"

#include <utility>

namespace commute {

MemoryArena::MemoryArena(std::vector<std::shared_ptr<Poller>> pollers, size_t slot_bytes)
    : pollers_(std::move(pollers)),
      slot_bytes_(slot_bytes),
      slots_(pollers_.size(), std::vector<std::byte>(slot_bytes * kOutboxSlots)),
      counters_(pollers_.size()) {}

std::byte* MemoryOutboxes::slot(int rank, uint64_t tile) {
  return arena_->slots_[size_t(rank)].data() + (tile % kOutboxSlots) * arena_->slot_bytes_;
}

void MemoryOutboxes::signal(uint32_t signal) {
  arena_->counters_[size_t(rank_)].value[signal].fetch_add(1, std::memory_order_release);
  for (size_t peer = 0; peer < arena_->pollers_.size(); ++peer)
    if (peer != size_t(rank_)) arena_->pollers_[peer]->wake();
}

uint64_t MemoryOutboxes::signalled(int rank, uint32_t signal) const {
  return arena_->counters_[size_t(rank)].value[signal].load(std::memory_order_acquire);
}

}  // namespace commute
