// SPDX-License-Identifier: Apache-2.0
// Blocks in the room of a segment: apart from each other, used again, given back to the system.
#include "../arena.h"

#include <sys/stat.h>

#include <unistd.h>

#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "seeded.h"

using namespace commute;

namespace {

constexpr size_t kHead = 8192;
constexpr size_t kPage = Arena::kPageBytes;

struct Room {
  explicit Room(size_t room, size_t kept = Arena::kKeptBytes)
      : segment(std::make_shared<Segment>(Segment::create(kHead, room))),
        arena(segment, kHead, kept) {}

  // Bytes of memory that the segment takes.
  size_t taken() const {
    struct stat found{};
    CHECK_EQ(::fstat(segment->fd(), &found), 0);
    return size_t(found.st_blocks) * 512;
  }

  std::shared_ptr<Segment> segment;
  Arena arena;
};

TEST(room_takes_no_memory_until_it_is_used) {
  Room room(size_t{1} << 36);
  CHECK_EQ(room.taken(), kHead);
  const auto at = room.arena.take(3 * kPage + 1);
  CHECK(at.has_value());
  CHECK_EQ(room.taken(), kHead + 4 * kPage);
  room.arena.data(*at)[4 * kPage - 1] = std::byte{1};

  // A peer maps all of it, and that takes none either.
  const Segment peer = Segment::map(::dup(room.segment->fd()), kHead);
  CHECK_EQ(peer.bytes(), kHead + (size_t{1} << 36));
  CHECK_EQ(int(peer.data()[*at + 4 * kPage - 1]), 1);
  CHECK_EQ(room.taken(), kHead + 4 * kPage);
}

TEST(the_smallest_that_fits_is_used_again) {
  Room room(64 * kPage);
  const size_t large = *room.arena.take(8 * kPage), apart = *room.arena.take(kPage);
  const size_t small = *room.arena.take(2 * kPage), end = *room.arena.take(1);
  room.arena.give(large, 8 * kPage);
  room.arena.give(small, 2 * kPage);
  CHECK_EQ(room.arena.kept(), 10 * kPage);
  CHECK_EQ(*room.arena.take(2 * kPage), small);
  CHECK_EQ(*room.arena.take(3 * kPage), large);
  CHECK_EQ(*room.arena.take(5 * kPage), large + 3 * kPage);
  CHECK_EQ(room.arena.kept(), 0u);
  CHECK_EQ(*room.arena.take(1), end + kPage);
  CHECK(apart > large);
}

TEST(neighbours_become_one) {
  Room room(16 * kPage);
  const size_t a = *room.arena.take(kPage), b = *room.arena.take(kPage);
  const size_t c = *room.arena.take(kPage);
  (void)*room.arena.take(kPage);
  room.arena.give(a, kPage);
  room.arena.give(c, kPage);
  room.arena.give(b, kPage);
  CHECK_EQ(*room.arena.take(3 * kPage), a);
}

TEST(what_does_not_fit_is_not_there) {
  Room room(4 * kPage);
  CHECK(!room.arena.take(5 * kPage).has_value());
  CHECK(!room.arena.take(~size_t{0}).has_value());
  CHECK(room.arena.take(4 * kPage).has_value());
  CHECK(!room.arena.take(1).has_value());
  Room none(0);
  CHECK(!none.arena.take(1).has_value());
}

TEST(beyond_what_is_kept_memory_goes_back) {
  Room room(64 * kPage, 4 * kPage);
  const size_t a = *room.arena.take(4 * kPage), b = *room.arena.take(8 * kPage);
  room.arena.give(a, 4 * kPage);
  room.arena.give(b, 8 * kPage);
  CHECK_EQ(room.arena.kept(), 4 * kPage);
  CHECK_EQ(room.taken(), kHead + 4 * kPage);
  // Its place is used again, with new memory.
  CHECK_EQ(*room.arena.take(8 * kPage), b);
  CHECK_EQ(int(room.arena.data(b)[0]), 0);
  CHECK_EQ(room.taken(), kHead + 12 * kPage);
}

TEST(blocks_never_overlap) {
  Rng rng = seeded(7);
  Room room(256 * kPage, 32 * kPage);
  struct Mine {
    size_t bytes;
    std::byte mark;
  };
  std::map<size_t, Mine> mine;
  for (int i = 0; i < 4000; ++i) {
    if (mine.empty() || rng() % 2) {
      const size_t bytes = 1 + rng() % (12 * kPage);
      const auto at = room.arena.take(bytes);
      if (!at) continue;
      const auto mark = std::byte(1 + rng() % 255);
      std::memset(room.arena.data(*at), int(mark), bytes);
      CHECK(mine.emplace(*at, Mine{bytes, mark}).second);
    } else {
      auto one = mine.begin();
      std::advance(one, ptrdiff_t(rng() % mine.size()));
      const std::byte* const data = room.arena.data(one->first);
      for (const size_t byte : {size_t{0}, one->second.bytes / 2, one->second.bytes - 1})
        CHECK(data[byte] == one->second.mark);
      room.arena.give(one->first, one->second.bytes);
      mine.erase(one);
    }
    CHECK(room.arena.kept() <= 32 * kPage);
  }
  for (const auto& [at, block] : mine) room.arena.give(at, block.bytes);
  CHECK(room.arena.take(200 * kPage).has_value() || room.arena.kept() > 0);
}

TEST(any_thread_may_give) {
  Room room(1024 * kPage);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&room] {
      for (int i = 0; i < 500; ++i) {
        const auto at = room.arena.take(kPage * (1 + i % 3));
        if (at) room.arena.give(*at, kPage * (1 + i % 3));
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(room.arena.kept() > 0);
}

}  // namespace
