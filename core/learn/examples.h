// SPDX-License-Identifier: Apache-2.0
// A batch of examples, as rows of a sparse matrix (CSR):
//
//   labels   y0 y1        one per example, so are weights
//   offsets  0 3 5        the features of example i are offsets[i] to offsets[i + 1]
//   keys     a b c a d    the 64-bit hash of a feature (feature_hash.h)
//   values   1 1 .5 1 2   one per key; empty when all of them are 1 (`plain`)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace commute {

// A line that could not be read, and so was left out whole.
struct BadLine {
  size_t line;       // 0 is the first line of the text
  std::string what;  // both may hold any bytes
  std::string text;  // the beginning of the line
};

struct Examples {
  std::vector<float> labels;
  std::vector<float> weights;  // importance
  std::vector<uint32_t> offsets{0};
  std::vector<uint64_t> keys;
  std::vector<float> values;
  bool plain = true;

  size_t consumed = 0;  // bytes
  size_t lines = 0;     // read, also those that gave no example
  std::vector<BadLine> bad;

  size_t count() const { return labels.size(); }
};

}  // namespace commute
