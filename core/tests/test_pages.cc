// SPDX-License-Identifier: Apache-2.0
// Memory of rows: zeros, nobody else's, and used again; made ready ahead or not.
#include "../store/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"

using namespace commute;

namespace {

constexpr size_t kBlock = 4096;

bool is_zero(const std::byte* block, size_t bytes) {
  return std::all_of(block, block + bytes, [](std::byte one) { return one == std::byte{}; });
}

// Enough for large regions, which another thread makes ready.
TEST(blocks_are_zeros_and_apart) {
  Pages pages;
  std::vector<std::byte*> blocks;
  for (size_t i = 0; i < (48 << 20) / kBlock; ++i) {
    blocks.push_back(pages.take(kBlock));
    CHECK(is_zero(blocks.back(), kBlock));
    std::memset(blocks.back(), int(i % 255) + 1, kBlock);
  }
  for (size_t i = 0; i < blocks.size(); ++i)
    CHECK(blocks[i][0] == std::byte(i % 255 + 1) && blocks[i][kBlock - 1] == blocks[i][0]);
  CHECK_EQ(pages.bytes(), blocks.size() * kBlock);
}

TEST(what_is_given_back_is_used_again) {
  Pages pages;
  std::byte* const block = pages.take(kBlock);
  std::memset(block, 1, kBlock);
  pages.give(block, kBlock);
  CHECK_EQ(pages.bytes(), size_t{0});
  CHECK(pages.take(kBlock) == block);
  CHECK(is_zero(block, kBlock));
}

TEST(it_may_go_while_memory_is_made_ready) {
  for (int round = 0; round < 8; ++round) {
    Pages pages;
    while (pages.bytes() < 34 << 20) pages.take(1 << 20);
  }
}

TEST(a_populator_makes_memory_ready_and_leaves_what_is_there) {
  constexpr size_t kBytes = 8 << 20;
  void* const memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(memory);
  bytes[kBytes / 2] = std::byte{7};
  {
    Populator populator;
    populator.ask({bytes, kBytes / 2});
    populator.ask({bytes + kBytes / 2, kBytes / 2});
    bytes[1] = std::byte{9};
    populator.close();
    populator.ask({bytes, kBytes});  // too late: it does nothing
  }
  CHECK(bytes[kBytes / 2] == std::byte{7} && bytes[1] == std::byte{9});
  CHECK(is_zero(bytes + kBytes / 2 + 1, kBytes / 2 - 1));
  ::munmap(memory, kBytes);
}

}  // namespace
