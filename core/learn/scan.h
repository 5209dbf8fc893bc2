// SPDX-License-Identifier: Apache-2.0
// Where tokens and cells end, 64 bytes at a time.
//
// `Stops` gives one place after the other where a line can be cut. Each is found without knowing
// the one before, so a processor can look for several at once: a loop that scans from the end of
// one token to the end of the next takes a quarter more time.
//
//   line   1 |f a7 b12:3\n        stops at blanks, ':' and '|'
//   marks  010010010000101        little end first: the lowest mark is the next stop
//
// A blank is any byte up to the space: tabs and carriage returns, but also NUL, and the newline at
// the end of a line. That one always stops, so a scan needs no other end.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace commute {

// Bytes that are read at once: so many can be read from the end of a line on.
inline constexpr size_t kScanBytes = 64;

inline bool is_blank(char c) {
  return static_cast<unsigned char>(c) <= ' ';
}

inline const char* skip_blanks(const char* at, const char* end) {
  while (at != end && is_blank(*at)) ++at;
  return at;
}

inline const char* skip_token(const char* at, const char* end) {
  while (at != end && !is_blank(*at)) ++at;
  return at;
}

// ---- Words of 8 bytes: everywhere ----

struct Words {
  using Block = uint64_t;

  static Block load(const char* at) {
    Block block;
    std::memcpy(&block, at, sizeof block);
    return block;
  }
  // Marks are the highest bits of bytes.
  static Block up_to_blank(Block block) {
    return ~(((block & ~kHigh) + kEach * (0x7f - ' ')) | block) & kHigh;
  }
  static Block equal(Block block, char c) {
    block ^= kEach * static_cast<unsigned char>(c);
    return ~(((block & ~kHigh) + ~kHigh) | block) & kHigh;
  }
  static Block either(Block a, Block b) { return a | b; }
  // One bit per byte: the product moves them all to the top.
  static uint64_t bits(Block marks) { return ((marks >> 7) * 0x0102040810204080) >> 56; }

 private:
  static constexpr uint64_t kEach = ~uint64_t{0} / 255;
  static constexpr uint64_t kHigh = kEach << 7;
};

// ---- Vectors of 16 bytes ----

#if defined(__SSE2__)
struct Vectors {
  using Block = __m128i;

  static Block load(const char* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  static Block up_to_blank(Block block) {
    return _mm_cmpeq_epi8(_mm_min_epu8(block, _mm_set1_epi8(' ')), block);
  }
  static Block equal(Block block, char c) { return _mm_cmpeq_epi8(block, _mm_set1_epi8(c)); }
  static Block either(Block a, Block b) { return _mm_or_si128(a, b); }
  static uint64_t bits(Block marks) { return static_cast<unsigned>(_mm_movemask_epi8(marks)); }
};
using Blocks = Vectors;
#else
using Blocks = Words;
#endif

// ---- Where to stop ----

// At blanks, and at these.
template <char... stops>
struct TokenEnds {
  template <class Kind>
  typename Kind::Block mark(typename Kind::Block block) const {
    auto marks = Kind::up_to_blank(block);
    ((marks = Kind::either(marks, Kind::equal(block, stops))), ...);
    return marks;
  }
};

struct CellEnds {
  char separator;

  template <class Kind>
  typename Kind::Block mark(typename Kind::Block block) const {
    return Kind::either(Kind::equal(block, separator), Kind::equal(block, '\n'));
  }
};

template <class Ends, class Kind = Blocks>
class Stops {
 public:
  explicit Stops(const char* at, Ends ends = {}) : ends_(ends), base_(at), marks_(marks_at(at)) {}

  // May be called until it has returned the end of the line.
  const char* next() {
    while (marks_ == 0) {
      base_ += kScanBytes;
      marks_ = marks_at(base_);
    }
    const char* const stop = base_ + std::countr_zero(marks_);
    marks_ &= marks_ - 1;
    return stop;
  }

 private:
  uint64_t marks_at(const char* at) const {
    uint64_t marks = 0;
    for (size_t i = 0; i < kScanBytes; i += sizeof(typename Kind::Block))
      marks |= Kind::bits(ends_.template mark<Kind>(Kind::load(at + i))) << i;
    return marks;
  }

  Ends ends_;
  const char* base_;
  uint64_t marks_;
};

}  // namespace commute
