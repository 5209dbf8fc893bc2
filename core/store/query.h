// SPDX-License-Identifier: Apache-2.0
// Questions about a part that are answered where it lies; the client merges the answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"

namespace commute {

struct Summary {
  double sum = 0;
  double squares = 0;
  int64_t whole = 0;  // the sum of integers, exact modulo 2^64
  uint64_t nonzero = 0;

  Summary& operator+=(const Summary& more);
};

struct Ranked {
  uint64_t index = 0;
  double value = 0;
};

// Largest magnitude first; of equals the first.
bool ranks_before(const Ranked& a, const Ranked& b);

Summary summarize(Dtype dtype, const void* value, size_t count);
// The elements of largest magnitude, largest first; of equals the first. Those that are not a
// number are left out.
std::vector<Ranked> top(Dtype dtype, const void* value, size_t count, size_t k);
bool has_nan(Dtype dtype, const void* value, size_t count);

}  // namespace commute
