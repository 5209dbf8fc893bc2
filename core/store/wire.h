// SPDX-License-Identifier: Apache-2.0
// Rows of float32 that travel as float16 or bfloat16.
//
// The same bits on every machine: narrowing rounds to nearest, ties to even, beyond the largest
// number to infinity; of what is not a number it makes the positive quiet one without payload, as
// the kernels do. Widening is exact.
#pragma once

#include <cstddef>
#include <vector>

#include "dtype.h"
#include "store/message.h"

namespace commute {

// `wire` is kFloat16 or kBfloat16.
std::vector<std::byte> narrowed(Dtype wire, Bytes float32s);
// Raises std::invalid_argument when the bytes are not whole values.
std::vector<std::byte> widened(Dtype wire, Bytes values);

}  // namespace commute
