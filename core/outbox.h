// SPDX-License-Identifier: Apache-2.0
// Outboxes: memory of each rank that all its local peers read, and counters by which they tell each
// other.
//
// One writer, many readers: a rank writes only its own outbox and its own counters. `signal`
// publishes what was written before it (release); whoever has seen a count through `signalled`
// (acquire) sees those writes. Counters only grow. The in-memory twin below serves ranks that are
// threads of one process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan.h"
#include "poller.h"

namespace commute {

class Outboxes {
 public:
  virtual ~Outboxes() = default;
  virtual size_t slot_bytes() const = 0;
  virtual std::byte* slot(int rank, uint64_t tile) = 0;
  virtual void signal(uint32_t signal) = 0;
  virtual uint64_t signalled(int rank, uint32_t signal) const = 0;
};

// What the threads of one process share.
class MemoryArena {
 public:
  MemoryArena(std::vector<std::shared_ptr<Poller>> pollers, size_t slot_bytes);

 private:
  friend class MemoryOutboxes;
  struct alignas(64) Counters {
    std::atomic<uint64_t> value[kSignals] = {};
  };
  std::vector<std::shared_ptr<Poller>> pollers_;
  size_t slot_bytes_;
  std::vector<std::vector<std::byte>> slots_;  // per rank, kOutboxSlots slots
  std::vector<Counters> counters_;             // per rank
};

class MemoryOutboxes final : public Outboxes {
 public:
  MemoryOutboxes(std::shared_ptr<MemoryArena> arena, int rank)
      : arena_(std::move(arena)), rank_(rank) {}

  size_t slot_bytes() const override { return arena_->slot_bytes_; }
  std::byte* slot(int rank, uint64_t tile) override;
  void signal(uint32_t signal) override;
  uint64_t signalled(int rank, uint32_t signal) const override;

 private:
  std::shared_ptr<MemoryArena> arena_;
  int rank_;
};

}  // namespace commute
