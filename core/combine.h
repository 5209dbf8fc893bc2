// SPDX-License-Identifier: Apache-2.0
// A reduction that the caller brings along, in the place of a kernel.
//
// It is applied by whoever moves bytes, on the caller's thread or the progress thread, never under
// the engine's mutex, to one piece of the arrays after the other. Like the arrays it belongs to the
// caller, who keeps it until the operation has finished: operations are let go of on any thread,
// and what a caller of another language holds may only be let go of on its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace commute {

// It could not be applied; what() tells all ranks why.
struct CombineFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Combine {
 public:
  virtual ~Combine() = default;

  // out[i] = a[i] op b[i]; out may be a or b. Raises CombineFailed.
  virtual void apply(const void* a, const void* b, void* out, std::size_t count) const = 0;

  // Of its name, as far as it has one: ranks compare it.
  virtual std::uint32_t fingerprint() const { return 0; }
};

}  // namespace commute
