// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree about what they call, and frames that are left over from other calls.
#include "two_ranks.h"

namespace {

using namespace commute;
using namespace commute::check;

using Calls = std::function<std::shared_ptr<Operation>(int rank, Engine& engine, Array& array)>;

// Both ranks call what `call` says, which differs; both must hear of the mismatch.
void expect_mismatch(const LinkKind& kind, const Calls& call, const char* what) {
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    Array array(64);
    std::shared_ptr<Operation> operation;
    try {
      operation = call(rank, engine, array);
    } catch (const Error&) {  // the other was quicker
    }
    if (operation) CHECK(settled(engine, operation));
    // A rank that only sent may have finished; the next call fails.
    CHECK(eventually([&] { return engine.failure().code != FailureCode::kNone; }));
    CHECK(engine.failure().code == FailureCode::kMismatch);
    CHECK(says(engine.failure(), what));
  });
}

LINK_TEST(different_lengths_are_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(allreduce(rank), kTile);
        return submit(engine, executor, array.data(), array.data(), rank == 0 ? 10 : 11);
      },
      "allreduce of 1");
}

LINK_TEST(different_dtypes_are_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(allreduce(rank), kTile);
        const Dtype dtype = rank == 0 ? Dtype::kInt64 : Dtype::kFloat64;
        return submit(engine, executor, array.data(), array.data(), 10, dtype);
      },
      "allreduce of 10 float64");
}

LINK_TEST(a_mean_and_a_sum_are_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(allreduce(rank), kTile);
        auto operation = call_of(executor, array.data(), array.data(), 10, Dtype::kFloat64);
        operation->call.mean = rank == 0;
        engine.submit(operation, false);
        return operation;
      },
      "by mean");
}

LINK_TEST(different_collectives_are_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(rank == 0 ? allreduce(0) : broadcast(1, 1), kTile);
        return submit(engine, executor, array.data(), array.data(), 10);
      },
      "broadcast of 10 int64 with root 1");
}

LINK_TEST(different_plans_are_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(allreduce(rank, 5 + uint64_t(rank)), kTile);
        return submit(engine, executor, array.data(), array.data(), 10);
      },
      "another plan");
}

// Both ranks wait to receive, so no message ever comes: they find out by telling each other that
// they wait.
LINK_TEST(two_ranks_that_both_receive_find_out) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(broadcast(rank, 1 - rank), kTile);
        return submit(engine, executor, array.data(), array.data(), 10);
      },
      "with root");
}

LINK_TEST(two_waiting_ranks_find_out_in_the_background_too) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto executor = engine.bind(broadcast(rank, 1 - rank), kTile);
        const auto operation =
            submit(engine, executor, array.data(), array.data(), 10, Dtype::kInt64, true);
        CHECK(eventually([&] { return operation->finished(); }));
        return operation;
      },
      "with root");
}

// Rank 0 skips the allreduce and goes on to the broadcast from rank 1.
LINK_TEST(a_different_order_is_a_mismatch) {
  expect_mismatch(
      kind,
      [](int rank, Engine& engine, Array& array) {
        const auto sum = engine.bind(allreduce(rank), kTile);
        const auto cast = engine.bind(broadcast(rank, 1), kTile);
        if (rank == 0) submit(engine, cast, array.data(), array.data(), 10);
        if (rank == 1) submit(engine, sum, array.data(), array.data(), 10);
        return submit(engine, rank == 0 ? sum : cast, array.data(), array.data(), 10);
      },
      "in operation 1");
}

LINK_TEST(a_message_of_another_length_or_dtype_is_a_mismatch) {
  for (const bool dtype : {false, true})
    expect_mismatch(
        kind,
        [&](int rank, Engine& engine, Array& array) {
          if (!dtype) array.resize(rank == 0 ? 5 : 6);
          return post(engine, rank == 0 ? Collective::kSend : Collective::kRecv, 1 - rank, array,
                      dtype && rank == 0 ? Dtype::kUint64 : Dtype::kInt64);
        },
        "the receiver expected");
}

LINK_TEST(a_rank_that_went_on_is_named) {
  RawPeer raw(kind);
  Array array(4);
  const auto executor = raw.engine.bind(broadcast(1), kTile);
  const auto operation = submit(raw.engine, executor, array.data(), array.data(), 4);
  FrameHeader header = raw.header(*operation, array);
  header.operation = 3;
  std::thread writer = raw.send_frame(header, array);
  CHECK(settled(raw.engine, operation));
  raw.engine.close(0ms);
  writer.join();
  CHECK(operation->failure.code == FailureCode::kMismatch);
  CHECK(says(operation->failure, "rank 0 went on to operation 3"));
}

LINK_TEST(frames_of_an_earlier_epoch_and_old_waiting_frames_are_skipped) {
  RawPeer raw(kind);
  Array array(4);
  const auto executor = raw.engine.bind(broadcast(1), kTile);
  const auto operation = submit(raw.engine, executor, array.data(), array.data(), 4);
  FrameHeader old_epoch = raw.header(*operation, Array(1000));
  old_epoch.epoch = 0;
  old_epoch.operation = 77;
  FrameHeader waited = raw.header(*operation, {});
  waited.kind = FrameKind::kWaiting;
  waited.operation = 0;
  waited.set_call({Collective::kReduce, Dtype::kUint8, ReduceOp::kMax, false, 1, 5, 24});
  FrameHeader waiting = raw.header(*operation, {});
  waiting.kind = FrameKind::kWaiting;
  std::thread writer([&] {
    raw.send_frame(old_epoch, Array(1000, -1)).join();
    raw.send_frame(waited, {}).join();
    raw.send_frame(waiting, {}).join();
    raw.send_frame(raw.header(*operation, array), Array(4, 42)).join();
  });
  CHECK(finish(raw.engine, operation));
  writer.join();
  CHECK(array == Array(4, 42));
}

LINK_TEST(a_message_that_an_earlier_operation_did_not_take_is_a_mismatch) {
  RawPeer raw(kind);
  Array array(4);
  const auto executor = raw.engine.bind(broadcast(1), kTile);
  const auto operation = submit(raw.engine, executor, array.data(), array.data(), 4);
  FrameHeader unclaimed = raw.header(*operation, {});
  unclaimed.operation = 0;
  std::thread writer = raw.send_frame(unclaimed, {});
  CHECK(settled(raw.engine, operation));
  writer.join();
  CHECK(operation->failure.code == FailureCode::kMismatch);
  CHECK(says(operation->failure, "did not take its message"));
}

}  // namespace
