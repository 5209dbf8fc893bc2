// SPDX-License-Identifier: Apache-2.0
// Code for rows of usual widths.
#pragma once

#include <cstddef>
#include <type_traits>

namespace commute {

// Calls f(row_bytes), for usual widths with a constant, of which the compiler makes plain moves.
template <class F>
void with_row_bytes(size_t row_bytes, F f) {
  switch (row_bytes) {
    case 4:
      return f(std::integral_constant<size_t, 4>{});
    case 8:
      return f(std::integral_constant<size_t, 8>{});
    case 16:
      return f(std::integral_constant<size_t, 16>{});
    case 32:
      return f(std::integral_constant<size_t, 32>{});
    case 64:
      return f(std::integral_constant<size_t, 64>{});
    case 128:
      return f(std::integral_constant<size_t, 128>{});
    default:
      return f(row_bytes);
  }
}

}  // namespace commute
