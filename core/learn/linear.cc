// SPDX-License-Identifier: Apache-2.0
#include "learn/linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "learn/metrics.h"

namespace commute {
namespace {

float slope(Loss loss, float score, float label) {
  const float y = 2 * label - 1;
  switch (loss) {
    case Loss::kLogistic:
      return 1 / (1 + std::exp(-score)) - label;
    case Loss::kSquared:
      return score - label;
    case Loss::kHinge:
      return y * score < 1 ? -y : 0;
    case Loss::kPerceptron:
      return y * score <= 0 ? -y : 0;
  }
  return 0;
}

}  // namespace

void linear_scores(const Places& places, const float* weights, float* scores) {
  const auto [offsets, index, values, count] = places;
  for (size_t i = 0; i < count; ++i) {
    float score = 0;
    if (values == nullptr)
      for (uint32_t at = offsets[i]; at < offsets[i + 1]; ++at) score += weights[index[at]];
    else
      for (uint32_t at = offsets[i]; at < offsets[i + 1]; ++at)
        score += weights[index[at]] * values[at];
    scores[i] = score;
  }
}

void linear_gradients(Loss loss, const Places& places, const float* scores, const float* labels,
                      const float* importances, float* gradients) {
  const auto [offsets, index, values, count] = places;
  for (size_t i = 0; i < count; ++i) {
    const float by_score = importances[i] * slope(loss, scores[i], labels[i]);
    const uint32_t end = offsets[i + 1];
    if (values == nullptr)
      for (uint32_t at = offsets[i]; at < end; ++at) gradients[index[at]] += by_score;
    else
      for (uint32_t at = offsets[i]; at < end; ++at) gradients[index[at]] += by_score * values[at];
  }
}

void linear_learn(Loss loss, const Places& places, const float* labels, const float* importances,
                  std::span<float> weights, MetricSums& sums) {
  std::vector<float> scores(places.count);
  linear_scores(places, weights.data(), scores.data());
  sums.add(loss, scores.data(), labels, importances, places.count);
  std::fill(weights.begin(), weights.end(), 0.0f);
  linear_gradients(loss, places, scores.data(), labels, importances, weights.data());
}

}  // namespace commute
