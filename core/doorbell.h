// SPDX-License-Identifier: Apache-2.0
// How one rank wakes another that sleeps, across threads and across processes of one host.
//
// The sleeper owns a flag and an eventfd; whoever makes work for it holds both. The flag lies in
// memory that both see. A sleeper announces itself by setting the flag, looks once more for work,
// and only then sleeps on the eventfd; a maker publishes its work first and then rings. Work is
// published, and the flag is set and looked at, by sequentially consistent operations: of the two,
// one comes second and sees the other, so either the sleeper finds the work or the maker finds the
// sleeper, and no wake-up is lost. Ringing is one load while nobody sleeps.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace commute {

// Wakes the owner of the flag if it sleeps. After work was published by a sequentially consistent
// operation.
inline void ring(std::atomic<uint32_t>& sleeping, int event_fd) {
  if (sleeping.load(std::memory_order_seq_cst) == 0) return;
  if (sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;  // another was quicker
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_fd, &one, sizeof one);
}

struct Doorbell {
  std::atomic<uint32_t>* sleeping = nullptr;
  int event_fd = -1;
  std::shared_ptr<void> keeper;  // keeps flag and descriptor alive

  void ring() const { commute::ring(*sleeping, event_fd); }
};

}  // namespace commute
