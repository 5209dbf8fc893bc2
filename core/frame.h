// SPDX-License-Identifier: Apache-2.0
// Frames: what travels on data links.
//
//   frame   = header payload
//   header  = 64 bytes, little endian, as `FrameHeader` below
//   payload = header.bytes bytes: the chunks of one send, in the order of their elements
//
// The header carries the fingerprint of the call (`Call`), so that ranks that called different
// things find out with the first frame, and (group, epoch, operation), so that frames of an
// abandoned operation are skipped. A frame is refused when its magic, checksum, kind or codes are
// wrong, or when it announces more than kFrameBytesMax: the connection is then closed; nothing else
// happens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "plan.h"

namespace commute {

enum class FrameKind : uint8_t {
  kData = 0,     // one message of a plan
  kWaiting = 1,  // no payload: "I am in this operation, waiting for you"
  kPair = 2,     // one message of send/recv
};

// The fingerprint: what a rank called. All ranks of an operation must agree on it.
struct Call {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  bool mean = false;  // a sum, divided at the end
  int32_t root = 0;
  uint32_t plan = 0;   // low half of the plan's hash
  uint64_t count = 0;  // elements per block

  bool operator==(const Call&) const = default;
  // In three words, for memory that peers read.
  void pack(uint64_t (&words)[3]) const;
  static Call unpack(const uint64_t (&words)[3]);
  std::string describe() const;  // "allreduce of 10 float32 by sum"
};

struct FrameHeader {
  uint32_t magic;
  FrameKind kind;
  Collective collective;
  Dtype dtype;
  uint8_t reduction;  // a ReduceOp; kMeanBit on top
  uint32_t group;
  uint32_t epoch;
  uint64_t operation;
  uint64_t count;
  int32_t root;
  uint32_t plan;
  uint32_t tile;   // low 32 bits
  uint32_t index;  // of the message in its tile and direction
  uint64_t bytes;  // of the payload
  uint32_t sender;
  uint32_t checksum;  // of the 60 bytes before it

  Call call() const;
  void set_call(const Call& call);
};
static_assert(sizeof(FrameHeader) == 64, "the header is 64 bytes on the wire");

constexpr uint8_t kMeanBit = 0x80;
constexpr uint32_t kFrameMagic = 0x31746d63;  // "cmt1"
// One message is at most a chunk run of one tile, or a point-to-point array: 1 TiB bounds both.
constexpr uint64_t kFrameBytesMax = uint64_t{1} << 40;

// Fills in magic and checksum: the last thing done to a header before it travels.
void seal(FrameHeader& header);

// nullptr when the 64 bytes are a sound header, else what is wrong with them.
const char* refuse(const FrameHeader& header);

}  // namespace commute
