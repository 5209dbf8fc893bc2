// SPDX-License-Identifier: Apache-2.0
// Linear models over sparse examples: scores, and the gradient of the loss by every feature.
//
//   score = sum of weight * value
//   gradient of a feature = sum of importance * dloss/dscore * value, over its places
//
//   loss         label    dloss/dscore
//   logistic     0, 1     sigmoid(score) - label
//   squared      any      score - label
//   hinge        0, 1     -y where y * score < 1, with y = 2 * label - 1
//   perceptron   0, 1     -y where y * score <= 0
//
// A feature that comes up often has one weight and one gradient: each of its places has its number.
// Sums are in the order of the examples, whatever machine computes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace commute {

struct MetricSums;

enum class Loss : uint8_t { kLogistic = 0, kSquared = 1, kHinge = 2, kPerceptron = 3 };

struct Places {             // of the features of `count` examples
  const uint32_t* offsets;  // count + 1
  const uint32_t* index;    // of a place: which weight is its feature's
  const float* values;      // nullptr: all are 1
  size_t count;
};

void linear_scores(const Places& places, const float* weights, float* scores);
// Adds to `gradients`, which has one for each weight.
void linear_gradients(Loss loss, const Places& places, const float* scores, const float* labels,
                      const float* importances, float* gradients);
// Scores, which are judged (metrics.h), and then gradients, which take the place of the weights.
void linear_learn(Loss loss, const Places& places, const float* labels, const float* importances,
                  std::span<float> weights, MetricSums& sums);

}  // namespace commute
