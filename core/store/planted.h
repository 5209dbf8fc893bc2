// SPDX-License-Identifier: Apache-2.0
// Bugs that tests plant in the shipped machines, to see that the simulator finds them. Never set
// elsewhere.
#pragma once

#include <cstdint>

namespace commute {

enum class Planted : uint8_t {
  kNone,
  kNoDeduplication,  // a push that is sent again counts again
  kEarlyClose,       // a round is closed before all are there
  kLostTick,         // an empty contribution is not counted
  kWrongMinimum,     // the fastest is taken for the slowest
  kStaleCache,       // the cache answers whatever it holds
  kHalfSlot,         // of a contribution only the first half is applied
};

}  // namespace commute
