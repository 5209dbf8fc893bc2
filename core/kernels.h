// SPDX-License-Identifier: Apache-2.0
// Reduction kernels, chosen at run time by instruction set.
//
// What every set promises, bit for bit the same on every machine:
// - integers wrap around;
// - float16 and bfloat16 are computed in float32 and rounded to nearest even once, when stored;
// - a result that is not a number is the positive quiet one without payload (0x7e00, 0x7fc0,
//   0x7fc00000, 0x7ff8000000000000): processors differ in whose payload and sign they keep;
// - min and max yield NaN if any element is NaN, and order -0 before +0, so that their result does
//   not depend on the order of the sources;
// - of bool, sum, max and or are "any", prod, min and and are "all", as NumPy's add and multiply; a
//   result is 0 or 1, whatever true was stored as;
// - complex numbers are two floats each: NaN is canonical, and a mean divides, part by part;
// - a op b and b op a are the same bits.
//
// Arrays start on a multiple of their element's size; no other alignment is asked. A count, always
// of elements, may be 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "dtype.h"

namespace commute {

// dst[i] = a[i] op b[i]. dst may be a or b; otherwise arrays must not overlap.
using Reduce = void (*)(void* dst, const void* a, const void* b, std::size_t count);

// dsts[k][i] = sources[0][i] op sources[1][i] op ..., left to right, in one pass; sources_count
// >= 1. The result goes to all of dsts, of which each may be one of the sources.
using ReduceMany = void (*)(void* const* dsts, std::size_t dsts_count, const void* const* sources,
                            std::size_t sources_count, std::size_t count);

// dst[i] = dst[i] / divisor; turns a sum into a mean. divisor >= 1.
using Divide = void (*)(void* dst, std::size_t count, std::uint64_t divisor);

struct KernelSet {
  const char* name;
  // Null where `reduces` says that there is no such reduction.
  Reduce reduce[kDtypeCount][kReduceOpCount];
  ReduceMany reduce_many[kDtypeCount][kReduceOpCount];
  Divide divide[kDtypeCount];  // null for integers and bool

  Reduce reduce_for(Dtype dtype, ReduceOp op) const { return reduce[index(dtype)][index(op)]; }
  ReduceMany reduce_many_for(Dtype dtype, ReduceOp op) const {
    return reduce_many[index(dtype)][index(op)];
  }
  Divide divide_for(Dtype dtype) const { return divide[index(dtype)]; }
};

// The best set for this processor; decided at the first call.
const KernelSet& kernels();

// The sets this processor can run, the plainest first, the best last.
std::span<const KernelSet* const> supported_kernel_sets();

// The supported set of this name ("baseline", "avx2", "avx512"), or null.
const KernelSet* kernel_set(std::string_view name);

}  // namespace commute
