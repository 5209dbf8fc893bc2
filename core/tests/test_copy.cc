// SPDX-License-Identifier: Apache-2.0
// Copying plainly and past the caches, with every width of stores that this processor has: what is
// copied, and that nothing beside it is touched.
#include "../copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"

namespace {

using namespace commute;
using Bytes = std::vector<std::byte>;

constexpr size_t kLine = 64;
constexpr size_t kLongest = 300;

struct alignas(kLine) Room {
  std::byte bytes[2 * kLine + kLongest];

  Room() { std::memset(bytes, 0xee, sizeof bytes); }
  // `from` at `at`, and the rest as it was?
  bool holds(const std::byte* from, size_t at, size_t count) const {
    Room wanted;
    if (count > 0) std::memcpy(wanted.bytes + at, from, count);
    return std::memcmp(bytes, wanted.bytes, sizeof bytes) == 0;
  }
};

Bytes pattern(size_t count) {
  Bytes made(count);
  for (size_t i = 0; i < count; ++i) made[i] = std::byte(i * 7 + 1);
  return made;
}

TEST(every_length_from_everywhere_to_everywhere) {
  const Bytes from = pattern(kLine + kLongest);
  for (size_t to = 0; to < kLine; ++to)
    for (size_t count = 0; count <= kLongest; ++count) {
      const std::byte* const source = from.data() + (to * 5 + count) % kLine;
      Room alone, streamed, cached;
      const size_t beside = (to * 3 + 1) % kLine;
      copy_past_caches(alone.bytes + to, nullptr, source, count);
      copy_past_caches(streamed.bytes + to, cached.bytes + beside, source, count);
      end_of_streaming();
      CHECK(alone.holds(source, to, count));
      CHECK(streamed.holds(source, to, count));
      CHECK(cached.holds(source, beside, count));
    }
}

TEST(every_width_of_stores) {
  const Bytes from = pattern(kLine + kLongest);
  for (const CopyLines copy : copies_of_lines())
    for (size_t offset = 0; offset < kLine; ++offset)
      for (size_t count = 0; count <= kLongest; count += kLine) {
        const std::byte* const source = from.data() + offset;
        Room alone, streamed, cached;
        copy(alone.bytes + kLine, nullptr, source, count);
        Room plain;
        copy(nullptr, plain.bytes + offset, source, count);
        CHECK(plain.holds(source, offset, count));
        copy(streamed.bytes + kLine, cached.bytes + offset, source, count);
        end_of_streaming();
        CHECK(alone.holds(source, kLine, count));
        CHECK(streamed.holds(source, kLine, count));
        CHECK(cached.holds(source, offset, count));
      }
}

// From where memcpy is not asked, and across pages.
TEST(long_ones_plainly) {
  const Bytes from = pattern(20'000);
  for (const size_t to : {0, 1, 16, 63, 64, 100})
    for (const size_t at : {0, 1, 16, 48, 63})
      for (const size_t count : {0, 1, 2047, 2048, 2049, 4096, 12'345}) {
        Bytes room(20'000, std::byte{0xee}), wanted = room;
        copy_bytes(room.data() + to, from.data() + at, count);
        std::copy_n(from.begin() + ptrdiff_t(at), count, wanted.begin() + ptrdiff_t(to));
        CHECK(room == wanted);
      }
}

TEST(what_overlaps) {
  for (const size_t to : {0, 1, 8, 64, 100, 5000})
    for (const size_t at : {0, 1, 8, 64, 100, 5000}) {
      Bytes room = pattern(20'000), wanted = room;
      copy_bytes(room.data() + to, room.data() + at, 10'000);
      std::memmove(wanted.data() + to, wanted.data() + at, 10'000);
      CHECK(room == wanted);
    }
}

}  // namespace
