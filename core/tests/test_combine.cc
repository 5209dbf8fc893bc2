// SPDX-License-Identifier: Apache-2.0
// Reductions that the caller brings along, on links that cut elements into pieces and in outboxes;
// and elements of 16 bytes, the largest there are.
#include "../combine.h"

#include <complex>
#include <cstring>

#include "ranks.h"

namespace {

using namespace commute;
using namespace commute::check;
using Array = std::vector<int64_t>;

constexpr size_t kLengths[] = {0, 1, 3, 8, 9, 333, 4'000};
constexpr size_t kTile = 1024;

// 2a + b: tells left from right, and which came first. Counts how often it was asked.
class Twice : public Combine {
 public:
  void apply(const void* a, const void* b, void* out, size_t count) const override {
    CHECK(count > 0);
    for (size_t i = 0; i < count; ++i) {
      int64_t x, y;
      std::memcpy(&x, static_cast<const char*>(a) + 8 * i, 8);
      std::memcpy(&y, static_cast<const char*>(b) + 8 * i, 8);
      x = 2 * x + y;
      std::memcpy(static_cast<char*>(out) + 8 * i, &x, 8);
    }
    ++calls;
  }
  mutable int calls = 0;
};

class Failing : public Combine {
 public:
  void apply(const void*, const void*, void*, size_t) const override {
    throw CombineFailed("it has had enough");
  }
};

Array input(int rank, size_t count) {
  Array array(count);
  for (size_t i = 0; i < count; ++i) array[i] = 1000 * (rank + 1) + static_cast<int64_t>(i % 100);
  return array;
}

std::shared_ptr<Operation> own(Engine& engine, const std::shared_ptr<Executor>& executor,
                               Array& array, const Combine& combine) {
  auto operation = call_of(executor, array.data(), array.data(), array.size());
  operation->call.reduce_op = ReduceOp::kCustom;
  operation->combine = &combine;
  engine.submit(operation, false);
  return operation;
}

Instruction first(Instruction made) {
  made.flags |= kFlagFirst;
  return made;
}

// Up the chain 0 -> 1 -> 2, what arrives being the left operand, or the right one.
Lanes chain(int rank, bool arrives_first) {
  const auto turned = [&](Instruction made) { return arrives_first ? first(made) : made; };
  if (rank == 0) return {{send(1, Space::kOut, 0)}};
  if (rank == 1) return {{turned(recv_reduce_send(0, 2, Space::kOut, 0))}};
  return {{turned(recv_reduce(1, Space::kOut, Space::kOut, 0))}};
}

LINK_TEST(operands_keep_their_sides) {
  const Shape shape{Collective::kReduce, 1, 1, 1, 0, 0, 2};
  Ranks ranks(3, kind);
  ranks.run([&](int rank, Engine& engine) {
    for (const bool arrives_first : {true, false}) {
      const auto executor = engine.bind(plan_of(rank, 3, shape, chain(rank, arrives_first)), kTile);
      for (const size_t count : kLengths) {
        const Twice twice;
        Array array = input(rank, count);
        CHECK(finish(engine, own(engine, executor, array, twice)));
        if (rank != 2) continue;
        const Array a = input(0, count), b = input(1, count), c = input(2, count);
        for (size_t i = 0; i < count; ++i)
          CHECK_EQ(array[i],
                   arrives_first ? 2 * (2 * a[i] + b[i]) + c[i] : 2 * c[i] + (2 * b[i] + a[i]));
        CHECK_EQ(twice.calls > 0, count > 0);
      }
    }
  });
}

// Everyone puts, and adds up all outboxes in rank order, in place.
Lanes one_shot(int rank, int ranks) {
  std::vector<Instruction> lane;
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) lane.push_back(wait_for(peer, 1, kOutboxSlots, 1));
  lane.push_back(move(Op::kPut, Space::kOut, 0, Space::kOutbox, 0));
  lane.push_back(signal(0));
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) lane.push_back(wait_for(peer, 0, 0, 1));
  lane.push_back(move(Op::kReduceMany, Space::kOut, 0, Space::kOut, 0));
  lane.push_back(signal(1));
  return {lane};
}

TEST(all_of_many_in_rank_order) {
  const Shape shape{Collective::kAllreduce, 1, 1, 1, 0, 1};
  Ranks ranks(3, kLinkKinds[0]);
  ranks.run([&](int rank, Engine& engine) {
    Plan plan = plan_of(rank, 3, shape, one_shot(rank, 3));
    for (int each = 0; each < 3; ++each)
      for (const uint32_t counter : {0u, 1u})
        plan.signals_per_tile[size_t(each) * kSignals + counter] = 1;
    const auto executor = engine.bind(std::move(plan), kTile);
    for (const size_t count : kLengths) {
      const Twice twice;
      Array array = input(rank, count);
      CHECK(finish(engine, own(engine, executor, array, twice)));
      const Array a = input(0, count), b = input(1, count), c = input(2, count);
      for (size_t i = 0; i < count; ++i) CHECK_EQ(array[i], 2 * (2 * a[i] + b[i]) + c[i]);
    }
  });
}

LINK_TEST(one_that_fails_ends_the_operation) {
  const Shape shape{Collective::kReduce, 1, 1, 1, 0, 0, 1};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const Lanes lanes = rank == 0 ? Lanes{{send(1, Space::kOut, 0)}}
                                  : Lanes{{recv_reduce(0, Space::kOut, Space::kOut, 0)}};
    const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), kTile);
    const Failing failing;
    Array array = input(rank, 9);
    const auto operation = own(engine, executor, array, failing);
    CHECK(settled(engine, operation));
    if (rank == 0) return;
    CHECK(!done(*operation));
    CHECK(operation->failure.code == FailureCode::kInterrupted);
    CHECK_EQ(operation->failure.text,
             "rank 1 gave up reduce of 9 int64 by custom with root 1: it has had enough");
  });
}

// On the narrow link no element of 16 bytes arrives in one piece.
LINK_TEST(complex_numbers_are_reduced_whole) {
  const Shape shape{Collective::kReduce, 2};
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const Lanes lanes = rank == 1 ? Lanes{{send(0, Space::kIn, 0, 2)}}
                                  : Lanes{{recv_reduce(1, Space::kOut, Space::kOut, 0, 2)}};
    const auto executor = engine.bind(plan_of(rank, 2, shape, lanes), kTile);
    std::vector<std::complex<double>> array(333);
    for (size_t i = 0; i < array.size(); ++i) array[i] = {double(i), double(rank + 1)};
    CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), array.size(),
                                Dtype::kComplex128)));
    for (size_t i = 0; i < array.size(); ++i)
      CHECK(array[i] ==
            (rank == 0 ? std::complex(2.0 * double(i), 3.0) : std::complex(double(i), 2.0)));
  });
}

}  // namespace
