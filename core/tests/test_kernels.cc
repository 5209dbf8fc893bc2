// SPDX-License-Identifier: Apache-2.0
// Every set of kernels against a scalar reference, over all element types and operations, and the
// sets against each other, bit for bit.
#include "kernel_reference.h"

using namespace commute;

namespace {

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

void check_reduce(const KernelSet& set, Dtype dtype, ReduceOp op, const Elements& a,
                  const Elements& b) {
  Array dst(dtype, a, 0), other(dtype, b, 0);
  set.reduce_for(dtype, op)(dst.data(), dst.data(), other.data(), a.size());
  check_same(dst.elements(), reference_reduced(dtype, op, {a, b}), label(set, dtype, op));
}

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

// So long that lines are asked for ahead; of lengths that end in any place.
TEST(kernels_reduce_long_arrays) {
  constexpr std::size_t kFar = 4 << 20;
  for (const KernelSet* set : supported_kernel_sets()) {
    for (const std::size_t bytes : {kFar - 1, kFar, kFar + 1, kFar + 1023, kFar + 12'345}) {
      std::vector<std::uint8_t> a(bytes), b(bytes), apart(bytes + 1, 77);
      for (std::size_t i = 0; i < bytes; ++i) {
        a[i] = static_cast<std::uint8_t>(i * 7);
        b[i] = static_cast<std::uint8_t>(i >> 8);
      }
      set->reduce_for(Dtype::kUint8, ReduceOp::kSum)(apart.data(), a.data(), b.data(), bytes);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < bytes; ++i)
        wrong += apart[i] != static_cast<std::uint8_t>(a[i] + b[i]);
      CHECK_EQ(wrong, 0u);
      CHECK_EQ(int{apart[bytes]}, 77);
    }
  }
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

}  // namespace
