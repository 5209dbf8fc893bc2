// SPDX-License-Identifier: Apache-2.0
// How good scores are, added up: the sums of commute/learn/metrics.py, which makes figures of them.
//
//   examples | weight | loss | label | prediction | binary | logloss | 0's by bin | 1's by bin
//
// Bins are uniform in the score, from -kEdge to kEdge; what lies beyond, and what is no number,
// has the outermost ones.
#pragma once

#include <cstddef>

#include "learn/linear.h"

namespace commute {

struct MetricSums {
  static constexpr size_t kBins = 2048;
  static constexpr double kEdge = 12;
  static constexpr size_t kCount = 7 + 2 * kBins;

  double examples, weight, loss, label, prediction, binary, logloss;
  double bins[2 * kBins];

  void add(Loss by, const float* scores, const float* labels, const float* weights, size_t count);
};
static_assert(sizeof(MetricSums) == MetricSums::kCount * sizeof(double));

}  // namespace commute
