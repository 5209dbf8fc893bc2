// SPDX-License-Identifier: Apache-2.0
// Outboxes: memory of each rank that all its local peers read, and counters by which they tell each
// other. Between the processes of a host, and in tests between the threads of one process.
//
//   segment = head | slot 0 | slot 1
//   head    = identity | doorbell flag | calls[2] | signals[kSignals]    each on lines of its own
//
// One writer, many readers: a rank writes only its own segment, except that whoever rings a
// doorbell clears its flag. `signal` publishes what was written before it; whoever has seen a count
// through `signalled` sees those writes. Counters only grow.
//
// `calls` holds the fingerprint: before a rank signals anything in the k-th operation that uses
// outboxes, what it called stands in calls[k % 2]. Two are enough: no rank is two such operations
// ahead of one that still has to look, because slots are refilled only when their readers are done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "doorbell.h"
#include "frame.h"
#include "segment.h"

namespace commute {

class Outboxes {
 public:
  // Makes the own segment. Raises std::system_error where memory cannot be shared.
  Outboxes(int rank, int ranks, size_t slot_bytes);
  ~Outboxes();
  Outboxes(const Outboxes&) = delete;
  Outboxes& operator=(const Outboxes&) = delete;

  // What peers need of this rank: its segment, and the eventfd that belongs to the flag.
  const std::shared_ptr<Segment>& own() const { return segments_[size_t(rank_)]; }
  std::atomic<uint32_t>* doorbell_flag() { return &head(rank_).sleeping; }
  // A peer's segment and eventfd; takes ownership of the descriptor. Raises std::runtime_error when
  // the segment is not that peer's outbox.
  void attach(int peer, std::shared_ptr<Segment> segment, int event_fd);
  bool attached(int peer) const { return segments_[size_t(peer)] != nullptr; }
  Doorbell doorbell(int peer);

  size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(int rank, uint64_t tile) {
    return segments_[size_t(rank)]->data() + kHeadBytes + (tile % kOutboxSlots) * slot_bytes_;
  }
  void signal(uint32_t signal);
  uint64_t signalled(int rank, uint32_t signal) const {
    return head(rank).signals[signal].count.load(std::memory_order_seq_cst);
  }

  // What a rank called: `use` is k above, `operation` its number in the group, `history` stands for
  // all that it has signalled before.
  struct Entry {
    Call call;
    uint64_t history = 0;
  };
  void publish(uint64_t use, uint64_t operation, const Entry& entry);
  // False when `rank` has not come to that operation, or has gone on.
  bool published(int rank, uint64_t use, uint64_t operation, Entry& entry) const;
  uint64_t last_published(int rank) const;  // the number of its last operation

 private:
  struct alignas(64) Published {
    std::atomic<uint64_t> operation;
    std::atomic<uint64_t> words[3];
    std::atomic<uint64_t> history;
  };
  struct alignas(64) Counter {
    std::atomic<uint64_t> count;
  };
  struct Head {
    alignas(64) uint64_t magic;
    uint32_t rank;
    uint32_t ranks;
    uint64_t slot_bytes;
    alignas(64) std::atomic<uint32_t> sleeping;
    Published calls[2];
    Counter signals[kSignals];
  };
  static constexpr uint64_t kMagic = 0x786f6274756f6d63;  // "cmoutbox"
  static constexpr size_t kHeadBytes = 4096;

  Head& head(int rank) const { return *reinterpret_cast<Head*>(segments_[size_t(rank)]->data()); }

  const int rank_;
  const int ranks_;
  const size_t slot_bytes_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  std::vector<int> event_fds_;                      // by rank; -1 for the own one
};

}  // namespace commute
