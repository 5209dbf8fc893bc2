// SPDX-License-Identifier: Apache-2.0
// Random numbers that can be had again: the seed is printed before they are drawn.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>

using Rng = std::mt19937_64;

inline Rng seeded(uint64_t seed) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return Rng(seed);
}
