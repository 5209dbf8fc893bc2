// SPDX-License-Identifier: Apache-2.0
#include "frame.h"

#include <bit>
#include <cstring>

namespace commute {

static_assert(std::endian::native == std::endian::little, "frames are written in host order");

namespace {

// FNV-1a over the header's words: catches truncated and shifted streams, not malice (the token does
// that).
uint32_t checksum(const FrameHeader& header) {
  uint32_t words[15];
  std::memcpy(words, &header, sizeof words);
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint32_t word : words) hash = (hash ^ word) * 0x100000001b3u;
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

}  // namespace

void Call::pack(uint64_t (&words)[3]) const {
  words[0] = static_cast<uint64_t>(collective) | static_cast<uint64_t>(dtype) << 8 |
             static_cast<uint64_t>(reduce_op) << 16 | static_cast<uint64_t>(mean) << 24 |
             static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
  words[1] = plan;
  words[2] = count;
}

Call Call::unpack(const uint64_t (&words)[3]) {
  return {static_cast<Collective>(words[0] & 0xff),
          static_cast<Dtype>(words[0] >> 8 & 0xff),
          static_cast<ReduceOp>(words[0] >> 16 & 0xff),
          (words[0] >> 24 & 1) != 0,
          static_cast<int32_t>(words[0] >> 32),
          static_cast<uint32_t>(words[1]),
          words[2]};
}

std::string Call::describe() const {
  std::string text = name(collective);
  if (collective == Collective::kBarrier) return text;
  text += " of " + std::to_string(count) + " " + name(dtype);
  const bool reduces = collective == Collective::kReduce || collective == Collective::kAllreduce ||
                       collective == Collective::kReduceScatter;
  if (reduces) text += std::string(" by ") + (mean ? "mean" : name(reduce_op));
  const bool rooted = collective == Collective::kBroadcast || collective == Collective::kReduce ||
                      collective == Collective::kGather || collective == Collective::kScatter;
  if (rooted) text += " with root " + std::to_string(root);
  return text;
}

Call FrameHeader::call() const {
  const auto op = static_cast<ReduceOp>(reduction & ~kMeanBit);
  return {collective, dtype, op, (reduction & kMeanBit) != 0, root, plan, count};
}

void FrameHeader::set_call(const Call& call) {
  collective = call.collective;
  dtype = call.dtype;
  reduction =
      static_cast<uint8_t>(static_cast<uint8_t>(call.reduce_op) | (call.mean ? kMeanBit : 0));
  root = call.root;
  plan = call.plan;
  count = call.count;
}

void seal(FrameHeader& header) {
  header.magic = kFrameMagic;
  header.checksum = checksum(header);
}

const char* refuse(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "it does not begin like a frame";
  if (header.checksum != checksum(header)) return "its header's checksum is wrong";
  if (header.kind > FrameKind::kPair) return "its kind is unknown";
  if (static_cast<int>(header.collective) >= kCollectives) return "its operation is unknown";
  if (!is_dtype(static_cast<uint64_t>(header.dtype))) return "its dtype is unknown";
  if (!is_reduce_op(header.reduction & ~kMeanBit)) return "its reduction is unknown";
  if (header.bytes > kFrameBytesMax) return "it announces more bytes than any message has";
  if (header.kind == FrameKind::kWaiting && header.bytes != 0)
    return "a waiting frame has no payload";
  return nullptr;
}

}  // namespace commute
