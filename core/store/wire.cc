// SPDX-License-Identifier: Apache-2.0
// Conversions by bits, without branches, so that the compiler makes vectors of them.
//
// float16 has 1 sign, 5 exponent and 10 mantissa bits against float32's 1, 8 and 23: the mantissa
// moves by 13 bits, and the exponent's bias changes by 127 - 15 = 112. bfloat16 is the upper half
// of a float32.
#include "store/wire.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace commute {
namespace {

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kBias = 112u << 23;

// Unlike `?:`, which becomes a branch where one side costs something.
uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -uint32_t{first};
  return (a & mask) | (b & ~mask);
}

struct Bfloat16 {
  static uint32_t widen(uint16_t half) { return uint32_t{half} << 16; }
  static uint16_t narrow(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(choose((bits & ~kSign) > kInfinity, 0x7fc0, rounded));
  }
};

struct Float16 {
  static uint32_t widen(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + kBias;
    // A subnormal gets the exponent of 2^-14 and an implicit 1, which the subtraction takes away.
    const auto one_more = std::bit_cast<float>(normal + (1u << 23));
    const auto subnormal = std::bit_cast<uint32_t>(one_more - 0x1p-14f);
    const uint32_t finite = choose(magnitude < 0x0400, subnormal, normal);
    return choose(magnitude < 0x7c00, finite, normal + kBias) | (half & 0x8000u) << 16;
  }
  static uint16_t narrow(uint32_t bits) {
    const uint32_t magnitude = bits & ~kSign;
    const uint32_t normal = (magnitude - kBias + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // Next to 0.5 a float32 has steps of 2^-24, a subnormal float16's: the addition rounds for us.
    const auto beside_half = std::bit_cast<float>(magnitude) + 0.5f;
    const uint32_t subnormal = std::bit_cast<uint32_t>(beside_half) - std::bit_cast<uint32_t>(0.5f);
    const uint32_t finite = choose(magnitude < (113u << 23), subnormal, normal);
    const uint32_t number = choose(magnitude < (143u << 23), finite, 0x7c00) | (bits & kSign) >> 16;
    return static_cast<uint16_t>(choose(magnitude > kInfinity, 0x7e00, number));
  }
};

// What is converted may lie anywhere, so it is read and written by memcpy.
template <class From, class To, To (*kConvert)(From)>
std::vector<std::byte> converted(Bytes values) {
  const size_t count = values.size() / sizeof(From);
  std::vector<std::byte> result(count * sizeof(To));
  const std::byte* const from = values.data();
  std::byte* const to = result.data();
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    const To made = kConvert(value);
    std::memcpy(to + i * sizeof(To), &made, sizeof(To));
  }
  return result;
}

}  // namespace

std::vector<std::byte> narrowed(Dtype wire, Bytes float32s) {
  return wire == Dtype::kFloat16 ? converted<uint32_t, uint16_t, Float16::narrow>(float32s)
                                 : converted<uint32_t, uint16_t, Bfloat16::narrow>(float32s);
}

std::vector<std::byte> widened(Dtype wire, Bytes values) {
  if (values.size() % sizeof(uint16_t) != 0)
    throw std::invalid_argument("half a value of " + std::string(name(wire)));
  return wire == Dtype::kFloat16 ? converted<uint16_t, uint32_t, Float16::widen>(values)
                                 : converted<uint16_t, uint32_t, Bfloat16::widen>(values);
}

}  // namespace commute
