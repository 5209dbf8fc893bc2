// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set. Included once by each kernels_<set>.cc, which names the set
// in COMMUTE_KERNELS and is compiled with that set's flags.
//
// Theory: every kernel is one walk over the arrays (`walk`): load a few vectors of the first
// source, combine the other sources into them in order, finish, store. A `Format` says how elements
// lie in memory (`Stored`) and how they are computed with (`Value`). The ends of an array take the
// same arithmetic on a padded vector, so the bits do not depend on where an element lies.
//
// The vectors are the compiler's own (vector_size): one source for all widths, and nothing hangs on
// what the optimiser finds out about aliasing. All code has internal linkage and uses no inline
// function of the standard library, or the linker could pick a copy of it that was compiled for a
// processor we do not run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>  // for types only
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define COMMUTE_NAME_OF(set) #set
#define COMMUTE_NAME(set) COMMUTE_NAME_OF(set)
#define COMMUTE_INLINE inline __attribute__((always_inline))

namespace commute::COMMUTE_KERNELS {
namespace {

using std::size_t;

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif
constexpr size_t kUnroll = 4;  // vectors in flight: hides the latency of loads and additions
// Arrays so long that they come from memory are asked for so far ahead: the processor's own guesses
// end with the page. Beside others on the host 16 MB in arrays of `empty` took a fifth less; of
// what may lie in the caches, 1 MB took a quarter more.
constexpr size_t kFarBytes = 4 << 20;
constexpr size_t kAhead = 1024;
constexpr size_t kLine = 64;

template <class T, size_t kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, size_t kLanes = kVectorBytes / sizeof(T)>
using Vector = typename VectorOf<T, kLanes>::type;

using Float = Vector<float>;
using Bits = Vector<std::uint32_t>;  // of a Float
using Halves = Vector<std::uint16_t, kVectorBytes / sizeof(float)>;

template <class To, class From>
COMMUTE_INLINE To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

#if defined(__AVX512F__)
// gcc 12 warns of an uninitialised variable inside the intrinsics without a mask; same code.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// a < b for numbers below 2^31, which the older sets compare faster as signed.
COMMUTE_INLINE auto less(Bits a, Bits b) {
  return bits_as<Vector<std::int32_t>>(a) < bits_as<Vector<std::int32_t>>(b);
}

// 16-bit elements to 32-bit ones and back, dropping the upper half. Spelled out on x86-64, where
// gcc 12 makes scalar code of __builtin_convertvector.
COMMUTE_INLINE Bits lengthen(Halves halves) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return bits_as<Bits>(_mm512_maskz_cvtepu16_epi32(kAllLanes, bits_as<__m256i>(halves)));
#elif defined(__AVX2__)
  return bits_as<Bits>(_mm256_cvtepu16_epi32(bits_as<__m128i>(halves)));
#elif defined(__x86_64__)
  const __m128i low = _mm_cvtsi64_si128(bits_as<long long>(halves));
  return bits_as<Bits>(_mm_unpacklo_epi16(low, _mm_setzero_si128()));
#else
  return __builtin_convertvector(halves, Bits);
#endif
}

COMMUTE_INLINE Halves shorten(Bits bits) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return bits_as<Halves>(_mm512_maskz_cvtepi32_epi16(kAllLanes, bits_as<__m512i>(bits)));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(bits_as<__m256i>(bits), _mm256_setzero_si256());
  return bits_as<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
#elif defined(__x86_64__)
  // There is only a pack with signed saturation: make the lower halves signed before.
  const __m128i signs = _mm_srai_epi32(_mm_slli_epi32(bits_as<__m128i>(bits), 16), 16);
  return bits_as<Halves>(_mm_cvtsi128_si64(_mm_packs_epi32(signs, signs)));
#else
  return __builtin_convertvector(bits, Halves);
#endif
}

// ---- Formats ----

template <class T>
struct Integer {
  using Item = T;
  using Stored = Vector<T>;
  using Value = Stored;
  static COMMUTE_INLINE Value widen(Stored stored) { return stored; }
  static COMMUTE_INLINE Stored narrow(Value value) { return value; }
};

template <class T, class Unsigned, Unsigned kNan>
struct Floating {
  using Item = T;
  using Stored = Vector<T>;
  using Value = Stored;
  static COMMUTE_INLINE Value widen(Stored stored) { return stored; }
  static COMMUTE_INLINE Stored narrow(Value value) {
    return value == value ? value : bits_as<Value>(Vector<Unsigned>{} + kNan);
  }
};
using Float32 = Floating<float, std::uint32_t, 0x7fc00000u>;
using Float64 = Floating<double, std::uint64_t, 0x7ff8000000000000u>;

struct Bfloat16 {
  using Item = std::uint16_t;
  using Stored = Halves;
  using Value = Float;
  static COMMUTE_INLINE Value widen(Stored stored) {
    return bits_as<Value>(lengthen(stored) << 16);
  }
  static COMMUTE_INLINE Stored narrow(Value value) {
    const Bits bits = bits_as<Bits>(value);
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // ties to even
    return shorten(value == value ? rounded : Bits{} + 0x7fc0u);
  }
};

// float16 on processors without conversions: 1 sign, 5 exponent, 10 mantissa bits against float32's
// 1, 8, 23; so the mantissa moves by 13 bits and the exponent's bias changes by 127 - 15 = 112.
struct SoftFloat16 {
  static COMMUTE_INLINE Float widen(Halves stored) {
    const Bits half = lengthen(stored);
    const Bits magnitude = half & 0x7fffu;
    const Bits normal = (magnitude << 13) + (112u << 23);
    // A denormal gets the exponent of 2^-14 and an implicit 1, which the subtraction takes away.
    const Bits denormal = bits_as<Bits>(bits_as<Float>(normal + (1u << 23)) - 0x1p-14f);
    const Bits infinite_or_nan = normal + (112u << 23);
    const Bits result = less(magnitude, Bits{} + 0x0400u)   ? denormal
                        : less(magnitude, Bits{} + 0x7c00u) ? normal
                                                            : infinite_or_nan;
    return bits_as<Float>(result | (half & 0x8000u) << 16);
  }
  static COMMUTE_INLINE Halves narrow(Float value) {
    const Bits bits = bits_as<Bits>(value);
    const Bits magnitude = bits & 0x7fffffffu;
    const Bits normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Next to 0.5 a float32 has steps of 2^-24, a denormal float16's: the addition rounds for us.
    const Bits denormal =
        bits_as<Bits>(bits_as<Float>(magnitude) + 0.5f) - bits_as<Bits>(Float{} + 0.5f);
    const Bits result = less(magnitude, Bits{} + (113u << 23))   ? denormal
                        : less(magnitude, Bits{} + (143u << 23)) ? normal
                                                                 : Bits{} + 0x7c00u;
    const Bits with_sign = result | ((bits >> 16) & 0x8000u);
    return shorten(value == value ? with_sign : Bits{} + 0x7e00u);
  }
};

struct Float16 {
  using Item = std::uint16_t;
  using Stored = Halves;
  using Value = Float;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  static COMMUTE_INLINE Value widen(Stored stored) {
    return _mm512_maskz_cvtph_ps(kAllLanes, bits_as<__m256i>(stored));
  }
  static COMMUTE_INLINE Stored narrow(Value value) {
    return bits_as<Stored>(
        _mm512_maskz_cvtps_ph(kAllLanes, Float32::narrow(value), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static COMMUTE_INLINE Value widen(Stored stored) {
    return _mm256_cvtph_ps(bits_as<__m128i>(stored));
  }
  static COMMUTE_INLINE Stored narrow(Value value) {
    return bits_as<Stored>(_mm256_cvtps_ph(Float32::narrow(value), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__aarch64__)
  static COMMUTE_INLINE Value widen(Stored stored) {
    return bits_as<Value>(vcvt_f32_f16(bits_as<float16x4_t>(stored)));
  }
  static COMMUTE_INLINE Stored narrow(Value value) {
    return bits_as<Stored>(vcvt_f16_f32(bits_as<float32x4_t>(Float32::narrow(value))));
  }
#else
  static COMMUTE_INLINE Value widen(Stored stored) { return SoftFloat16::widen(stored); }
  static COMMUTE_INLINE Stored narrow(Value value) { return SoftFloat16::narrow(value); }
#endif
};

struct Bool {
  using Item = std::uint8_t;
  using Stored = Vector<std::uint8_t>;
  using Value = Stored;
  static COMMUTE_INLINE Value widen(Stored stored) { return bits_as<Value>(stored != 0) & 1; }
  static COMMUTE_INLINE Stored narrow(Value value) { return value; }
};

// Real and imaginary parts take turns in a vector: sums and means go part by part.
struct Complex64 : Float32 {
  struct Item {
    float parts[2];
  };
};
struct Complex128 : Float64 {
  struct Item {
    double parts[2];
  };
};

// ---- Operations ----

struct Sum {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a + b;
  }
};

struct Prod {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a * b;
  }
};

struct Min {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a < b ? a : b;
  }
};

struct Max {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a > b ? a : b;
  }
};

// Both orders of the comparison agree unless the operands are zeros or one is NaN. Then they are
// the two operands, and `or` makes -0 of zeros with different signs and a NaN of anything with a
// NaN.
struct FloatMin {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    using B = decltype(a == a);  // integers as wide as the elements
    return bits_as<V>(bits_as<B>(Min::apply(a, b)) | bits_as<B>(Min::apply(b, a)));
  }
};

struct FloatMax {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return negated(FloatMin::apply(negated(a), negated(b)));
  }
  // By bits: of -a < -b the compiler makes a > b, and then no longer sees the minimum.
  template <class V>
  static COMMUTE_INLINE V negated(V a) {
    using B = decltype(a == a);
    return bits_as<V>(bits_as<B>(a) ^ bits_as<B>(-V{}));
  }
};

struct And {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a & b;
  }
};

struct Or {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a | b;
  }
};

struct Xor {
  template <class V>
  static COMMUTE_INLINE V apply(V a, V b) {
    return a ^ b;
  }
};

// (ac - bd) + (ad + bc)i, each part as the textbook has it: a and b are spread over both places of
// a pair, c and d change places for the second product.
template <class Lanes>
struct ComplexProdOf;
template <size_t... kLane>
struct ComplexProdOf<std::index_sequence<kLane...>> {
  template <class V>
  static COMMUTE_INLINE V apply(V x, V y) {
    using B = decltype(x == x);
    const V real = __builtin_shufflevector(x, x, (kLane & ~size_t{1})...);
    const V imaginary = __builtin_shufflevector(x, x, (kLane | 1)...);
    const V swapped = __builtin_shufflevector(y, y, (kLane ^ 1)...);
    const V minus_in_front = {(kLane % 2 == 0 ? -0.0f : 0.0f)...};
    return real * y + bits_as<V>(bits_as<B>(imaginary * swapped) ^ bits_as<B>(minus_in_front));
  }
};
template <class Format>
using ComplexProd = ComplexProdOf<
    std::make_index_sequence<sizeof(typename Format::Value) / sizeof(typename Format::Item) * 2>>;

// ---- The walk ----

struct Arrays {
  void* const* dsts;
  size_t dsts_count;
  const void* const* sources;
  size_t sources_count;
};

template <class V>
COMMUTE_INLINE V load(const void* array, size_t at) {
  V vector;
  __builtin_memcpy(&vector, static_cast<const char*>(array) + at, sizeof(V));
  return vector;
}

template <class V>
COMMUTE_INLINE void store(void* array, size_t at, V vector) {
  __builtin_memcpy(static_cast<char*>(array) + at, &vector, sizeof(V));
}

// Fewer bytes than a vector has, from byte `at` on.
template <class Format, class Op, class Finish>
[[gnu::noinline]] void walk_partial(const Arrays& arrays, size_t at, size_t bytes, Finish finish) {
  using Stored = typename Format::Stored;
  const auto padded = [&](size_t k) {
    Stored stored{};
    __builtin_memcpy(&stored, static_cast<const char*>(arrays.sources[k]) + at, bytes);
    return Format::widen(stored);
  };
  auto value = padded(0);
  for (size_t k = 1; k < arrays.sources_count; ++k) value = Op::apply(value, padded(k));
  const Stored result = Format::narrow(finish(value));
  for (size_t d = 0; d < arrays.dsts_count; ++d)
    __builtin_memcpy(static_cast<char*>(arrays.dsts[d]) + at, &result, bytes);
}

// kVectors whole vectors, from byte `at` on. All loads come before the first store.
template <class Format, class Op, size_t kVectors, class Finish>
COMMUTE_INLINE void walk_vectors(const Arrays& arrays, size_t at, Finish finish) {
  using Stored = typename Format::Stored;
  typename Format::Value values[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    values[v] = Format::widen(load<Stored>(arrays.sources[0], at + v * sizeof(Stored)));
  }
  for (size_t k = 1; k < arrays.sources_count; ++k) {
    const void* source = arrays.sources[k];
    for (size_t v = 0; v < kVectors; ++v) {
      const Stored stored = load<Stored>(source, at + v * sizeof(Stored));
      values[v] = Op::apply(values[v], Format::widen(stored));
    }
  }
  Stored results[kVectors];
  for (size_t v = 0; v < kVectors; ++v) results[v] = Format::narrow(finish(values[v]));
  // To one array at a time: the processor merges stores that follow each other into one line.
  for (size_t d = 0; d < arrays.dsts_count; ++d)
    for (size_t v = 0; v < kVectors; ++v)
      store(arrays.dsts[d], at + v * sizeof(Stored), results[v]);
}

COMMUTE_INLINE void ask_for(const Arrays& arrays, size_t at, size_t bytes) {
  for (size_t k = 0; k < arrays.sources_count; ++k)
    for (size_t line = 0; line < bytes; line += kLine)
      __builtin_prefetch(static_cast<const char*>(arrays.sources[k]) + at + line);
}

template <class Format, class Op, class Finish>
COMMUTE_INLINE void walk(const Arrays& arrays, size_t count, Finish finish) {
  constexpr size_t kStep = sizeof(typename Format::Stored);
  const size_t bytes = count * sizeof(typename Format::Item);
  size_t at = 0;
  const size_t far = bytes >= kFarBytes ? bytes - kAhead : 0;
  for (; at + kUnroll * kStep <= far; at += kUnroll * kStep) {
    ask_for(arrays, at + kAhead, kUnroll * kStep);
    walk_vectors<Format, Op, kUnroll>(arrays, at, finish);
  }
  for (; bytes - at >= kUnroll * kStep; at += kUnroll * kStep) {
    walk_vectors<Format, Op, kUnroll>(arrays, at, finish);
  }
  for (; bytes - at >= kStep; at += kStep) {
    walk_vectors<Format, Op, 1>(arrays, at, finish);
  }
  if (at < bytes) walk_partial<Format, Op>(arrays, at, bytes - at, finish);
}

// ---- The kernels ----

constexpr auto as_is = [](auto value) { return value; };

template <class Format, class Op>
void reduce(void* dst, const void* a, const void* b, size_t count) {
  const void* const sources[] = {a, b};
  walk<Format, Op>({&dst, 1, sources, 2}, count, as_is);
}

template <class Format, class Op>
void reduce_many(void* const* dsts, size_t dsts_count, const void* const* sources,
                 size_t sources_count, size_t count) {
  walk<Format, Op>({dsts, dsts_count, sources, sources_count}, count, as_is);
}

template <class Format>
void divide(void* dst, size_t count, std::uint64_t divisor) {
  using Value = typename Format::Value;
  using Number = decltype(Value{}[0] + Value{}[0]);
  const void* const sources[] = {dst};
  const Value by = Value{} + static_cast<Number>(divisor);
  walk<Format, Sum>({&dst, 1, sources, 1}, count, [by](Value value) { return value / by; });
}

template <class Format, class Op>
constexpr void add(KernelSet& set, Dtype dtype, ReduceOp op) {
  set.reduce[index(dtype)][index(op)] = reduce<Format, Op>;
  set.reduce_many[index(dtype)][index(op)] = reduce_many<Format, Op>;
}

// Sums and products of signed integers are those of unsigned ones, which wrap around by definition.
template <class T, class Unsigned>
constexpr void add_integer(KernelSet& set, Dtype dtype) {
  add<Integer<Unsigned>, Sum>(set, dtype, ReduceOp::kSum);
  add<Integer<Unsigned>, Prod>(set, dtype, ReduceOp::kProd);
  add<Integer<T>, Min>(set, dtype, ReduceOp::kMin);
  add<Integer<T>, Max>(set, dtype, ReduceOp::kMax);
  add<Integer<Unsigned>, And>(set, dtype, ReduceOp::kAnd);
  add<Integer<Unsigned>, Or>(set, dtype, ReduceOp::kOr);
  add<Integer<Unsigned>, Xor>(set, dtype, ReduceOp::kXor);
}

constexpr void add_bool(KernelSet& set) {
  for (const ReduceOp any : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kOr})
    add<Bool, Or>(set, Dtype::kBool, any);
  for (const ReduceOp all : {ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kAnd})
    add<Bool, And>(set, Dtype::kBool, all);
  add<Bool, Xor>(set, Dtype::kBool, ReduceOp::kXor);
}

template <class Format>
constexpr void add_float(KernelSet& set, Dtype dtype) {
  add<Format, Sum>(set, dtype, ReduceOp::kSum);
  add<Format, Prod>(set, dtype, ReduceOp::kProd);
  add<Format, FloatMin>(set, dtype, ReduceOp::kMin);
  add<Format, FloatMax>(set, dtype, ReduceOp::kMax);
  set.divide[index(dtype)] = divide<Format>;
}

template <class Format>
constexpr void add_complex(KernelSet& set, Dtype dtype) {
  add<Format, Sum>(set, dtype, ReduceOp::kSum);
  add<Format, ComplexProd<Format>>(set, dtype, ReduceOp::kProd);
  set.divide[index(dtype)] = divide<Format>;
}

constexpr KernelSet all_kernels() {
  KernelSet set{};
  set.name = COMMUTE_NAME(COMMUTE_KERNELS);
  add_integer<std::int8_t, std::uint8_t>(set, Dtype::kInt8);
  add_integer<std::uint8_t, std::uint8_t>(set, Dtype::kUint8);
  add_integer<std::int16_t, std::uint16_t>(set, Dtype::kInt16);
  add_integer<std::uint16_t, std::uint16_t>(set, Dtype::kUint16);
  add_integer<std::int32_t, std::uint32_t>(set, Dtype::kInt32);
  add_integer<std::uint32_t, std::uint32_t>(set, Dtype::kUint32);
  add_integer<std::int64_t, std::uint64_t>(set, Dtype::kInt64);
  add_integer<std::uint64_t, std::uint64_t>(set, Dtype::kUint64);
  add_float<Float16>(set, Dtype::kFloat16);
  add_float<Bfloat16>(set, Dtype::kBfloat16);
  add_float<Float32>(set, Dtype::kFloat32);
  add_float<Float64>(set, Dtype::kFloat64);
  add_bool(set);
  add_complex<Complex64>(set, Dtype::kComplex64);
  add_complex<Complex128>(set, Dtype::kComplex128);
  return set;
}

}  // namespace

extern constinit const KernelSet kKernels = all_kernels();

}  // namespace commute::COMMUTE_KERNELS
