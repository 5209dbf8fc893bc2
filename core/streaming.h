// SPDX-License-Identifier: Apache-2.0
// Whether a large result is stored past the caches. What that saves, fetching what is overwritten,
// and what it costs is up to the processor, the size and the collective: 16 MB took, past the
// caches and plainly,
//   Intel Xeon   allgather, 2 ranks   1.41   1.72 ms
//   AMD EPYC     gather, 2 ranks      3.8    1.6 ms
//   AMD EPYC     alltoall, 2 ranks    3.3    2.8 ms
// so each process tries both, for each collective and size, and keeps to the quicker.
//
// An operation stores in one form from begin to end: what it leaves in the caches, or does not, is
// what the next one finds.
#pragma once

#include <chrono>

#include "plan.h"
#include "trial.h"

namespace commute {

class Streaming {
 public:
  // An operation with a result of so many bytes.
  void begin(Collective collective, size_t bytes);
  bool past_caches() const { return form_ == kPast; }
  // Part of the operation: store(past the caches?), of so many bytes.
  template <class Store>
  void store(size_t bytes, Store store) {
    if (trial_ == nullptr) return store(past_caches());
    const auto begun = std::chrono::steady_clock::now();
    store(past_caches());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    seconds_ += took.count();
    bytes_ += bytes;
  }
  // Operations that do not come here do not count.
  void end();

 private:
  static constexpr Trial::Form kPlain = Trial::kFirst, kPast = Trial::kSecond;

  Trial* trial_ = nullptr;  // null: settled
  Trial::Form form_ = kPlain;
  double seconds_ = 0;
  size_t bytes_ = 0;
};

}  // namespace commute
