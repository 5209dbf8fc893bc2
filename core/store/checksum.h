// SPDX-License-Identifier: Apache-2.0
// The checksum of saved files: XXH64 with seed 0, of bytes as they come. It finds damage, not
// malice. Chosen because everybody can compute it (`xxhsum -H1`), at the speed of memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace commute {

class Checksum {
 public:
  void add(const std::byte* bytes, size_t count);
  uint64_t value() const;  // of all that was added

 private:
  static constexpr size_t kStripe = 32;

  std::array<uint64_t, 4> lanes_{0x60ea27eeadc0b5d6, 0xc2b2ae3d27d4eb4f, 0, 0x61c8864e7a143579};
  std::array<std::byte, kStripe> rest_{};  // what does not fill a stripe yet
  size_t rest_bytes_ = 0;
  uint64_t total_ = 0;
};

}  // namespace commute
