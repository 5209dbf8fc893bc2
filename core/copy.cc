// SPDX-License-Identifier: Apache-2.0
#include "copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace commute {
namespace {

void copy_plainly(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes) {
  if (streamed != nullptr) std::memcpy(streamed, from, bytes);
  if (cached != nullptr) std::memcpy(cached, from, bytes);
}

#if defined(__x86_64__)

constexpr size_t kLine = 64;
// From here on memcpy may take the one instruction.
constexpr size_t kLong = 2048;
// What is read is asked for so far ahead: of 8 MB past the caches, by each of two processes, 2 KB
// gained a sixth and 4 KB or more a fifth (0.63, 0.53, 0.50 ms, AMD EPYC); the processor's own
// guesses end with the page.
constexpr size_t kAhead = 4096;

// The wider the stores, the less of a copy through the caches is spent on instructions (64 MB
// between 4 processes: 8.6, 8.0, 7.5 ms).
//
// Lines stay in registers: by way of the stack, where parts of them are stored and read again as
// wider ones, stores past the caches took five times as long.

inline void ask_ahead(const std::byte* from, size_t at, size_t bytes) {
  if (at + kAhead < bytes)
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_T0);
}

void copy_lines_sse2(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLine) {
    ask_ahead(from, at, bytes);
    const auto* const line = reinterpret_cast<const __m128i*>(from + at);
    const __m128i parts[] = {_mm_loadu_si128(line), _mm_loadu_si128(line + 1),
                             _mm_loadu_si128(line + 2), _mm_loadu_si128(line + 3)};
    for (int i = 0; cached != nullptr && i < 4; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(cached + at) + i, parts[i]);
    for (int i = 0; streamed != nullptr && i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(streamed + at) + i, parts[i]);
  }
}

__attribute__((target("avx"))) void copy_lines_avx(std::byte* streamed, std::byte* cached,
                                                   const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLine) {
    ask_ahead(from, at, bytes);
    const auto* const line = reinterpret_cast<const __m256i*>(from + at);
    const __m256i first = _mm256_loadu_si256(line), second = _mm256_loadu_si256(line + 1);
    if (cached != nullptr) {
      auto* const beside = reinterpret_cast<__m256i*>(cached + at);
      _mm256_storeu_si256(beside, first);
      _mm256_storeu_si256(beside + 1, second);
    }
    if (streamed == nullptr) continue;
    auto* const past = reinterpret_cast<__m256i*>(streamed + at);
    _mm256_stream_si256(past, first);
    _mm256_stream_si256(past + 1, second);
  }
}

__attribute__((target("avx512f"))) void copy_lines_avx512(std::byte* streamed, std::byte* cached,
                                                          const std::byte* from, size_t bytes) {
#pragma GCC unroll 4
  for (size_t at = 0; at < bytes; at += kLine) {
    ask_ahead(from, at, bytes);
    const __m512i line = _mm512_loadu_si512(from + at);
    if (cached != nullptr) _mm512_storeu_si512(cached + at, line);
    if (streamed != nullptr) _mm512_stream_si512(reinterpret_cast<__m512i*>(streamed + at), line);
  }
}

#endif

}  // namespace

#if defined(__x86_64__)

std::vector<CopyLines> copies_of_lines() {
  __builtin_cpu_init();
  std::vector<CopyLines> found = {copy_lines_sse2};
  if (__builtin_cpu_supports("avx")) found.push_back(copy_lines_avx);
  if (__builtin_cpu_supports("avx512f")) found.push_back(copy_lines_avx512);
  return found;
}

namespace {

// Lines begin where one begins in `streamed`, or else in `cached`.
void copy_long(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes) {
  static const CopyLines copy_lines = copies_of_lines().back();
  const auto* const aligned = streamed != nullptr ? streamed : cached;
  const size_t to_line = -reinterpret_cast<uintptr_t>(aligned) % kLine;
  const size_t head = to_line < bytes ? to_line : bytes;
  const size_t lines = (bytes - head) / kLine * kLine;
  const auto moved = [](std::byte* to, size_t by) { return to == nullptr ? nullptr : to + by; };
  copy_plainly(streamed, cached, from, head);
  copy_lines(moved(streamed, head), moved(cached, head), from + head, lines);
  const size_t done = head + lines;
  copy_plainly(moved(streamed, done), moved(cached, done), from + done, bytes - done);
}

}  // namespace

void copy_bytes(void* to, const void* from, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  const bool overlap = begin < source + bytes && source < begin + bytes;
  if (bytes >= kLong && !overlap)
    copy_long(nullptr, static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  else if (bytes > 0)
    std::memmove(to, from, bytes);
}

void copy_past_caches(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes) {
  copy_long(streamed, cached, from, bytes);
}

void end_of_streaming() {
  _mm_sfence();
}

#else

std::vector<CopyLines> copies_of_lines() {
  return {copy_plainly};
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

void copy_past_caches(std::byte* streamed, std::byte* cached, const std::byte* from, size_t bytes) {
  copy_plainly(streamed, cached, from, bytes);
}

void end_of_streaming() {}

#endif

}  // namespace commute
