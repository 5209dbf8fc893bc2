// SPDX-License-Identifier: Apache-2.0
// What kernels are compared with: a scalar reference that is written for clarity, and arrays
// between guards. All elements are held as their bits in a uint64_t.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../kernels.h"
#include "check.h"

namespace commute {

using Elements = std::vector<std::uint64_t>;

constexpr std::size_t kLengths[] = {0, 1, 7, 63, 64, 65, 1000};

// ---- The reference ----

struct HalfFormat {
  int mantissa_bits;
  int bias;
  std::uint64_t infinity;
};
constexpr HalfFormat kFloat16Format = {10, 15, 0x7c00};
constexpr HalfFormat kBfloat16Format = {7, 127, 0x7f80};

inline double decoded_half(std::uint64_t bits, HalfFormat format) {
  const std::uint64_t magnitude = bits & 0x7fff;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (magnitude > format.infinity) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == format.infinity) return sign * std::numeric_limits<double>::infinity();
  const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const std::uint64_t one = std::uint64_t{1} << format.mantissa_bits;
  const std::uint64_t mantissa = (magnitude & (one - 1)) | (exponent > 0 ? one : 0);
  const int power = std::max(exponent, 1) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(static_cast<double>(mantissa), power);
}

inline std::uint64_t encoded_half(double value, HalfFormat format) {
  if (std::isnan(value)) return format.infinity | (1u << (format.mantissa_bits - 1));
  const std::uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return sign | format.infinity;
  const int exponent = std::max(value == 0 ? -9999 : std::ilogb(value), 1 - format.bias);
  const double steps =
      std::nearbyint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent));
  // A mantissa that rounded up to the next power of two carries into the exponent by itself.
  const std::uint64_t exponent_field = static_cast<std::uint64_t>(exponent + format.bias - 1);
  const std::uint64_t magnitude =
      (exponent_field << format.mantissa_bits) + static_cast<std::uint64_t>(steps);
  return sign | std::min(magnitude, format.infinity);
}

// In T, so that sums and products round as T does.
template <class T>
T float_reduced(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kSum) return a + b;
  if (op == ReduceOp::kProd) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool a_first = a < b || (a == b && std::signbit(a));
  return a_first == (op == ReduceOp::kMin) ? a : b;
}

template <class T>
T integer_reduced(ReduceOp op, T a, T b) {
  const auto wide_a = static_cast<std::uint64_t>(a);
  const auto wide_b = static_cast<std::uint64_t>(b);
  if (op == ReduceOp::kSum) return static_cast<T>(wide_a + wide_b);
  if (op == ReduceOp::kProd) return static_cast<T>(wide_a * wide_b);
  if (op == ReduceOp::kAnd) return static_cast<T>(wide_a & wide_b);
  if (op == ReduceOp::kOr) return static_cast<T>(wide_a | wide_b);
  if (op == ReduceOp::kXor) return static_cast<T>(wide_a ^ wide_b);
  return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
}

template <class T, class Bits>
struct FloatCodec {
  using Value = T;
  static T decode(std::uint64_t bits) { return std::bit_cast<T>(static_cast<Bits>(bits)); }
  static std::uint64_t encode(T value) {
    return std::bit_cast<Bits>(std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value);
  }
};

template <const HalfFormat& kFormat>
struct HalfCodec {
  using Value = float;
  static float decode(std::uint64_t bits) {
    return static_cast<float>(decoded_half(bits, kFormat));
  }
  static std::uint64_t encode(float value) { return encoded_half(value, kFormat); }
};

template <class T>
struct IntegerCodec {
  using Value = T;
  static T decode(std::uint64_t bits) { return static_cast<T>(bits); }
  static std::uint64_t encode(T value) { return static_cast<std::make_unsigned_t<T>>(value); }
};

inline bool bool_reduced(ReduceOp op, bool a, bool b) {
  if (op == ReduceOp::kXor) return a != b;
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kOr;
  return any ? a || b : a && b;
}

struct BoolCodec {
  using Value = bool;
  static bool decode(std::uint64_t bits) { return bits != 0; }
  static std::uint64_t encode(bool value) { return value ? 1 : 0; }
};

template <class Action>
auto with_codec(Dtype dtype, Action action) {
  switch (dtype) {
    case Dtype::kInt8:
      return action(IntegerCodec<std::int8_t>{});
    case Dtype::kUint8:
      return action(IntegerCodec<std::uint8_t>{});
    case Dtype::kInt16:
      return action(IntegerCodec<std::int16_t>{});
    case Dtype::kUint16:
      return action(IntegerCodec<std::uint16_t>{});
    case Dtype::kInt32:
      return action(IntegerCodec<std::int32_t>{});
    case Dtype::kUint32:
      return action(IntegerCodec<std::uint32_t>{});
    case Dtype::kInt64:
      return action(IntegerCodec<std::int64_t>{});
    case Dtype::kUint64:
      return action(IntegerCodec<std::uint64_t>{});
    case Dtype::kFloat16:
      return action(HalfCodec<kFloat16Format>{});
    case Dtype::kBfloat16:
      return action(HalfCodec<kBfloat16Format>{});
    case Dtype::kFloat32:
      return action(FloatCodec<float, std::uint32_t>{});
    case Dtype::kBool:
      return action(BoolCodec{});
    default:
      return action(FloatCodec<double, std::uint64_t>{});
  }
}

inline Elements reference_reduced(Dtype dtype, ReduceOp op, const std::vector<Elements>& sources) {
  return with_codec(dtype, [&](auto codec) {
    Elements result;
    for (std::size_t i = 0; i < sources[0].size(); ++i) {
      auto value = codec.decode(sources[0][i]);
      for (std::size_t k = 1; k < sources.size(); ++k) {
        if constexpr (std::is_floating_point_v<decltype(value)>) {
          value = float_reduced(op, value, codec.decode(sources[k][i]));
        } else if constexpr (std::is_same_v<decltype(value), bool>) {
          value = bool_reduced(op, value, codec.decode(sources[k][i]));
        } else {
          value = integer_reduced(op, value, codec.decode(sources[k][i]));
        }
      }
      result.push_back(codec.encode(value));
    }
    return result;
  });
}

inline Elements reference_divided(Dtype dtype, const Elements& elements, std::uint64_t divisor) {
  return with_codec(dtype, [&](auto codec) {
    using Value = typename decltype(codec)::Value;
    Elements result;
    for (const std::uint64_t bits : elements) {
      const Value quotient = codec.decode(bits) / static_cast<Value>(divisor);
      result.push_back(codec.encode(quotient));
    }
    return result;
  });
}

// ---- Arrays under test ----

// An array that starts `offset` elements after a 64-byte boundary, between guards.
class Array {
 public:
  Array(Dtype dtype, const Elements& elements, std::size_t offset)
      : dtype_(dtype), count_(elements.size()), start_((offset + 64) * item_bytes(dtype)) {
    const std::size_t bytes = start_ + count_ * item_bytes(dtype) + kGuard;
    memory_.assign(bytes / 64 + 1, Line{});
    std::memset(memory_.data(), kFill, memory_.size() * sizeof(Line));
    for (std::size_t i = 0; i < count_; ++i) {
      std::memcpy(item(i), &elements[i], item_bytes(dtype));
    }
  }

  void* data() { return item(0); }

  Elements elements() {
    Elements result(count_);
    for (std::size_t i = 0; i < count_; ++i) std::memcpy(&result[i], item(i), item_bytes(dtype_));
    return result;
  }

  bool guards_untouched() {
    const unsigned char* all = bytes();
    const std::size_t end = start_ + count_ * item_bytes(dtype_);
    for (std::size_t i = 0; i < memory_.size() * sizeof(Line); ++i) {
      if ((i < start_ || i >= end) && all[i] != kFill) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  static constexpr unsigned char kFill = 0xa5;
  static constexpr std::size_t kGuard = 128;

  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(memory_.data()); }
  unsigned char* item(std::size_t i) { return bytes() + start_ + i * item_bytes(dtype_); }

  Dtype dtype_;
  std::size_t count_;
  std::size_t start_;
  std::vector<Line> memory_;
};

inline std::uint64_t masked(Dtype dtype, std::uint64_t bits) {
  return item_bytes(dtype) == 8 ? bits : bits & ((std::uint64_t{1} << 8 * item_bytes(dtype)) - 1);
}

// Patterns where arithmetic goes wrong first, as bits.
inline Elements special_values(Dtype dtype) {
  const int bits = static_cast<int>(item_bytes(dtype)) * 8;
  const std::uint64_t top = std::uint64_t{1} << (bits - 1);
  if (!is_float(dtype)) return {0, 1, 2, top - 1, top, top + 1, masked(dtype, ~std::uint64_t{0})};
  const int mantissa = dtype == Dtype::kFloat16    ? 10
                       : dtype == Dtype::kBfloat16 ? 7
                       : dtype == Dtype::kFloat32  ? 23
                                                   : 52;
  const std::uint64_t step = std::uint64_t{1} << mantissa;
  const std::uint64_t infinity = (top - 1) / step * step;
  const std::uint64_t one = (top / 2 - 1) / step * step;
  Elements result = {0,
                     1,
                     step - 1,
                     step,
                     step + 1,
                     one,
                     one + 1,
                     one + step,
                     infinity - 1,
                     infinity - step,
                     infinity,
                     infinity + 1,
                     infinity + step / 2,
                     top - 1};
  for (std::size_t i = 0, positive = result.size(); i < positive; ++i) {
    result.push_back(result[i] | top);
  }
  return result;
}

// Half of them arbitrary bits, the rest numbers of moderate size, so that sums do not all overflow.
inline Elements random_elements(Dtype dtype, std::size_t count, std::mt19937_64& random) {
  Elements result;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = masked(dtype, random());
    if (is_float(dtype) && random() % 2 == 0) {
      const double value = std::ldexp(static_cast<double>(random() % 4096) - 2048, -8);
      bits = with_codec(dtype, [&](auto codec) -> std::uint64_t {
        return codec.encode(static_cast<typename decltype(codec)::Value>(value));
      });
    }
    result.push_back(bits);
  }
  return result;
}

inline void check_same(const Elements& got, const Elements& expected, const std::string& what) {
  CHECK_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size() && i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    char text[128];
    std::snprintf(text, sizeof text, " [%zu]: %#llx, expected %#llx", i,
                  static_cast<unsigned long long>(got[i]),
                  static_cast<unsigned long long>(expected[i]));
    commute::check::fail(__FILE__, __LINE__, what + text);
  }
}

inline std::string label(const KernelSet& set, Dtype dtype, ReduceOp op) {
  return std::string(set.name) + " " + name(dtype) + " " + name(op);
}

}  // namespace commute
