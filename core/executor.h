// SPDX-License-Identifier: Apache-2.0
// The executor: a plan bound to a group's links, run once per operation. Nothing is allocated after
// binding.
//
// A message larger than a tile is run tile after tile by a loop outside the plan: every lane runs
// its steps for tile 0, then for tile 1, and so on, independently of the other lanes, so tiles
// overlap wherever the plan's dependencies allow it. `advance` gives each lane a turn until none
// can move; it never blocks.
//
//   lane:  step ready? --no--> blocked        step := next, tile := next
//            | yes                                   ^
//            v                                       | complete
//          begin -> move bytes until the link says "would block" or the step is complete
//
// Outboxes are used by different plans in turn, so who reads a slot differs from call to call. Two
// rules hold across calls, whatever the plans: a rank enters its k-th use of outboxes when all have
// finished the use before the last, and refills a slot that the last use has filled when all have
// finished that one, or when the last plan is proved to be settled by then. Within a call the
// plan's own waits do. That a peer has finished is seldom asked of its counter: whoever publishes
// use k has finished use k - 1.
//
// Invariants: 1. one message per direction is in flight, because a direction belongs to one
// lane. 2. A message is consumed only after its header proved to be the expected one. 3. Received
// bytes go straight to their destination, or in pieces of kPieceBytes through a staging buffer that
// stays in the L2 cache.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "chunk.h"
#include "copy.h"
#include "kernels.h"
#include "operation.h"
#include "outbox.h"
#include "plan.h"
#include "stream.h"

namespace commute {

constexpr const char* kSameCalls = "; all ranks must make the same calls in the same order";

inline std::string named(int rank) {
  return "rank " + std::to_string(rank);
}

// Results from this size on are stored past the caches where a plan allows it: they would not stay
// in the L2 cache anyway.
constexpr size_t kStreamedBytes = 4 << 20;

// Received bytes are reduced in pieces of this size, which stay in the L2 cache.
constexpr size_t kPieceBytes = 128 * 1024;

// What the plans of one group share, as they run one at a time. Owned by the engine.
struct Links {
  int rank = 0;
  uint32_t group = 0;
  uint32_t epoch = 0;
  std::vector<std::atomic<Stream*>> streams;  // by rank; null where there is no link (yet)
  std::vector<std::atomic<bool>> left;        // by rank: it said goodbye
  std::unique_ptr<Outboxes> outboxes;         // null where ranks share no memory
  uint64_t outbox_last_tiles = 0;             // of the last operation that used outboxes
  bool outbox_settled = true;                 // nobody touches the own slots since it finished
  uint64_t history = 0;                       // of all calls that used outboxes
  std::vector<uint64_t> finished;             // by rank: uses that it is known to have finished
  uint64_t outbox_uses = 0;                   // operations that used outboxes so far
  uint64_t outbox_tiles = 0;                  // tiles that plans with outboxes have run so far
  std::vector<std::byte> staging;             // what is received before it is reduced, kPieceBytes
  std::vector<uint64_t> signals;  // per rank and signal: posted by all earlier operations

  // How a rank that said goodbye is spoken of.
  const char* goodbye() const {
    return group == 0 ? "it had finished and left the job" : "it had finished and left the group";
  }
};

// Shared from within, so that Python and operations count the same owners, and letting go of one
// needs no GIL.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  // `tile_bytes`: of one block in one tile.
  Executor(Plan plan, size_t tile_bytes, Links& links);

  const Plan& plan() const { return plan_; }

  // Hand-written, and so short that it may be polled.
  bool kernel() const { return line_ && !fetches_; }

  void begin(const Operation& operation);
  enum class Progress : uint8_t { kBlocked, kMoved, kDone };
  Progress advance();  // raises Error

  // For the time when nothing has moved for a while:
  std::vector<int> waiting_for() const;  // ranks whose message or signal some lane waits for
  void announce();     // tells those ranks where we are, so that they can see a mismatch
  void look_around();  // finds frames of a mismatched call on links where our plan expects none;
                       // raises Error

  uint64_t messages() const {
    return messages_;
  }  // received since binding: shows that plans really ran

 private:
  struct Lane {
    std::span<const Instruction> steps;
    size_t step = 0;
    uint64_t tile = 0;
    uint64_t completed = 0;  // steps completed in this operation, all tiles together
    bool begun = false;      // sending: the frame has begun
    bool accepted = false;   // receiving: the header was the expected one
    size_t sent = 0;         // payload bytes
    size_t received = 0;     // payload bytes; for reductions: already reduced
    size_t carried = 0;      // bytes of an element that has not arrived whole
    char carry[kItemBytesMax];
  };
  struct Run {  // a run of chunks in memory
    std::byte* at;
    size_t bytes;
  };

  Run run_of(Space space, uint32_t chunk, uint32_t count, uint64_t tile, int owner) const;
  bool ready(const Lane& lane, const Instruction& step) const;
  bool perform(Lane& lane, const Instruction& step);  // true when the step is complete
  void complete(Lane& lane);

  bool open(Lane& lane, int peer, size_t bytes);
  bool send(Lane& lane, int peer, Run payload);
  bool accept(Lane& lane, int peer, size_t bytes);
  bool receive(Lane& lane, const Instruction& step);
  bool receive_reduce(Lane& lane, const Instruction& step);
  bool receive_reduce_send(Lane& lane, const Instruction& step);
  void copy(const Lane& lane, const Instruction& step);
  void put(const Lane& lane, const Instruction& step);
  bool streams(const Instruction& step) const;
  void reduce_many(const Lane& lane, const Instruction& step);
  void combine(void* to, const void* a, const void* b, size_t bytes) const;
  void combine_all(size_t targets, size_t bytes);
  void apply(const void* a, const void* b, void* out, size_t count) const;
  bool signal_seen(const Lane& lane, const Instruction& step) const;
  void begin_use();
  void end_use();
  bool may_enter() const;
  bool enter();
  bool slot_free(const Lane& lane) const;
  int unfinished(uint64_t uses) const;
  void wait_in_memory(std::set<int>& found) const;

  bool brings_data(int rank) const;
  bool waits_for(int rank) const;
  Progress advance_line();
  bool hear(int peer);
  Progress advance_fetch();
  bool is_read() const;
  void list_whom_to_hear();
  bool hear_any();
  std::byte* place_of(int rank) const;
  void enter_to_fetch();
  void copy_own_block();
  Progress own_block_or_blocked();
  void fetch(int peer);
  void fetch_step(int peer, uintptr_t from, std::byte* to, size_t bytes);
  void fetch_from_room(const std::byte* from, std::byte* to, size_t bytes) const;
  void fetch_by_way(int peer, uintptr_t from, std::byte* to, size_t bytes);
  bool fetches_much() const;
  std::byte* way_through_caches(size_t place_in_page);
  size_t fetch_payload_bytes() const;
  std::byte* fetch_payload(int rank) const;
  std::atomic_ref<std::byte> block_fetched(int of, int by) const;
  void tell_fetched(int peer);
  int yet_to_fetch() const;
  void wait_to_fetch(std::set<int>& found) const;

  bool expected(const FrameHeader& header, int peer, size_t bytes) const;
  [[noreturn]] void explain(const FrameHeader& header, int peer) const;
  [[noreturn]] void explain_ahead(uint64_t operation, const std::string& call, int peer) const;
  [[noreturn]] void explain_call(const Call& theirs, int peer) const;
  [[noreturn]] void explain_before(int peer) const;
  void compare_call(int peer, bool must) const;
  void find_in_outbox(int peer) const;
  [[noreturn]] void raise(FailureCode code, int peer, const std::string& text) const;
  Stream& stream(int peer) const;
  FrameHeader frame_header(FrameKind kind, const Lane& lane, int peer, size_t bytes) const;
  void finish();

  const Plan plan_;
  const size_t tile_bytes_;
  Links& links_;
  const bool line_;     // run by a hand-written kernel,
  const bool fetches_;  // and by that of executor_fetch.cc
  std::vector<Lane> lanes_;
  std::vector<uint32_t> sent_to_;        // messages of this operation, by rank
  std::vector<uint32_t> received_from_;  // likewise
  std::vector<std::byte> scratch_;
  std::vector<const void*> sources_;  // of reduce_many
  std::vector<void*> targets_;

  // Of the current operation.
  const Operation* operation_ = nullptr;
  size_t item_bytes_ = 1;
  size_t tile_elements_ = 1;
  uint64_t tiles_ = 0;
  bool entered_ = false;      // the call stands in the outbox
  int heard_ = 0;             // ranks below this have been heard of, for a kernel with lines
  std::vector<int> to_hear_;  // of whom there is a block to fetch, or a line to see
  size_t fetched_ = 0;        // bytes, of the first one's block
  bool own_copied_ = false;   // the block that this rank has for itself
  size_t lanes_left_ = 0;
  Reduce reduce_ = nullptr;  // null: the caller's own
  uint64_t messages_ = 0;
  mutable int touching_ = -1;  // the peer whose link was used last, for errors
};

}  // namespace commute
