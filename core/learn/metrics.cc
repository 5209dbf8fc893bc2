// SPDX-License-Identifier: Apache-2.0
#include "learn/metrics.h"

#include <algorithm>
#include <cmath>

namespace commute {
namespace {

size_t bin_of(double score) {
  // fmin turns what is not a number into the edge.
  const double within = std::fmax(std::fmin(score, MetricSums::kEdge), -MetricSums::kEdge);
  constexpr double kPerUnit = MetricSums::kBins / (2 * MetricSums::kEdge);
  return std::min(static_cast<size_t>((within + MetricSums::kEdge) * kPerUnit),
                  MetricSums::kBins - 1);
}

// What is not a number stays so: max gives its first argument then.
double loss_of(Loss loss, double score, double label, double logloss) {
  const double margin = (2 * label - 1) * score;
  switch (loss) {
    case Loss::kLogistic:
      return logloss;
    case Loss::kSquared:
      return (score - label) * (score - label);
    case Loss::kHinge:
      return std::max(1 - margin, 0.0);
    case Loss::kPerceptron:
      return std::max(-margin, 0.0);
  }
  return 0;
}

}  // namespace

void MetricSums::add(Loss by, const float* scores, const float* labels, const float* weights,
                     size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const double score = scores[i], label_i = labels[i], weight_i = weights[i];
    double predicted = score, lost = 0;
    if (by != Loss::kSquared) {
      const double small = std::exp(-std::fabs(score));  // of at most 1: nothing overflows
      predicted = (score >= 0 ? 1 : small) / (1 + small);
      lost = std::max(score, 0.0) - label_i * score + std::log1p(small);
      binary += weight_i;
      logloss += weight_i * lost;
      bins[bin_of(score) + (label_i > 0.5 ? kBins : 0)] += weight_i;
    }
    weight += weight_i;
    loss += weight_i * loss_of(by, score, label_i, lost);
    label += weight_i * label_i;
    prediction += weight_i * predicted;
  }
  examples += static_cast<double>(count);
}

}  // namespace commute
