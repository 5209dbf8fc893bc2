// SPDX-License-Identifier: Apache-2.0
// Element types and reductions. The codes are shared with Python and travel in frames: append only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commute {

enum class Dtype : std::uint8_t {
  kInt8 = 0,
  kUint8 = 1,
  kInt16 = 2,
  kUint16 = 3,
  kInt32 = 4,
  kUint32 = 5,
  kInt64 = 6,
  kUint64 = 7,
  kFloat16 = 8,
  kBfloat16 = 9,
  kFloat32 = 10,
  kFloat64 = 11,
  kBool = 12,        // a byte; 0 is false, anything else true
  kComplex64 = 13,   // two float32, real and imaginary part
  kComplex128 = 14,  // two float64
};
inline constexpr std::size_t kDtypeCount = 15;

enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kProd = 1,
  kMin = 2,
  kMax = 3,
  kAnd = 4,
  kOr = 5,
  kXor = 6,
  kCustom = 7,  // the caller's own (combine.h)
};
inline constexpr std::size_t kReduceOpCount = 7;  // those with kernels

// Codes that come from outside are checked with these before they become an enum.
constexpr bool is_dtype(std::uint64_t code) {
  return code < kDtypeCount;
}
constexpr bool is_reduce_op(std::uint64_t code) {
  return code <= static_cast<std::uint64_t>(ReduceOp::kCustom);
}

constexpr std::size_t index(Dtype dtype) {
  return static_cast<std::size_t>(dtype);
}
constexpr std::size_t index(ReduceOp op) {
  return static_cast<std::size_t>(op);
}

constexpr std::size_t item_bytes(Dtype dtype) {
  constexpr std::size_t kBytes[kDtypeCount] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 8, 16};
  return kBytes[index(dtype)];
}

constexpr bool is_float(Dtype dtype) {
  return dtype >= Dtype::kFloat16 && dtype <= Dtype::kFloat64;
}
constexpr bool is_complex(Dtype dtype) {
  return dtype == Dtype::kComplex64 || dtype == Dtype::kComplex128;
}
inline constexpr std::size_t kItemBytesMax = 16;

// What tables of the store are made of: real numbers.
constexpr bool is_stored(Dtype dtype) {
  return dtype <= Dtype::kFloat64;
}

// Which reductions there are: complex numbers have no order, and only integers and bool have bits.
constexpr bool reduces(Dtype dtype, ReduceOp op) {
  if (op == ReduceOp::kSum || op == ReduceOp::kProd || op == ReduceOp::kCustom) return true;
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return !is_complex(dtype);
  return !is_float(dtype) && !is_complex(dtype);
}

constexpr const char* name(Dtype dtype) {
  constexpr const char* kNames[kDtypeCount] = {
      "int8",    "uint8",    "int16",   "uint16",  "int32", "uint32",    "int64",     "uint64",
      "float16", "bfloat16", "float32", "float64", "bool",  "complex64", "complex128"};
  return kNames[index(dtype)];
}

constexpr const char* name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount + 1] = {"sum", "prod", "min", "max",
                                                      "and", "or",   "xor", "custom"};
  return kNames[index(op)];
}

}  // namespace commute
