// SPDX-License-Identifier: Apache-2.0
#include "store/query.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

namespace commute {
namespace {

struct Half {
  uint16_t bits;

  operator double() const {
    const int exponent = bits >> 10 & 0x1f;
    const double fraction = bits & 0x3ff;
    double magnitude = std::ldexp(fraction + (exponent > 0 ? 1024 : 0), std::max(exponent, 1) - 25);
    if (exponent == 0x1f) magnitude = fraction == 0 ? INFINITY : NAN;
    return bits & 0x8000 ? -magnitude : magnitude;
  }
};

struct Brain {
  uint16_t bits;

  operator double() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// Calls f with the array as what it is.
template <class F>
auto with_type(Dtype dtype, const void* value, F f) {
  switch (dtype) {
    case Dtype::kInt8:
      return f(static_cast<const int8_t*>(value));
    case Dtype::kUint8:
      return f(static_cast<const uint8_t*>(value));
    case Dtype::kInt16:
      return f(static_cast<const int16_t*>(value));
    case Dtype::kUint16:
      return f(static_cast<const uint16_t*>(value));
    case Dtype::kInt32:
      return f(static_cast<const int32_t*>(value));
    case Dtype::kUint32:
      return f(static_cast<const uint32_t*>(value));
    case Dtype::kInt64:
      return f(static_cast<const int64_t*>(value));
    case Dtype::kUint64:
      return f(static_cast<const uint64_t*>(value));
    case Dtype::kFloat16:
      return f(static_cast<const Half*>(value));
    case Dtype::kBfloat16:
      return f(static_cast<const Brain*>(value));
    case Dtype::kFloat32:
      return f(static_cast<const float*>(value));
    default:
      return f(static_cast<const double*>(value));
  }
}

}  // namespace

Summary& Summary::operator+=(const Summary& more) {
  sum += more.sum;
  squares += more.squares;
  whole = static_cast<int64_t>(static_cast<uint64_t>(whole) + static_cast<uint64_t>(more.whole));
  nonzero += more.nonzero;
  return *this;
}

bool ranks_before(const Ranked& a, const Ranked& b) {
  const double x = std::abs(a.value), y = std::abs(b.value);
  return x > y || (x == y && a.index < b.index);
}

Summary summarize(Dtype dtype, const void* value, size_t count) {
  return with_type(dtype, value, [count]<class T>(const T* x) {
    Summary found;
    for (size_t i = 0; i < count; ++i) {
      const auto number = static_cast<double>(x[i]);
      found.sum += number;
      found.squares += number * number;
      found.nonzero += number != 0;
      if constexpr (std::is_integral_v<T>)
        found.whole =
            static_cast<int64_t>(static_cast<uint64_t>(found.whole) + static_cast<uint64_t>(x[i]));
    }
    return found;
  });
}

std::vector<Ranked> top(Dtype dtype, const void* value, size_t count, size_t k) {
  std::vector<Ranked> all = with_type(dtype, value, [count]<class T>(const T* x) {
    std::vector<Ranked> ranked;
    ranked.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const auto number = static_cast<double>(x[i]);
      if (!std::isnan(number)) ranked.push_back({i, number});
    }
    return ranked;
  });
  const size_t kept = std::min(k, all.size());
  std::partial_sort(all.begin(), all.begin() + long(kept), all.end(), ranks_before);
  all.resize(kept);
  return all;
}

bool has_nan(Dtype dtype, const void* value, size_t count) {
  if (!is_float(dtype)) return false;
  return with_type(dtype, value, [count]<class T>(const T* x) {
    bool found = false;
    for (size_t i = 0; i < count; ++i) found |= std::isnan(static_cast<double>(x[i]));
    return found;
  });
}

}  // namespace commute
