// SPDX-License-Identifier: Apache-2.0
// A trial of two forms of the same work, where which is quicker is up to the processor.
//
//   trying    kSamples of the first, then as many of the second, and the time of each is noted
//   settled   the quicker one from then on
//
// One after the other, for each finds in the caches what the sample before has left there.
//
// A form is as quick as its quickest sample: what comes from outside (a page touched for the first
// time, another process on the core) only ever adds to a time. Both forms give the same result, so
// the ranks need not agree, and threads that look at the same moment may be given the same form.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>

namespace commute {

class Trial {
 public:
  enum Form : uint8_t { kFirst, kSecond };
  static constexpr int kSamples = 8;  // of each

  Form next() const {
    const std::lock_guard lock(mutex_);
    const Tried &first = tried_[kFirst], &second = tried_[kSecond];
    if (first.samples < kSamples) return kFirst;
    if (second.samples < kSamples) return kSecond;
    return first.least <= second.least ? kFirst : kSecond;
  }

  void note(Form form, double seconds_per_byte) {
    const std::lock_guard lock(mutex_);
    if (tried_[form].samples >= kSamples) return;
    ++tried_[form].samples;
    tried_[form].least = std::min(tried_[form].least, seconds_per_byte);
  }

 private:
  struct Tried {
    int samples = 0;
    double least = std::numeric_limits<double>::infinity();
  };

  mutable std::mutex mutex_;
  Tried tried_[2];
};

}  // namespace commute
