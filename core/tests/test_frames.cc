// SPDX-License-Identifier: Apache-2.0
// Frames and control frames: what is accepted, what is refused, and streams that arrive in pieces.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../control.h"
#include "../stream.h"
#include "check.h"

namespace {

using namespace commute;

FrameHeader sound_header(uint64_t bytes = 0) {
  FrameHeader header{};
  header.kind = FrameKind::kData;
  header.set_call({Collective::kAllreduce, Dtype::kFloat32, ReduceOp::kSum, 0, 77, 10});
  header.group = 3;
  header.epoch = 2;
  header.operation = 5;
  header.bytes = bytes;
  seal(header);
  return header;
}

// One end of a link whose other end is the test: gives `incoming` in pieces of at most `piece`
// bytes, and takes at most `room` bytes at a time. Reading past the end raises LinkClosed.
class ScriptedLink final : public Link {
 public:
  struct Script {
    std::string incoming;
    std::vector<size_t> pieces;  // 0: "would block" once; beyond the last: all that is left
    std::string outgoing;
    size_t room = SIZE_MAX;
  };
  explicit ScriptedLink(Script& script) : script_(script) {}

  size_t write(const iovec* pieces, int count) override {
    size_t left = script_.room;
    for (int i = 0; i < count; ++i) {
      const size_t moved = std::min(left, pieces[i].iov_len);
      script_.outgoing.append(static_cast<const char*>(pieces[i].iov_base), moved);
      left -= moved;
    }
    return script_.room == SIZE_MAX ? SIZE_MAX - left : script_.room - left;
  }
  size_t read(void* into, size_t bytes) override {
    size_t piece = SIZE_MAX;
    if (turn_ < script_.pieces.size()) piece = script_.pieces[turn_++];
    if (piece == 0) return 0;
    if (at_ == script_.incoming.size()) throw LinkClosed("the script has ended");
    const size_t moved = std::min({bytes, piece, script_.incoming.size() - at_});
    std::memcpy(into, script_.incoming.data() + at_, moved);
    at_ += moved;
    return moved;
  }
  void close(std::chrono::steady_clock::time_point) override {}

 private:
  Script& script_;
  size_t turn_ = 0;
  size_t at_ = 0;
};

std::string wire_of(const FrameHeader& header, const std::string& payload) {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

std::string numbered_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i * 7 + i / 256);
  return bytes;
}

const FrameHeader* next_header(Stream& stream) {
  for (int i = 0; i < 1000; ++i)
    if (const FrameHeader* header = stream.header()) return header;
  return nullptr;
}

std::string take_all(Stream& stream, size_t bytes) {
  std::string payload(bytes, '\0');
  size_t got = 0;
  for (int i = 0; i < 100'000 && got < bytes; ++i)
    got += stream.take(payload.data() + got, bytes - got);
  return payload;
}

TEST(a_sealed_header_is_sound_and_any_flipped_bit_is_refused) {
  const FrameHeader header = sound_header(40);
  CHECK(refuse(header) == nullptr);
  for (size_t bit = 0; bit < 8 * sizeof header; ++bit) {
    FrameHeader bad = header;
    reinterpret_cast<unsigned char*>(&bad)[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    CHECK(refuse(bad) != nullptr);
  }
}

template <class Change>
std::string refusal(Change change) {
  FrameHeader header = sound_header();
  change(header);
  seal(header);
  const char* why = refuse(header);
  return why == nullptr ? "" : why;
}

TEST(codes_and_lengths_that_no_rank_sends_are_refused) {
  CHECK_EQ(refusal([](FrameHeader& h) { h.kind = FrameKind(3); }), "its kind is unknown");
  CHECK_EQ(refusal([](FrameHeader& h) { h.collective = Collective(11); }),
           "its operation is unknown");
  CHECK_EQ(refusal([](FrameHeader& h) { h.dtype = Dtype(kDtypeCount); }), "its dtype is unknown");
  CHECK_EQ(refusal([](FrameHeader& h) { h.reduction = kReduceOpCount + 1; }),
           "its reduction is unknown");
  CHECK_EQ(refusal([](FrameHeader& h) { h.bytes = kFrameBytesMax; }), "");
  CHECK(!refusal([](FrameHeader& h) { h.bytes = kFrameBytesMax + 1; }).empty());
  CHECK(!refusal([](FrameHeader& h) { h.bytes = UINT64_MAX; }).empty());
  CHECK_EQ(refusal([](FrameHeader& h) { h.kind = FrameKind::kWaiting; }), "");
  CHECK(!refusal([](FrameHeader& h) {
           h.kind = FrameKind::kWaiting;
           h.bytes = 1;
         }).empty());
}

TEST(a_call_is_described_for_people) {
  using enum Collective;
  const auto text = [](Collective collective) {
    return Call{collective, Dtype::kFloat32, ReduceOp::kMax, false, 2, 0, 10}.describe();
  };
  CHECK_EQ(text(kBarrier), "barrier");
  CHECK_EQ(text(kBroadcast), "broadcast of 10 float32 with root 2");
  CHECK_EQ(text(kReduce), "reduce of 10 float32 by max with root 2");
  CHECK_EQ(text(kAllreduce), "allreduce of 10 float32 by max");
  CHECK_EQ(text(kAllgather), "allgather of 10 float32");
  CHECK_EQ(text(kReduceScatter), "reduce_scatter of 10 float32 by max");
  CHECK_EQ(text(kSend), "send of 10 float32");
  CHECK_EQ(text(kGather), "gather of 10 float32 with root 2");
  CHECK_EQ(text(kScatter), "scatter of 10 float32 with root 2");
  CHECK_EQ(text(kAlltoall), "alltoall of 10 float32");
}

TEST(the_call_travels_whole_in_the_header) {
  const Call call{Collective::kReduce, Dtype::kInt64, ReduceOp::kSum, true, 6, 99,
                  uint64_t{1} << 40};
  FrameHeader header{};
  header.set_call(call);
  CHECK(header.call() == call);
}

TEST(a_stream_cut_at_every_byte_gives_the_same_frames) {
  const std::string first = numbered_bytes(100);
  const std::string second = numbered_bytes(33);
  const std::string wire =
      wire_of(sound_header(first.size()), first) + wire_of(sound_header(second.size()), second);
  for (size_t cut = 1; cut < wire.size(); ++cut) {
    ScriptedLink::Script script{wire, {cut, 0}, "", SIZE_MAX};
    Stream stream(std::make_unique<ScriptedLink>(script));
    for (const std::string& payload : {first, second}) {
      const FrameHeader* header = next_header(stream);
      CHECK(header != nullptr);
      if (header == nullptr) return;
      CHECK_EQ(header->bytes, payload.size());
      CHECK(take_all(stream, payload.size()) == payload);
    }
  }
}

TEST(a_stream_that_comes_byte_by_byte_gives_the_same_frames) {
  const std::string payload = numbered_bytes(300);
  const std::string wire = wire_of(sound_header(payload.size()), payload);
  ScriptedLink::Script script{wire, std::vector<size_t>(2 * wire.size(), 1), "", SIZE_MAX};
  for (size_t i = 0; i < script.pieces.size(); i += 2) script.pieces[i] = 0;
  Stream stream(std::make_unique<ScriptedLink>(script));
  CHECK(next_header(stream) != nullptr);
  CHECK(take_all(stream, payload.size()) == payload);
}

TEST(many_small_frames_share_a_read) {
  std::string wire;
  for (uint64_t i = 0; i < 500; ++i) {
    FrameHeader header = sound_header(i % 9);
    header.operation = i;
    seal(header);
    wire += wire_of(header, numbered_bytes(i % 9));
  }
  ScriptedLink::Script script{wire, {}, "", SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  for (uint64_t i = 0; i < 500; ++i) {
    const FrameHeader* header = stream.header();
    CHECK(header != nullptr && header->operation == i);
    if (i % 9 == 0) CHECK(stream.skip());
    if (i % 9 != 0) CHECK(take_all(stream, i % 9) == numbered_bytes(i % 9));
  }
  bool closed = false;
  try {
    stream.header();
  } catch (const LinkClosed&) {
    closed = true;
  }
  CHECK(closed);
}

TEST(a_frame_without_payload_ends_when_it_is_skipped) {
  ScriptedLink::Script script{
      wire_of(sound_header(), "") + wire_of(sound_header(3), "abc"), {}, "", SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  CHECK_EQ(stream.header()->bytes, 0u);
  CHECK_EQ(stream.header()->bytes, 0u);  // looking twice changes nothing
  CHECK(stream.skip());
  CHECK_EQ(stream.header()->bytes, 3u);
  CHECK_EQ(take_all(stream, 3), "abc");
}

TEST(skipping_drops_exactly_one_frame_however_it_arrives) {
  const std::string large = numbered_bytes(10'000);
  ScriptedLink::Script script{
      wire_of(sound_header(large.size()), large) + wire_of(sound_header(2), "ok"),
      {4096, 0, 0, 100, 0, 3000},
      "",
      SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  CHECK(next_header(stream) != nullptr);
  CHECK(!stream.skip());
  CHECK(!stream.skip());
  CHECK(stream.skip());
  CHECK_EQ(next_header(stream)->bytes, 2u);
  CHECK_EQ(take_all(stream, 2), "ok");
}

TEST(a_partly_taken_frame_can_be_skipped) {
  ScriptedLink::Script script{
      wire_of(sound_header(5), "abcde") + wire_of(sound_header(1), "z"), {}, "", SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  stream.header();
  CHECK_EQ(take_all(stream, 2), "ab");
  CHECK_EQ(stream.payload_left(), 3u);
  CHECK(stream.skip());
  CHECK_EQ(stream.header()->bytes, 1u);
}

TEST(taking_never_crosses_into_the_next_frame) {
  ScriptedLink::Script script{
      wire_of(sound_header(3), "abc") + wire_of(sound_header(3), "def"), {}, "", SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  stream.header();
  char bytes[64];
  CHECK_EQ(stream.take(bytes, sizeof bytes), 3u);
  CHECK_EQ(stream.header()->bytes, 3u);
}

TEST(bad_bytes_are_refused_and_stay_refused) {
  ScriptedLink::Script script{std::string(64, 'x'), {}, "", SIZE_MAX};
  Stream stream(std::make_unique<ScriptedLink>(script));
  for (int i = 0; i < 2; ++i) {
    bool refused = false;
    try {
      stream.header();
    } catch (const BadFrame&) {
      refused = true;
    }
    CHECK(refused);
  }
}

TEST(sending_through_any_room_gives_the_same_bytes) {
  const std::string payload = numbered_bytes(200);
  for (size_t room = 1; room <= 270; ++room) {
    ScriptedLink::Script script{"", {}, "", room};
    Stream stream(std::make_unique<ScriptedLink>(script));
    for (int frame = 0; frame < 2; ++frame) {
      CHECK(stream.idle());
      stream.begin(sound_header(payload.size()));
      size_t sent = 0;
      while (sent < payload.size() || !stream.header_sent())
        sent += stream.send(payload.data() + sent, payload.size() - sent);
      CHECK(!stream.idle());
      stream.end();
    }
    const std::string once = wire_of(sound_header(payload.size()), payload);
    CHECK(script.outgoing == once + once);
  }
}

TEST(control_frames_survive_the_wire) {
  const ControlFrame frame{ControlKind::kAbandon,         2, 7, 3, uint64_t{1} << 50,
                           "rank 7 took too long — sorry"};
  std::string bytes = encode(frame) + encode({ControlKind::kBeat, 0, 1, 1, 0, ""}) + "cm";
  const auto first = decode(bytes);
  CHECK(first.has_value());
  CHECK(first->kind == frame.kind && first->code == frame.code && first->rank == frame.rank);
  CHECK(first->by == frame.by && first->operation == frame.operation && first->text == frame.text);
  const auto second = decode(bytes);
  CHECK(second.has_value() && second->kind == ControlKind::kBeat);
  CHECK(!decode(bytes).has_value());
  CHECK_EQ(bytes, "cm");
}

TEST(the_control_header_is_as_python_writes_it) {
  const std::string bytes = encode({ControlKind::kLost, 4, -2, 258, 0x0102030405060708, "hi", 3});
  const unsigned char expected[] = {'c', 'm', 't', 'c', 2, 4, 2, 0, 0xfe, 0xff, 0xff, 0xff,
                                    2,   1,   0,   0,   8, 7, 6, 5, 4,    3,    2,    1,
                                    3,   0,   0,   0,   0, 0, 0, 0, 'h',  'i'};
  CHECK_EQ(bytes.size(), sizeof expected);
  CHECK(std::memcmp(bytes.data(), expected, sizeof expected) == 0);
}

TEST(a_control_frame_waits_for_its_last_byte) {
  const std::string whole = encode({ControlKind::kLeave, 1, 2, 2, 0, "went away"});
  for (size_t there = 0; there < whole.size(); ++there) {
    std::string bytes = whole.substr(0, there);
    CHECK(!decode(bytes).has_value());
    CHECK_EQ(bytes.size(), there);
  }
}

TEST(an_overlong_text_is_cut_between_characters) {
  for (size_t shift = 0; shift < 4; ++shift) {
    std::string text(shift, 'a');
    while (text.size() < 2 * kControlTextMax) text += "\xf0\x9f\x98\x80";  // four bytes each
    std::string bytes = encode({ControlKind::kLost, 0, 1, 1, 0, text});
    const auto frame = decode(bytes);
    CHECK(frame.has_value());
    CHECK(frame->text.size() <= kControlTextMax && frame->text.size() > kControlTextMax - 4);
    CHECK_EQ(frame->text.size() % 4, shift);
    CHECK(bytes.empty());
  }
  std::string longest = encode({ControlKind::kLost, 0, 1, 1, 0, std::string(kControlTextMax, 'x')});
  CHECK_EQ(decode(longest)->text.size(), kControlTextMax);
}

bool decoding_raises(std::string bytes) {
  try {
    decode(bytes);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

TEST(control_bytes_that_no_member_sends_are_refused) {
  const std::string sound = encode({ControlKind::kBeat, 0, 1, 1, 0, ""});
  std::string kind = sound;
  kind[4] = 4;
  std::string length = sound;
  length[7] = 9;  // 2304 bytes of text
  CHECK(decoding_raises(std::string(32, 'x')));
  CHECK(decoding_raises("cmt1" + sound.substr(4)));
  CHECK(decoding_raises(kind));
  CHECK(decoding_raises(length));
  CHECK(!decoding_raises(sound));
}

}  // namespace
