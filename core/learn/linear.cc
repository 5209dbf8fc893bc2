// SPDX-License-Identifier: Apache-2.0
#include "learn/linear.h"

#include <algorithm>
#include <cmath>

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
  for (size_t i = 0; i < places.count; ++i) {
    float score = 0;
    for (uint32_t at = places.offsets[i]; at < places.offsets[i + 1]; ++at)
      score += places.values == nullptr ? weights[at] : weights[at] * places.values[at];
    scores[i] = score;
  }
}

void linear_gradients(Loss loss, const Places& places, const float* scores, const float* labels,
                      const float* importances, float* gradients) {
  for (size_t i = 0; i < places.count; ++i) {
    const float by_score = importances[i] * slope(loss, scores[i], labels[i]);
    const uint32_t begin = places.offsets[i], end = places.offsets[i + 1];
    if (places.values == nullptr)
      std::fill(gradients + begin, gradients + end, by_score);
    else
      for (uint32_t at = begin; at < end; ++at) gradients[at] = by_score * places.values[at];
  }
}

}  // namespace commute
