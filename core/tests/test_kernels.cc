// SPDX-License-Identifier: Apache-2.0
// Every set of kernels against a scalar reference that is written for clarity, over all element
// types and operations, and the sets against each other, bit for bit. All elements are held as
// their bits in a uint64_t.
#include "../kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace commute;
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

double decoded_half(std::uint64_t bits, HalfFormat format) {
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

std::uint64_t encoded_half(double value, HalfFormat format) {
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

bool bool_reduced(ReduceOp op, bool a, bool b) {
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

Elements reference_reduced(Dtype dtype, ReduceOp op, const std::vector<Elements>& sources) {
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

Elements reference_divided(Dtype dtype, const Elements& elements, std::uint64_t divisor) {
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

std::uint64_t masked(Dtype dtype, std::uint64_t bits) {
  return item_bytes(dtype) == 8 ? bits : bits & ((std::uint64_t{1} << 8 * item_bytes(dtype)) - 1);
}

// Patterns where arithmetic goes wrong first, as bits.
Elements special_values(Dtype dtype) {
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
Elements random_elements(Dtype dtype, std::size_t count, std::mt19937_64& random) {
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

// Every reduction there is, but those of complex numbers, which do not fit a uint64_t.
template <class Action>
void for_all(Action action) {
  for (const KernelSet* set : supported_kernel_sets()) {
    for (std::size_t d = 0; d < kDtypeCount; ++d) {
      for (std::size_t o = 0; o < kReduceOpCount; ++o) {
        const auto dtype = static_cast<Dtype>(d);
        const auto op = static_cast<ReduceOp>(o);
        if (!is_complex(dtype) && reduces(dtype, op)) action(*set, dtype, op);
      }
    }
  }
}

void check_same(const Elements& got, const Elements& expected, const std::string& what) {
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

std::string label(const KernelSet& set, Dtype dtype, ReduceOp op) {
  return std::string(set.name) + " " + name(dtype) + " " + name(op);
}

void check_reduce(const KernelSet& set, Dtype dtype, ReduceOp op, const Elements& a,
                  const Elements& b) {
  Array dst(dtype, a, 0), other(dtype, b, 0);
  set.reduce_for(dtype, op)(dst.data(), dst.data(), other.data(), a.size());
  check_same(dst.elements(), reference_reduced(dtype, op, {a, b}), label(set, dtype, op));
}

// ---- Tests ----

TEST(kernels_dtype_codes) {
  CHECK_EQ(static_cast<int>(Dtype::kComplex128) + 1, static_cast<int>(kDtypeCount));
  CHECK_EQ(static_cast<int>(ReduceOp::kCustom), static_cast<int>(kReduceOpCount));
  CHECK_EQ(std::string(name(Dtype::kComplex128)), "complex128");
  CHECK_EQ(std::string(name(ReduceOp::kXor)), "xor");
  for (std::size_t d = 0; d < kDtypeCount; ++d)
    CHECK(item_bytes(static_cast<Dtype>(d)) <= kItemBytesMax);
  CHECK_EQ(std::string(name(Dtype::kBfloat16)), "bfloat16");
  CHECK_EQ(std::string(name(ReduceOp::kMax)), "max");
  CHECK_EQ(item_bytes(Dtype::kUint64), 8u);
  CHECK(is_float(Dtype::kFloat16) && !is_float(Dtype::kUint64));
  CHECK(!is_float(Dtype::kBool) && !is_float(Dtype::kComplex64) && is_complex(Dtype::kComplex64));
  CHECK(is_stored(Dtype::kFloat64) && !is_stored(Dtype::kBool) && !is_stored(Dtype::kComplex128));
  CHECK(is_dtype(14) && !is_dtype(15) && is_reduce_op(7) && !is_reduce_op(8));
}

TEST(kernels_sets_are_found_by_name) {
  CHECK(supported_kernel_sets().size() >= 1);
  CHECK_EQ(std::string(supported_kernel_sets().front()->name), "baseline");
  CHECK(&kernels() == supported_kernel_sets().back());
  for (const KernelSet* set : supported_kernel_sets()) CHECK(kernel_set(set->name) == set);
  CHECK(kernel_set("mmx") == nullptr);
}

TEST(kernels_tables_are_complete) {
  for (const KernelSet* set : supported_kernel_sets()) {
    for (std::size_t d = 0; d < kDtypeCount; ++d) {
      const auto dtype = static_cast<Dtype>(d);
      for (std::size_t o = 0; o < kReduceOpCount; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        CHECK_EQ(set->reduce_for(dtype, op) != nullptr, reduces(dtype, op));
        CHECK_EQ(set->reduce_many_for(dtype, op) != nullptr, reduces(dtype, op));
      }
      CHECK_EQ(set->divide_for(dtype) != nullptr, is_float(dtype) || is_complex(dtype));
    }
  }
}

TEST(kernels_reduce_any_length_and_start) {
  std::mt19937_64 random(1);
  for_all([&](const KernelSet& set, Dtype dtype, ReduceOp op) {
    for (const std::size_t count : kLengths) {
      for (const std::size_t offset : {0, 1, 3}) {
        const Elements a = random_elements(dtype, count, random);
        const Elements b = random_elements(dtype, count, random);
        const Elements expected = reference_reduced(dtype, op, {a, b});
        Array left(dtype, a, offset), right(dtype, b, offset + 1), apart(dtype, a, offset + 2);
        const Reduce reduce = set.reduce_for(dtype, op);
        reduce(apart.data(), left.data(), right.data(), count);
        check_same(apart.elements(), expected, label(set, dtype, op) + " apart");
        check_same(right.elements(), b, label(set, dtype, op) + " source kept");
        Array into_right(dtype, b, offset + 1);
        reduce(into_right.data(), left.data(), into_right.data(), count);
        check_same(into_right.elements(), expected, label(set, dtype, op) + " into b");
        reduce(left.data(), left.data(), right.data(), count);
        check_same(left.elements(), expected, label(set, dtype, op) + " into a");
        CHECK(left.guards_untouched() && into_right.guards_untouched() && apart.guards_untouched());
      }
    }
  });
}

TEST(kernels_reduce_many_in_order) {
  std::mt19937_64 random(2);
  for_all([&](const KernelSet& set, Dtype dtype, ReduceOp op) {
    for (const std::size_t count : kLengths) {
      for (const std::size_t sources_count : {1, 2, 5}) {
        std::vector<Elements> contents;
        std::vector<Array> arrays;
        std::vector<const void*> sources;
        for (std::size_t k = 0; k < sources_count; ++k) {
          contents.push_back(random_elements(dtype, count, random));
          arrays.emplace_back(dtype, contents[k], k);
        }
        for (Array& array : arrays) sources.push_back(array.data());
        const Elements expected = reference_reduced(dtype, op, contents);
        Array apart(dtype, contents[0], 1);
        std::vector<void*> dsts{apart.data()};  // and back into all sources but the first
        for (std::size_t k = 1; k < sources_count; ++k) dsts.push_back(arrays[k].data());
        set.reduce_many_for(dtype, op)(dsts.data(), dsts.size(), sources.data(), sources_count,
                                       count);
        check_same(apart.elements(), expected, label(set, dtype, op) + " many");
        CHECK(apart.guards_untouched());
        for (std::size_t k = 1; k < sources_count; ++k) {
          check_same(arrays[k].elements(), expected, label(set, dtype, op) + " many, back");
          CHECK(arrays[k].guards_untouched());
        }
        check_same(arrays[0].elements(), contents[0], label(set, dtype, op) + " many, source");
      }
    }
  });
}

TEST(kernels_special_values) {
  for_all([](const KernelSet& set, Dtype dtype, ReduceOp op) {
    Elements a, b;
    for (const std::uint64_t x : special_values(dtype)) {
      for (const std::uint64_t y : special_values(dtype)) {
        a.push_back(x);
        b.push_back(y);
      }
    }
    check_reduce(set, dtype, op, a, b);
  });
}

TEST(kernels_divide) {
  std::mt19937_64 random(3);
  for (const KernelSet* set : supported_kernel_sets()) {
    for (const Dtype dtype :
         {Dtype::kFloat16, Dtype::kBfloat16, Dtype::kFloat32, Dtype::kFloat64}) {
      for (const std::uint64_t divisor : {1ull, 2ull, 3ull, 7ull, 128ull, (1ull << 40) + 1}) {
        for (const std::size_t count : kLengths) {
          Elements elements = random_elements(dtype, count, random);
          for (const std::uint64_t special : special_values(dtype)) elements.push_back(special);
          Array dst(dtype, elements, 1);
          set->divide_for(dtype)(dst.data(), elements.size(), divisor);
          check_same(dst.elements(), reference_divided(dtype, elements, divisor),
                     std::string(set->name) + " divide " + name(dtype));
          CHECK(dst.guards_untouched());
        }
      }
    }
  }
}

// Every pattern comes back as it was; NaNs come back as the one NaN.
TEST(kernels_halves_round_trip) {
  for (const KernelSet* set : supported_kernel_sets()) {
    for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16}) {
      const std::uint64_t infinity = dtype == Dtype::kFloat16 ? 0x7c00 : 0x7f80;
      const std::uint64_t nan = dtype == Dtype::kFloat16 ? 0x7e00 : 0x7fc0;
      Elements all, expected;
      for (std::uint64_t bits = 0; bits < 65536; ++bits) {
        all.push_back(bits);
        expected.push_back((bits & 0x7fff) > infinity ? nan : bits);
      }
      Array source(dtype, all, 0), dst(dtype, all, 0);
      const void* sources[] = {source.data()};
      void* dsts[] = {dst.data()};
      set->reduce_many_for(dtype, ReduceOp::kSum)(dsts, 1, sources, 1, 65536);
      check_same(dst.elements(), expected, std::string(set->name) + " " + name(dtype));
    }
  }
}

// Every half against partners that bring about ties, denormals, overflow and cancellation.
TEST(kernels_halves_round_to_nearest_even) {
  for_all([](const KernelSet& set, Dtype dtype, ReduceOp op) {
    if (item_bytes(dtype) != 2 || !is_float(dtype)) return;
    Elements all(65536);
    for (std::uint64_t bits = 0; bits < 65536; ++bits) all[bits] = bits;
    for (const std::uint64_t partner : {0x0001, 0x1401, 0x3c01, 0x3fff, 0x5bff, 0x8400, 0xb555}) {
      check_reduce(set, dtype, op, all, Elements(65536, partner));
    }
  });
}

// Halves are rounded once: 2048 + 1 + 1 is 2050 in float16, but 2048 with a rounding in between.
TEST(kernels_halves_accumulate_in_float32) {
  for (const KernelSet* set : supported_kernel_sets()) {
    Array large(Dtype::kFloat16, {0x6800}, 0), one(Dtype::kFloat16, {0x3c00}, 0);
    const void* sources[] = {large.data(), one.data(), one.data()};
    Array dst(Dtype::kFloat16, {0}, 0);
    void* dsts[] = {dst.data()};
    set->reduce_many_for(Dtype::kFloat16, ReduceOp::kSum)(dsts, 1, sources, 3, 1);
    CHECK_EQ(dst.elements()[0], 0x6801u);
  }
}

TEST(kernels_sets_agree_on_random_bits) {
  std::mt19937_64 random(4);
  constexpr std::size_t kCount = 20011;
  const KernelSet& baseline = *supported_kernel_sets().front();
  for_all([&](const KernelSet& set, Dtype dtype, ReduceOp op) {
    Elements a(kCount), b(kCount);
    for (std::uint64_t& bits : a) bits = masked(dtype, random());
    for (std::uint64_t& bits : b) bits = masked(dtype, random());
    Array one(dtype, a, 0), two(dtype, b, 1), expected(dtype, a, 2), got(dtype, a, 3);
    const void* sources[] = {one.data(), two.data(), one.data()};
    void* dsts[] = {expected.data(), got.data()};
    baseline.reduce_many_for(dtype, op)(&dsts[0], 1, sources, 3, kCount);
    set.reduce_many_for(dtype, op)(&dsts[1], 1, sources, 3, kCount);
    check_same(got.elements(), expected.elements(), label(set, dtype, op));
  });
}

// Both orders give the same bits; plans that add up what arrives first or last rely on it.
TEST(kernels_commute) {
  std::mt19937_64 random(5);
  for_all([&](const KernelSet& set, Dtype dtype, ReduceOp op) {
    const Elements a = random_elements(dtype, 1000, random);
    const Elements b = random_elements(dtype, 1000, random);
    Array one(dtype, a, 0), two(dtype, b, 1), forth(dtype, a, 2), back(dtype, a, 3);
    set.reduce_for(dtype, op)(forth.data(), one.data(), two.data(), 1000);
    set.reduce_for(dtype, op)(back.data(), two.data(), one.data(), 1000);
    check_same(forth.elements(), back.elements(), label(set, dtype, op));
  });
}

// ---- Complex numbers: arrays of parts, real and imaginary in turn ----

struct ComplexKind {
  Dtype dtype;
  Dtype part;
};
constexpr ComplexKind kComplexKinds[] = {{Dtype::kComplex64, Dtype::kFloat32},
                                         {Dtype::kComplex128, Dtype::kFloat64}};

Elements reference_complex(ComplexKind kind, ReduceOp op, const std::vector<Elements>& sources) {
  if (op == ReduceOp::kSum) return reference_reduced(kind.part, op, sources);
  return with_codec(kind.part, [&](auto codec) {
    using Value = typename decltype(codec)::Value;
    Elements result;
    for (std::size_t i = 0; i < sources[0].size(); i += 2) {
      Value real = codec.decode(sources[0][i]), imaginary = codec.decode(sources[0][i + 1]);
      for (std::size_t k = 1; k < sources.size(); ++k) {
        const Value c = codec.decode(sources[k][i]), d = codec.decode(sources[k][i + 1]);
        const Value next = real * c - imaginary * d;
        imaginary = real * d + imaginary * c;
        real = next;
      }
      result.push_back(codec.encode(real));
      result.push_back(codec.encode(imaginary));
    }
    return result;
  });
}

template <class Action>
void for_all_complex(Action action) {
  for (const KernelSet* set : supported_kernel_sets())
    for (const ComplexKind kind : kComplexKinds)
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd}) action(*set, kind, op);
}

TEST(kernels_complex_any_length_and_start) {
  std::mt19937_64 random(6);
  for_all_complex([&](const KernelSet& set, ComplexKind kind, ReduceOp op) {
    for (const std::size_t count : kLengths) {
      for (const std::size_t offset : {0, 1, 3}) {  // in parts: no more alignment is promised
        std::vector<Elements> contents;
        for (int k = 0; k < 3; ++k)
          contents.push_back(random_elements(kind.part, 2 * count, random));
        Array a(kind.part, contents[0], offset), b(kind.part, contents[1], offset + 1),
            c(kind.part, contents[2], 0), apart(kind.part, contents[0], 1);
        const std::string what = label(set, kind.dtype, op);
        set.reduce_for(kind.dtype, op)(apart.data(), a.data(), b.data(), count);
        check_same(apart.elements(), reference_complex(kind, op, {contents[0], contents[1]}), what);
        const void* sources[] = {a.data(), b.data(), c.data()};
        void* dsts[] = {apart.data(), c.data()};
        set.reduce_many_for(kind.dtype, op)(dsts, 2, sources, 3, count);
        const Elements expected = reference_complex(kind, op, contents);
        check_same(apart.elements(), expected, what + " many");
        check_same(c.elements(), expected, what + " many, back");
        CHECK(apart.guards_untouched() && c.guards_untouched());
        set.reduce_for(kind.dtype, op)(a.data(), a.data(), b.data(), count);
        check_same(a.elements(), reference_complex(kind, op, {contents[0], contents[1]}),
                   what + " into a");
      }
    }
  });
}

TEST(kernels_complex_special_values) {
  for_all_complex([](const KernelSet& set, ComplexKind kind, ReduceOp op) {
    std::mt19937_64 random(7);
    const Elements special = special_values(kind.part);
    Elements a, b;
    for (const std::uint64_t x : special) {
      for (const std::uint64_t y : special) {
        for (const std::uint64_t part : {x, y}) a.push_back(part);
        for (int part = 0; part < 2; ++part) b.push_back(special[random() % special.size()]);
      }
    }
    Array one(kind.part, a, 0), two(kind.part, b, 1), forth(kind.part, a, 2), back(kind.part, a, 3);
    set.reduce_for(kind.dtype, op)(forth.data(), one.data(), two.data(), a.size() / 2);
    set.reduce_for(kind.dtype, op)(back.data(), two.data(), one.data(), a.size() / 2);
    check_same(forth.elements(), reference_complex(kind, op, {a, b}), label(set, kind.dtype, op));
    check_same(back.elements(), forth.elements(), label(set, kind.dtype, op) + " commutes");
  });
}

TEST(kernels_complex_divide) {
  std::mt19937_64 random(8);
  for (const KernelSet* set : supported_kernel_sets()) {
    for (const ComplexKind kind : kComplexKinds) {
      const Elements elements = random_elements(kind.part, 2 * 65, random);
      Array dst(kind.part, elements, 1);
      set->divide_for(kind.dtype)(dst.data(), 65, 3);
      check_same(dst.elements(), reference_divided(kind.part, elements, 3),
                 std::string(set->name) + " divide " + name(kind.dtype));
      CHECK(dst.guards_untouched());
    }
  }
}

}  // namespace
