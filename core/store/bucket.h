// SPDX-License-Identifier: Apache-2.0
// How a bucket of rows is fetched and searched.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace commute {

constexpr size_t kCacheLineBytes = 64;
constexpr uint32_t kKeysMax = 7;  // in a bucket: as many as a line has room for, beside the meta

// A loop that only fetches has no effect in the compiler's eyes, and is dropped, but for the asm.
inline void prefetch(const void* at) {
  __builtin_prefetch(at);
  asm volatile("" : : "r"(at));
}

// Four lines at most; the processor sees how it goes on.
inline void prefetch_lines(const std::byte* begin, size_t bytes) {
  const std::byte* const end = begin + bytes;
  const std::byte* line = begin - reinterpret_cast<uintptr_t>(begin) % kCacheLineBytes;
  for (int i = 0; i < 4 && line < end; ++i, line += kCacheLineBytes) prefetch(line);
}

// A bit for each of the first seven words that is the key. All are in the bucket, whether they are
// keys or not: its meta tells. Without a branch, for nobody can guess which it is.
inline uint32_t equal_keys(const std::byte* bucket, uint64_t key) {
#ifdef __SSE2__
  // Both halves of a word must be equal: 16 instructions instead of 35.
  const __m128i wanted = _mm_set1_epi64x(static_cast<long long>(key));
  const auto* const pairs = reinterpret_cast<const __m128i*>(bucket);
  const auto equal = [&](size_t pair) {
    return _mm_castsi128_ps(_mm_cmpeq_epi32(_mm_load_si128(pairs + pair), wanted));
  };
  const auto four = [&](size_t pair) {
    const __m128 a = equal(pair), b = equal(pair + 1);
    const __m128 low = _mm_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 high = _mm_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1));
    return static_cast<uint32_t>(_mm_movemask_ps(_mm_and_ps(low, high)));
  };
  return four(0) | four(2) << 4;
#else
  // Compared where they are: copied, they would go through the stack, at three times the cost.
  const auto* const words = reinterpret_cast<const uint64_t*>(bucket);
  uint32_t found = 0;
  for (uint32_t i = 0; i < kKeysMax; ++i) found |= static_cast<uint32_t>(words[i] == key) << i;
  return found;
#endif
}

}  // namespace commute
