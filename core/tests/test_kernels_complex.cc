// SPDX-License-Identifier: Apache-2.0
// Kernels of complex numbers, whose arrays hold parts: real and imaginary in turn.
#include "kernel_reference.h"

using namespace commute;

namespace {

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
