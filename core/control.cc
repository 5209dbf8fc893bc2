// SPDX-License-Identifier: Apache-2.0
#include "control.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace commute {
namespace {

constexpr char kMagic[4] = {'c', 'm', 't', 'c'};

struct Wire {
  char magic[4];
  uint8_t kind;
  uint8_t code;
  uint16_t text_bytes;
  int32_t rank;
  int32_t by;
  uint64_t operation;
  uint64_t group;
};
static_assert(sizeof(Wire) == kControlHeaderBytes);

}  // namespace

std::string encode(const ControlFrame& frame) {
  size_t text_bytes = frame.text.size();
  if (text_bytes > kControlTextMax) {
    text_bytes = kControlTextMax;
    // Never cut inside a character: continuation bytes are 10xxxxxx.
    while (text_bytes > 0 && (frame.text[text_bytes] & 0xc0) == 0x80) --text_bytes;
  }
  Wire wire{};
  std::memcpy(wire.magic, kMagic, sizeof kMagic);
  wire.kind = static_cast<uint8_t>(frame.kind);
  wire.code = frame.code;
  wire.text_bytes = static_cast<uint16_t>(text_bytes);
  wire.rank = frame.rank;
  wire.by = frame.by;
  wire.operation = frame.operation;
  wire.group = frame.group;
  std::string bytes(reinterpret_cast<const char*>(&wire), sizeof wire);
  return bytes.append(frame.text, 0, text_bytes);
}

std::optional<ControlFrame> decode(std::string& bytes) {
  // Garbage shorter than a header is noticed now, not when the rest of it comes.
  if (std::memcmp(bytes.data(), kMagic, std::min(bytes.size(), sizeof kMagic)) != 0)
    throw std::runtime_error("it does not begin like a control frame");
  if (bytes.size() < sizeof(Wire)) return std::nullopt;
  Wire wire;
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (wire.kind > static_cast<uint8_t>(ControlKind::kAbandon))
    throw std::runtime_error("its kind is unknown");
  if (wire.text_bytes > kControlTextMax) throw std::runtime_error("its text is too long");
  if (bytes.size() < sizeof wire + wire.text_bytes) return std::nullopt;
  ControlFrame frame{
      static_cast<ControlKind>(wire.kind),        wire.code, wire.rank, wire.by, wire.operation,
      bytes.substr(sizeof wire, wire.text_bytes), wire.group};
  bytes.erase(0, sizeof wire + wire.text_bytes);
  return frame;
}

}  // namespace commute
