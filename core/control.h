// SPDX-License-Identifier: Apache-2.0
// Control frames: heartbeats and news about members. The same grammar is written in Python by
// src/commute/cluster/control.py for the coordinator; a test compares the two.
//
//   frame = magic[4]="cmtc" kind:u8 code:u8 text_bytes:u16 rank:i32 by:i32 operation:u64 group:u64
//   text[text_bytes]
//
// little endian, 32 bytes and at most kControlTextMax of UTF-8. Ranks are those of the world; group
// is the id of the group that `leave` and `abandon` are about, 0 for the world itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace commute {

enum class ControlKind : uint8_t {
  kBeat = 0,
  kLeave = 1,    // `rank` leaves; code 0: it has finished, 1: it failed, the text says why
  kLost = 2,     // `rank` is lost; the text says how that was noticed
  kAbandon = 3,  // `by` gave up an operation; code is a FailureCode, `rank` the culprit or -1
};

struct ControlFrame {
  ControlKind kind = ControlKind::kBeat;
  uint8_t code = 0;
  int32_t rank = -1;
  int32_t by = -1;
  uint64_t operation = 0;
  std::string text;
  uint64_t group = 0;
};

constexpr size_t kControlHeaderBytes = 32;
constexpr size_t kControlTextMax = 2048;

std::string encode(const ControlFrame& frame);  // cuts an overlong text

// Takes one frame from the front of `bytes`; nothing when it is not complete. Raises
// std::runtime_error on bytes that no member sends.
std::optional<ControlFrame> decode(std::string& bytes);

}  // namespace commute
