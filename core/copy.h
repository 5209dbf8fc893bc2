// SPDX-License-Identifier: Apache-2.0
// Copying past the caches, for large arrays that nobody reads soon: their old contents need not be
// fetched before they are overwritten, and they push nothing out of the caches.
//
// Until `end_of_streaming` others may see these stores later than what is stored after them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace commute {

// As memcpy, to `streamed`, and where `cached` is not null there as well, in the same pass and not
// past the caches.
inline void copy_past_caches(std::byte* streamed, std::byte* cached, const std::byte* from,
                             size_t bytes) {
  const auto plainly = [&](size_t at, size_t count) {
    std::memcpy(streamed + at, from + at, count);
    if (cached != nullptr) std::memcpy(cached + at, from + at, count);
  };
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const size_t to_line = -reinterpret_cast<uintptr_t>(streamed) % kLine;
  const size_t head = to_line < bytes ? to_line : bytes;
  plainly(0, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    const __m128i line[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1),
                            _mm_loadu_si128(source + 2), _mm_loadu_si128(source + 3)};
    auto* past = reinterpret_cast<__m128i*>(streamed + at);
    auto* into = reinterpret_cast<__m128i*>(cached + at);
    for (int i = 0; cached != nullptr && i < 4; ++i) _mm_storeu_si128(into + i, line[i]);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(past + i, line[i]);
  }
  plainly(at, bytes - at);
#else
  plainly(0, bytes);
#endif
}

inline void end_of_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace commute
