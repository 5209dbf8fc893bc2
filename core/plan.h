// SPDX-License-Identifier: Apache-2.0
// A plan as the executor sees it: one rank's flat array of 32-byte instructions over chunks.
//
// Python writes plans (src/commute/plan, which also proves them); this side only loads and executes
// them. An instruction knows no pointer, no size and no dtype. Lanes run in order and independently
// of each other; an instruction starts when its lane has reached it and lane `dep_lane` has
// completed its step `dep_step` in the same tile. See src/commute/plan/instructions.py for what
// each opcode means.
//
// Loading checks everything that memory safety rests on (spaces, chunk runs, peers, lanes), so that
// even a plan nobody proved cannot make the executor read or write outside the arrays it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dtype.h"

namespace commute {

enum class Op : uint8_t {
  kSend = 0,
  kRecv = 1,
  kRecvReduce = 2,
  kRecvReduceSend = 3,
  kCopy = 4,
  kReduceMany = 5,
  kPut = 6,
  kSignal = 7,
  kWait = 8,
};

enum class Space : uint8_t { kIn = 0, kOut = 1, kScratch = 2, kOutbox = 3, kNone = 255 };
constexpr int kSpaces = 4;

enum class Collective : uint8_t {
  kBarrier = 0,
  kBroadcast = 1,
  kReduce = 2,
  kAllreduce = 3,
  kAllgather = 4,
  kReduceScatter = 5,
  kSend = 6,
  kRecv = 7,
  kGather = 8,
  kScatter = 9,
  kAlltoall = 10,
};
constexpr int kCollectives = 11;
const char* name(Collective collective);

constexpr uint8_t kNoLane = 255;
constexpr uint8_t kFlagBack = 1;              // reduce_many: store into the outboxes it has read
constexpr uint8_t kFlagKeep = 2;              // put: store into OUT at `arg` as well
constexpr uint8_t kFlagStreaming = 4;         // copy, put with keep: large arrays past the caches
constexpr uint8_t kFlagFirst = 8;             // recv_reduce: what arrives is the left operand
constexpr uint32_t kSignals = 8;              // counters per rank, the last one the executor's own:
constexpr uint32_t kFinished = kSignals - 1;  // operations with outboxes that a rank has finished
constexpr uint64_t kOutboxSlots = 2;          // tile t uses slot t % 2

struct Instruction {
  Op op;
  uint8_t lane;
  uint8_t flags;
  uint8_t dep_lane;
  uint32_t dep_step;
  int32_t peer;
  int32_t peer2;
  Space src_space;
  Space dst_space;
  uint16_t count;
  uint32_t src;
  uint32_t dst;
  uint32_t arg;

  uint32_t signal() const { return arg & 0xffff; }
  uint32_t lag() const { return arg >> 16; }
};
static_assert(sizeof(Instruction) == 32, "Python writes 32-byte instructions");

// One rank's part of a plan, checked.
struct Plan {
  Collective collective = Collective::kBarrier;
  std::string algorithm;
  int rank = 0;
  int ranks = 1;
  int root = 0;
  uint64_t hash = 0;                       // of the whole plan, all ranks: ranks compare it
  uint32_t chunks = 1;                     // per block
  uint32_t blocks[kSpaces] = {};           // per space
  std::vector<Instruction> code;           // sorted by lane
  std::vector<uint32_t> lane_ends;         // lane l is code[lane_ends[l-1], lane_ends[l])
  std::vector<uint32_t> signals_per_tile;  // [rank * kSignals + signal], of every rank
  bool settled = false;  // proved: once this rank has finished, nobody touches its outbox
  bool direct = false;   // OUTBOX is OUT itself: for arrays that all ranks reach

  std::span<const Instruction> lane(size_t index) const;
  bool uses_outbox() const { return blocks[static_cast<int>(Space::kOutbox)] != 0; }
  std::vector<int> peers() const;  // whom this rank exchanges messages with

  // Fills `lane_ends` and checks the plan; raises std::invalid_argument naming lane and step.
  void check();
};

}  // namespace commute
