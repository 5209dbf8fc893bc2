// SPDX-License-Identifier: Apache-2.0
// A batch's scores against plain loops in double precision, its gradients against differences of
// the loss, and its metrics.
#include "learn/linear.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "check.h"
#include "learn/metrics.h"
#include "seeded.h"

namespace {

using namespace commute;

constexpr Loss kLosses[] = {Loss::kLogistic, Loss::kSquared, Loss::kHinge, Loss::kPerceptron};
constexpr size_t kExamples = 300, kFeatures = 50;

// Features come up again and again, some examples have none, and the last feature is in none.
struct Batch {
  std::vector<uint32_t> offsets{0}, index;
  std::vector<float> values, labels, importances, weights;

  explicit Batch(Rng& rng) : weights(kFeatures) {
    for (size_t i = 0; i < kExamples; ++i) {
      for (size_t left = rng() % 8; left > 0; --left) {
        index.push_back(static_cast<uint32_t>(rng() % (kFeatures - 1)));
        values.push_back(static_cast<float>(rng() % 9) / 4 - 1);
      }
      offsets.push_back(static_cast<uint32_t>(index.size()));
      labels.push_back(static_cast<float>(rng() % 2));
      importances.push_back(static_cast<float>(rng() % 3));
    }
    for (float& weight : weights) weight = static_cast<float>(rng() % 100) / 50 - 1;
  }

  Places places(bool plain) const {
    return {offsets.data(), index.data(), plain ? nullptr : values.data(), kExamples};
  }
};

// Numbers that floats have exactly, also added to a score.
constexpr float kNear = 0x1p-7f;

double loss_at(Loss loss, float score, float label) {
  const auto sums = std::make_unique<MetricSums>();
  const float weight = 1;
  sums->add(loss, &score, &label, &weight, 1);
  return sums->loss;
}

// What is learned must be the slope of the loss that is shown; of squares half of it, as is usual.
double slope(Loss loss, float score, float label) {
  const double rise = loss_at(loss, score + kNear, label) - loss_at(loss, score - kNear, label);
  return rise / (2 * kNear) / (loss == Loss::kSquared ? 2 : 1);
}

// Where a loss has a corner its slope is a matter of choice.
bool near_corner(Loss loss, float score, float label) {
  const float margin = (2 * label - 1) * score;
  return (loss == Loss::kHinge && std::abs(margin - 1) < 2 * kNear) ||
         (loss == Loss::kPerceptron && std::abs(margin) < 2 * kNear);
}

void check_learned(Loss loss, Batch batch, bool plain) {
  std::vector<float> scores(kExamples);
  linear_scores(batch.places(plain), batch.weights.data(), scores.data());
  std::vector<double> expected(kFeatures);
  for (size_t i = 0; i < kExamples; ++i) {
    if (near_corner(loss, scores[i], batch.labels[i])) batch.importances[i] = 0;
    double score = 0;
    for (uint32_t at = batch.offsets[i]; at < batch.offsets[i + 1]; ++at) {
      const double value = plain ? 1 : batch.values[at];
      score += batch.weights[batch.index[at]] * value;
      expected[batch.index[at]] +=
          batch.importances[i] * slope(loss, scores[i], batch.labels[i]) * value;
    }
    CHECK(std::abs(scores[i] - score) < 1e-5);
  }
  const auto judged = std::make_unique<MetricSums>(), alone = std::make_unique<MetricSums>();
  alone->add(loss, scores.data(), batch.labels.data(), batch.importances.data(), kExamples);
  linear_learn(loss, batch.places(plain), batch.labels.data(), batch.importances.data(),
               batch.weights, *judged);
  for (size_t i = 0; i < kFeatures; ++i) CHECK(std::abs(batch.weights[i] - expected[i]) < 1e-2);
  CHECK_EQ(batch.weights.back(), 0.0f);
  CHECK_EQ(judged->loss, alone->loss);
  CHECK_EQ(judged->examples, double{kExamples});
}

TEST(gradients_take_the_place_of_weights) {
  Rng rng = seeded(51);
  for (const Loss loss : kLosses)
    for (const bool plain : {true, false}) check_learned(loss, Batch(rng), plain);
}

// At a score of 0 a perceptron has decided nothing, so it learns; a hinge does up to its margin.
TEST(corners_are_learned_from) {
  const uint32_t offsets[] = {0, 1}, index[] = {0};
  const float label = 1, importance = 1;
  for (const auto& [loss, weight, expected] :
       {std::tuple{Loss::kPerceptron, 0.0f, -1.0f}, {Loss::kHinge, 1.0f, 0.0f}}) {
    std::vector<float> weights{weight};
    const auto sums = std::make_unique<MetricSums>();
    linear_learn(loss, {offsets, index, nullptr, 1}, &label, &importance, weights, *sums);
    CHECK_EQ(weights[0], expected);
  }
}

// Every example has a bin, also of a model that diverged; what is no number stays none.
TEST(scores_beyond_the_edge) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> scores{NAN, kInfinity, -kInfinity, 12, -12, 0};
  const std::vector<float> labels{0, 1, 0, 1, 0, 1}, weights(6, 0.5f);
  for (const Loss loss : {Loss::kLogistic, Loss::kHinge, Loss::kPerceptron}) {
    const auto sums = std::make_unique<MetricSums>();
    sums->add(loss, scores.data(), labels.data(), weights.data(), scores.size());
    CHECK(std::isnan(sums->loss));
    CHECK(std::isnan(sums->logloss));
    constexpr size_t kBins = MetricSums::kBins;
    CHECK_EQ(sums->bins[0], 1.0);
    CHECK_EQ(sums->bins[kBins - 1], 0.5);
    CHECK_EQ(sums->bins[kBins + kBins / 2], 0.5);
    CHECK_EQ(sums->bins[2 * kBins - 1], 1.0);
    CHECK_EQ(sums->binary, 3.0);
  }
}

}  // namespace
