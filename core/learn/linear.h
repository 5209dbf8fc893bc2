// SPDX-License-Identifier: Apache-2.0
// Linear models over sparse examples: scores, and the gradient of the loss by every feature.
//
//   score = sum of weight * value          gradient of a feature = importance * dloss/dscore *
//   value
//
//   loss         label    dloss/dscore
//   logistic     0, 1     sigmoid(score) - label
//   squared      any      score - label
//   hinge        0, 1     -y where y * score < 1, with y = 2 * label - 1
//   perceptron   0, 1     -y where y * score <= 0
//
// A feature that comes up often has a weight and a gradient at each of its places: whoever pushes
// the gradients adds them up.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commute {

enum class Loss : uint8_t { kLogistic = 0, kSquared = 1, kHinge = 2, kPerceptron = 3 };

struct Places {             // of the features of `count` examples
  const uint32_t* offsets;  // count + 1
  const float* values;      // nullptr: all are 1
  size_t count;
};

void linear_scores(const Places& places, const float* weights, float* scores);
// `gradients` may be `weights`.
void linear_gradients(Loss loss, const Places& places, const float* scores, const float* labels,
                      const float* importances, float* gradients);

}  // namespace commute
