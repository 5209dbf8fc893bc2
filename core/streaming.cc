// SPDX-License-Identifier: Apache-2.0
#include "streaming.h"

#include <array>
#include <bit>

namespace commute {
namespace {

constexpr size_t kSizes = 64;  // by the number of bits

// Those of this process.
Trial& trial_of(Collective collective, size_t bytes) {
  static std::array<std::array<Trial, kSizes + 1>, kCollectives> trials;
  return trials[static_cast<size_t>(collective)][size_t(std::bit_width(bytes))];
}

}  // namespace

void Streaming::begin(Collective collective, size_t bytes) {
  Trial& trial = trial_of(collective, bytes);
  form_ = trial.next();
  trial_ = trial.settled() ? nullptr : &trial;
  seconds_ = 0;
  bytes_ = 0;
}

void Streaming::end() {
  if (trial_ != nullptr && bytes_ > 0) trial_->note(form_, seconds_ / static_cast<double>(bytes_));
}

}  // namespace commute
