// SPDX-License-Identifier: Apache-2.0
#include "store/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace commute {
namespace {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f,
                   kPrime3 = 0x165667b19e3779f9, kPrime4 = 0x85ebca77c2b2ae63,
                   kPrime5 = 0x27d4eb2f165667c5;

template <class T>
uint64_t read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

// In registers: 8 GB/s instead of 4.
const std::byte* stripes(std::array<uint64_t, 4>& lanes, const std::byte* at, size_t count) {
  auto [a, b, c, d] = lanes;
  for (; count > 0; --count, at += 32) {
    a = round(a, read<uint64_t>(at));
    b = round(b, read<uint64_t>(at + 8));
    c = round(c, read<uint64_t>(at + 16));
    d = round(d, read<uint64_t>(at + 24));
  }
  lanes = {a, b, c, d};
  return at;
}

}  // namespace

void Checksum::add(const std::byte* bytes, size_t count) {
  if (count == 0) return;
  total_ += count;
  if (rest_bytes_ > 0) {
    const size_t taken = std::min(count, kStripe - rest_bytes_);
    std::memcpy(rest_.data() + rest_bytes_, bytes, taken);
    rest_bytes_ += taken;
    bytes += taken;
    count -= taken;
    if (rest_bytes_ < kStripe) return;
    stripes(lanes_, rest_.data(), 1);
  }
  bytes = stripes(lanes_, bytes, count / kStripe);
  rest_bytes_ = count % kStripe;
  std::memcpy(rest_.data(), bytes, rest_bytes_);
}

uint64_t Checksum::value() const {
  uint64_t hash = kPrime5;
  if (total_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += total_;
  const std::byte* at = rest_.data();
  const std::byte* const end = at + rest_bytes_;
  for (; end - at >= 8; at += 8)
    hash = std::rotl(hash ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    hash = std::rotl(hash ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) hash = std::rotl(hash ^ read<uint8_t>(at) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace commute
