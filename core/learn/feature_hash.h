// SPDX-License-Identifier: Apache-2.0
// The key of a feature: 64 bits of the name of its namespace or column, and of its text.
//
//   key of (name, text) = text_hash(text_hash(kNameSeed, name), text)
//   key of a cross      = cross_hash(... cross_hash(cross_hash(key1, key2), key3) ...)
//
// Saved models hold these keys: what is here may never change. All 64 bits are as good as random,
// as tables use all of them. It is no defence against somebody who wants two texts to collide.
//
//   text of n bytes = blocks of 16 bytes, and a last one of 0 to 16, zeros after its end
//   every block but the last:   seed = fold((low ^ kLow) * (high ^ seed))
//   the last:                   p = (low ^ kLow) * (high ^ seed), 128 bits;
//                               fold((low half of p ^ kEnd ^ n) * (high half of p ^ kLow))
//
// where low and high are 8 bytes each, little end first, and fold adds both halves bit by bit. The
// first product loses nothing of a text of up to 8 bytes; the second mixes both halves.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace commute {

static_assert(std::endian::native == std::endian::little, "keys are made of little-endian words");

inline constexpr uint64_t kNameSeed = 0x9e3779b97f4a7c15;
// Bytes that may be read from the begin of a text or of its last block, whatever its length.
inline constexpr size_t kHashBytes = 16;

namespace hash_detail {

inline constexpr uint64_t kLow = 0x8bb84b93962eacc9;
inline constexpr uint64_t kEnd = 0x2d358dccaa6c78a5;
inline constexpr uint64_t kCross = 0x4b33a62ed433d4a3;

__extension__ using Wide = unsigned __int128;

inline Wide product(uint64_t a, uint64_t b) {
  return static_cast<Wide>(a) * b;
}

inline uint64_t folded(Wide x) {
  return static_cast<uint64_t>(x) ^ static_cast<uint64_t>(x >> 64);
}

inline uint64_t word(const char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t last_block(uint64_t seed, uint64_t low, uint64_t high, uint64_t length) {
  const Wide p = product(low ^ kLow, high ^ seed);
  return folded(
      product(static_cast<uint64_t>(p) ^ kEnd ^ length, static_cast<uint64_t>(p >> 64) ^ kLow));
}

// What keeps the first n bytes of a block: lengths differ from token to token, so a table is
// quicker than branches.
struct Mask {
  uint64_t low;
  uint64_t high;
};
struct Masks {
  Mask of[kHashBytes + 1];
};
inline constexpr Masks kMasks = [] {
  Masks masks{};
  const auto first = [](size_t n) { return n == 0 ? 0 : ~uint64_t{0} >> (64 - 8 * n); };
  for (size_t n = 0; n <= kHashBytes; ++n)
    masks.of[n] = {first(n < 8 ? n : 8), first(n < 8 ? 0 : n - 8)};
  return masks;
}();

}  // namespace hash_detail

// Reads up to `kHashBytes` from wherever the text's last block begins, also beyond its end.
inline uint64_t padded_text_hash(uint64_t seed, const char* text, size_t size) {
  using namespace hash_detail;
  const size_t length = size;
  for (; size > kHashBytes; size -= kHashBytes, text += kHashBytes)
    seed = folded(product(word(text) ^ kLow, word(text + 8) ^ seed));
  const Mask& mask = kMasks.of[size];
  return last_block(seed, word(text) & mask.low, word(text + 8) & mask.high, length);
}

// The same, reading nothing beyond the text.
inline uint64_t text_hash(uint64_t seed, std::string_view text) {
  using namespace hash_detail;
  const size_t tail = text.empty() ? 0 : (text.size() - 1) % kHashBytes + 1;
  const char* at = text.data();
  for (const char* const end = at + (text.size() - tail); at != end; at += kHashBytes)
    seed = folded(product(word(at) ^ kLow, word(at + 8) ^ seed));
  char block[kHashBytes] = {};
  if (tail > 0) std::memcpy(block, at, tail);
  return last_block(seed, word(block), word(block + 8), text.size());
}

// Of a namespace or column: the seed for its texts.
inline uint64_t name_hash(std::string_view name) {
  return text_hash(kNameSeed, name);
}

inline uint64_t feature_hash(std::string_view name, std::string_view text) {
  return text_hash(name_hash(name), text);
}

// Of two keys, the first of which may be a cross itself. Their order counts.
inline uint64_t cross_hash(uint64_t first, uint64_t second) {
  return hash_detail::last_block(first, second, hash_detail::kCross, kHashBytes);
}

}  // namespace commute
