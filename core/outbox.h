// SPDX-License-Identifier: Apache-2.0
// Outboxes: memory of each rank that all its local peers read, and counters by which they tell each
// other. Between the processes of a host, and in tests between the threads of one process.
//
//   segment = head | slot 0 | slot 1 | room for arrays (arena.h)
//   head    = identity | doorbell flag | core | gave up | signals[kSignals] | line 0 | line 1
//   line    = operation | history | call | payload
//
// What is in a head lies apart, in cache lines of its own. A rank writes its own segment. Others
// write into it only what a plan stores back where it has read, in an order that the verifier has
// proved, and the doorbell's flag, which the ringer clears. `signal` publishes what was written
// before it; whoever has seen a count through `signalled` sees those writes. Counters only grow.
//
// A line says what a rank called: before it signals anything in the k-th operation that uses
// outboxes, line k % 2 holds that operation. Two are enough: a rank begins its k-th use when all
// have finished the one before the last. The history stands for all calls up to this one, so ranks
// compare two numbers to know that they have always called the same. The hand-written kernels let
// small arrays travel in the line itself: where they fit, in the very cache line that is waited
// for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "arena.h"
#include "doorbell.h"
#include "frame.h"
#include "segment.h"

namespace commute {

// Up to so many bytes an array fits into a line.
constexpr size_t kLineBytes = 16 * 1024;

class Outboxes {
 public:
  // Makes the own segment; `room_bytes` is for arrays. Raises std::system_error where memory cannot
  // be shared.
  Outboxes(int rank, int ranks, size_t slot_bytes, size_t room_bytes = 0);
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

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }

  // The core on which a rank last ran, as far as it has said; -1 for unknown.
  void runs_on(int core) {
    auto& said = head(rank_).core;
    if (said.load(std::memory_order_relaxed) != core + 1)
      said.store(core + 1, std::memory_order_relaxed);
  }
  int core_of(int rank) const {
    return attached(rank) ? head(rank).core.load(std::memory_order_relaxed) - 1 : -1;
  }

  std::byte* slot(int rank, uint64_t tile) {
    return segments_[size_t(rank)]->data() + kHeadBytes + (tile % kOutboxSlots) * slot_bytes_;
  }
  // The room of the own segment; none of its memory goes before the last array.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  bool in_room(const std::byte* address) const {
    const Segment& mine = *own();
    return address >= mine.data() + room_at() && address < mine.data() + mine.bytes();
  }
  // An array in a rank's room, by where it is in the segment. Raises std::runtime_error when that
  // is not in its room.
  std::byte* array(int rank, size_t at, size_t bytes) const;

  // Where something that lies in the process of a peer is mapped here; null unless in its room.
  const std::byte* in_room_of(int peer, uintptr_t from, size_t bytes) const;

  // Whether the memory of the processes of all peers that are attached can be read. A kernel, or a
  // container, may forbid it.
  bool can_fetch() const;
  // From where something lies in the process of a peer. Raises std::system_error, also when the
  // process is not that peer's any more.
  void fetch(int peer, uintptr_t from, std::byte* to, size_t bytes) const;

  // Says that this rank ends what it has called without a result, before it lets go of its arrays;
  // for good, as its group has failed. Asked after an array was read. Both sides read and write, so
  // that one comes first: either the reader is told, or it has read what was still the array. A
  // mere load might be done before the reads that precede it.
  void give_up() { head(rank_).gave_up.exchange(1, std::memory_order_acq_rel); }
  bool gave_up(int rank) const {
    return head(rank).gave_up.fetch_add(0, std::memory_order_acq_rel) != 0;
  }

  // Wakes a peer if it sleeps; after what it waits for was published in another way than below.
  void ring(int peer) const {
    if (event_fds_[size_t(peer)] >= 0) commute::ring(head(peer).sleeping, event_fds_[size_t(peer)]);
  }
  void signal(uint32_t signal);
  uint64_t signalled(int rank, uint32_t signal) const {
    return head(rank).signals[signal].count.load(std::memory_order_seq_cst);
  }

  // `use` is k above, `operation` the number of the operation in its group. What was written to the
  // payload before is published with it; `loudly` wakes peers that wait for the line itself.
  void publish(uint64_t use, uint64_t operation, uint64_t history, const Call& call, bool loudly);
  bool published(int rank, uint64_t use, uint64_t operation) const {
    return line(rank, use).operation.load(std::memory_order_seq_cst) == operation;
  }
  uint64_t history(int rank, uint64_t use) const {  // of a line that is published
    return line(rank, use).history.load(std::memory_order_relaxed);
  }
  std::byte* payload(int rank, uint64_t use, size_t bytes) const {
    Line& found = line(rank, use);
    return bytes <= sizeof found.few ? found.few : found.more;
  }
  // False when `rank` has not come to that operation, or has gone on; may be asked at any time.
  bool called(int rank, uint64_t use, uint64_t operation, Call& call) const;
  uint64_t last_published(int rank) const;  // the number of its last operation

 private:
  struct alignas(64) Line {
    std::atomic<uint64_t> operation;
    std::atomic<uint64_t> history;
    std::atomic<uint64_t> words[3];  // the call
    std::byte few[24];
    std::byte more[kLineBytes];
  };
  struct alignas(64) Counter {
    std::atomic<uint64_t> count;
  };
  struct Head {
    alignas(64) uint64_t magic;
    uint32_t rank;
    uint32_t ranks;
    uint64_t slot_bytes;
    int64_t pid;
    uint64_t process;  // a random number of it
    uint64_t at;       // of this head, in that process
    alignas(64) std::atomic<uint32_t> sleeping;
    alignas(64) std::atomic<int32_t> core;  // plus one; 0: not said
    alignas(64) std::atomic<uint32_t> gave_up;
    Counter signals[kSignals];
    Line lines[2];
  };
  static constexpr uint64_t kMagic = 0x786f6274756f6d63;  // "cmoutbox"
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kHeadBytes = (sizeof(Head) + kPageBytes - 1) / kPageBytes * kPageBytes;

  size_t room_at() const { return kHeadBytes + kOutboxSlots * slot_bytes_; }
  Line& line(int rank, uint64_t use) const { return head(rank).lines[use % 2]; }
  void ring_others();
  Head& head(int rank) const { return *reinterpret_cast<Head*>(segments_[size_t(rank)]->data()); }

  const int rank_;
  const int ranks_;
  const size_t slot_bytes_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  std::vector<int> event_fds_;                      // by rank; -1 for the own one
};

}  // namespace commute
