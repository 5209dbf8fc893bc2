// SPDX-License-Identifier: Apache-2.0
// The engine: who drives, in what order, and what happens when ranks disagree, fall silent, or
// close.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "ranks.h"

namespace {

using namespace commute;
using namespace commute::check;
using Array = std::vector<int64_t>;

constexpr size_t kTile = 64;
const LinkKind& kMemory = kLinkKinds[1];

bool says(const Failure& failure, const char* part) {
  if (failure.text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" does not say \"%s\"\n", failure.text.c_str(), part);
  return false;
}

// Broadcast from `root` between two ranks.
Plan broadcast(int rank, int root = 0, uint64_t hash = 1) {
  const Lanes lanes = {
      {rank == root ? send(1 - rank, Space::kOut, 0) : recv(1 - rank, Space::kOut, 0)}};
  return plan_of(rank, 2, {Collective::kBroadcast, 1, 1, 1, 0, 0, root, hash}, lanes);
}

// Rank 1 sends what rank 0 adds, then the sum comes back.
Plan allreduce(int rank, uint64_t hash = 2) {
  const Lanes lanes =
      rank == 0 ? Lanes{{recv_reduce(1, Space::kOut, Space::kOut, 0), send(1, Space::kOut, 0)}}
                : Lanes{{send(0, Space::kOut, 0), recv(0, Space::kOut, 0)}};
  return plan_of(rank, 2, {Collective::kAllreduce, 1, 1, 1, 0, 0, 0, hash}, lanes);
}

std::shared_ptr<Operation> post(Engine& engine, Collective collective, int peer, Array& array,
                                Dtype dtype = Dtype::kInt64, bool background = false) {
  auto operation = std::make_shared<Operation>();
  operation->call.collective = collective;
  operation->call.dtype = dtype;
  operation->call.count = array.size();
  operation->peer = peer;
  operation->in = operation->out = reinterpret_cast<std::byte*>(array.data());
  engine.submit(operation, background);
  return operation;
}

// One rank whose only peer, rank 0, is the test itself, writing frames by hand.
struct RawPeer {
  explicit RawPeer(const LinkKind& kind) {
    auto link = kind.make(poller, engine.poller());
    auto pair = kind.make(poller, engine.poller());
    engine.add_link(0, std::move(link.second));
    engine.add_pair_link(0, std::move(pair.second));
    to_link = std::make_unique<Stream>(std::move(link.first));
    to_pair = std::make_unique<Stream>(std::move(pair.first));
  }

  FrameHeader header(const Operation& operation, const Array& payload) const {
    FrameHeader made{};
    made.set_call(operation.call);
    made.group = 9;
    made.epoch = 1;
    made.operation = operation.sequence;
    made.bytes = payload.size() * sizeof(int64_t);
    return made;
  }

  // On a thread of its own, as a narrow link takes a frame only while the engine reads it.
  static std::thread writer(Stream& stream, Poller& poller, FrameHeader header, Array payload) {
    return std::thread([&stream, &poller, header, payload] {
      stream.begin(header);
      const auto* bytes = reinterpret_cast<const char*>(payload.data());
      size_t sent = 0;
      CHECK(eventually([&] {
        try {
          poller.sleep(0);
          sent += stream.send(bytes + sent, header.bytes - sent);
          return sent == header.bytes && stream.header_sent();
        } catch (const LinkClosed&) {
          return true;  // the engine refused the frame
        }
      }));
      stream.end();
    });
  }
  std::thread send_frame(const FrameHeader& made, const Array& payload) {
    return writer(*to_link, *poller, made, payload);
  }

  std::shared_ptr<Poller> poller = std::make_shared<Poller>();
  Engine engine{{1, 2, 9, 1}, std::make_shared<Poller>()};
  std::unique_ptr<Stream> to_link;
  std::unique_ptr<Stream> to_pair;
};

// --- order, and who drives ---

LINK_TEST(calls_run_in_program_order_blocking_and_asynchronous_mixed) {
  constexpr size_t kCalls = 200;
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto there = engine.bind(broadcast(rank, 0), kTile);
    const auto back = engine.bind(broadcast(rank, 1), kTile);
    std::vector<Array> arrays(kCalls, Array(10, -1));
    std::vector<std::shared_ptr<Operation>> operations;
    for (size_t i = 0; i < kCalls; ++i) {
      if (rank == static_cast<int>(i % 2)) arrays[i].assign(10, static_cast<int64_t>(i));
      const bool background = i % 3 != 0;
      operations.push_back(submit(engine, i % 2 == 0 ? there : back, arrays[i].data(),
                                  arrays[i].data(), 10, Dtype::kInt64, background));
      if (background) continue;
      CHECK(finish(engine, operations.back()));
      for (const auto& earlier : operations) CHECK(earlier->finished());
    }
    for (const auto& operation : operations) CHECK(finish(engine, operation));
    for (size_t i = 0; i < kCalls; ++i) {
      CHECK(arrays[i] == Array(10, static_cast<int64_t>(i)));
      CHECK_EQ(operations[i]->sequence, i + 1);
    }
  });
}

LINK_TEST(the_progress_thread_finishes_what_nobody_waits_for) {
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(allreduce(rank), kTile);
    std::vector<Array> arrays(20, Array(100, rank + 1));
    std::vector<std::shared_ptr<Operation>> operations;
    for (Array& array : arrays)
      operations.push_back(
          submit(engine, executor, array.data(), array.data(), 100, Dtype::kInt64, true));
    CHECK(eventually([&] { return operations.back()->finished(); }));
    for (const Array& array : arrays) CHECK(array == Array(100, 3));
  });
}

LINK_TEST(several_threads_wait_for_different_operations) {
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(allreduce(rank), kTile);
    std::vector<Array> arrays(12, Array(50, rank + 1));
    std::vector<std::shared_ptr<Operation>> operations;
    for (Array& array : arrays)
      operations.push_back(submit(engine, executor, array.data(), array.data(), 50, Dtype::kInt64,
                                  operations.size() % 2 == 0));
    std::vector<std::thread> waiters;
    for (size_t i = 0; i < 4; ++i)
      waiters.emplace_back([&, i] {
        for (size_t k = 0; k < 3; ++k) CHECK(finish(engine, operations[(i * 3 + 7 * k) % 12]));
        for (const auto& operation : operations) CHECK(finish(engine, operation));
      });
    for (auto& waiter : waiters) waiter.join();
    for (const Array& array : arrays) CHECK(array == Array(50, 3));
  });
}

TEST(a_wait_returns_at_its_end_and_the_operation_goes_on) {
  Ranks ranks(2, kMemory);
  Array array(4, 5);
  Array other(4);
  const auto receive = ranks[1].bind(broadcast(1), kTile);
  const auto waiting = submit(ranks[1], receive, other.data(), other.data(), 4);
  CHECK(!ranks[1].wait(waiting, Clock::now() + 20ms));
  CHECK(!ranks[1].wait(waiting, Clock::now() - 1s));
  const auto executor = ranks[0].bind(broadcast(0), kTile);
  CHECK(finish(ranks[0], submit(ranks[0], executor, array.data(), array.data(), 4)));
  CHECK(finish(ranks[1], waiting));
  CHECK(other == array);
}

TEST(a_waiting_thread_uses_hardly_any_processor_time) {
  Ranks ranks(2, kMemory);
  Array array(4);
  const auto executor = ranks[1].bind(broadcast(1), kTile);
  const auto waiting = submit(ranks[1], executor, array.data(), array.data(), 4);
  const auto cpu = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
  };
  const double before = cpu();
  for (int slice = 0; slice < 5; ++slice) CHECK(!ranks[1].wait(waiting, Clock::now() + 100ms));
  CHECK(cpu() - before < 0.1);  // of half a second
}

// --- failing ---

TEST(a_deadline_fails_the_group_and_names_who_is_missing) {
  Ranks ranks(2, kMemory);
  Array array(4);
  auto operation = call_of(ranks[0].bind(allreduce(0), kTile), array.data(), array.data(), 4);
  operation->deadline = Clock::now() + 50ms;
  operation->timeout_s = 0.05;
  ranks[0].submit(operation, false);
  CHECK(settled(ranks[0], operation));
  CHECK(operation->failure.code == FailureCode::kTimeout);
  CHECK_EQ(operation->failure.rank, 1);
  CHECK(says(operation->failure, "timed out after 0.05 s on rank 0, waiting for rank 1"));
  CHECK(ranks[1].failure().code == FailureCode::kTimeout);  // and the others hear of it
}

// A call that waits behind another one has a deadline too.
TEST(a_deadline_counts_for_a_call_that_is_still_queued) {
  Ranks ranks(2, kMemory);
  Array array(4);
  const auto executor = ranks[0].bind(allreduce(0), kTile);
  submit(ranks[0], executor, array.data(), array.data(), 4, Dtype::kInt64, true);
  auto second = call_of(executor, array.data(), array.data(), 4);
  second->deadline = Clock::now() + 50ms;
  ranks[0].submit(second, false);
  CHECK(settled(ranks[0], second));
  CHECK(second->failure.code == FailureCode::kTimeout);
  CHECK(says(second->failure, "operation 2"));
}

TEST(a_send_times_out_beside_a_receive_that_has_time) {
  Ranks ranks(2, kLinkKinds[2]);
  Array array(100);
  post(ranks[0], Collective::kRecv, 1, array);
  auto sending = std::make_shared<Operation>();
  sending->call = {Collective::kSend, Dtype::kInt64, ReduceOp::kSum, 0, 0, 100};
  sending->peer = 1;
  sending->in = reinterpret_cast<std::byte*>(array.data());
  sending->deadline = Clock::now() + 50ms;
  ranks[0].submit(sending, false);
  CHECK(settled(ranks[0], sending));
  CHECK(sending->failure.code == FailureCode::kTimeout);
}

LINK_TEST(a_failure_from_elsewhere_wakes_a_sleeping_waiter) {
  Ranks ranks(2, kind);
  Array array(4);
  const auto executor = ranks[0].bind(allreduce(0), kTile);
  const auto operation = submit(ranks[0], executor, array.data(), array.data(), 4);
  std::thread waiter([&] {
    CHECK(ranks[0].wait(operation, Clock::now() + kDeadline));
    CHECK(operation->failure.code == FailureCode::kPeerLost);
    CHECK(says(operation->failure, "killed"));
  });
  CHECK(eventually([&] { return !ranks[0].waiting_for().empty(); }));  // it drives
  ranks[0].fail({FailureCode::kPeerLost, 1, 0, 0, "it was killed"});
  waiter.join();
}

TEST(after_a_failure_everything_pending_and_everything_later_fails) {
  Ranks ranks(2, kMemory);
  std::vector<Array> arrays(6, Array(4));
  const auto executor = ranks[0].bind(allreduce(0), kTile);
  std::vector<std::shared_ptr<Operation>> pending;
  for (int i = 0; i < 3; ++i)
    pending.push_back(submit(ranks[0], executor, arrays[0].data(), arrays[0].data(), 4,
                             Dtype::kInt64, i % 2 == 0));
  pending.push_back(post(ranks[0], Collective::kRecv, 1, arrays[3], Dtype::kInt64, true));
  ranks[0].fail({FailureCode::kPeerLost, 1, 0, 0, "gone"});
  for (const auto& operation : pending) {
    CHECK(settled(ranks[0], operation));
    CHECK(operation->failure.code == FailureCode::kPeerLost);
  }
  bool raised = false;
  try {
    submit(ranks[0], executor, arrays[0].data(), arrays[0].data(), 4);
  } catch (const Error& error) {
    raised = error.failure().code == FailureCode::kPeerLost;
  }
  CHECK(raised);
  for (const Record& record : ranks[0].records())
    CHECK(record.state == Operation::State::kFailed && record.ended_ns != 0);
}

// Handles that nobody waits for must not stay open because the driver left at the same moment.
TEST(a_failure_reaches_background_operations_whoever_drives) {
  for (int round = 0; round < 200; ++round) {
    Ranks ranks(2, kMemory);
    Array first(1, 7);
    Array second(1);
    const auto there = ranks[1].bind(broadcast(1, 1), kTile);
    const auto executor = ranks[1].bind(broadcast(1, 0), kTile);
    const auto target = submit(ranks[1], there, first.data(), first.data(), 1);
    const auto handle =
        submit(ranks[1], executor, second.data(), second.data(), 1, Dtype::kInt64, true);
    std::thread waiter([&] { CHECK(settled(ranks[1], target)); });
    ranks[1].fail({FailureCode::kPeerLost, 0, 1, 0, "gone"});
    waiter.join();
    CHECK(eventually([&] { return handle->finished(); }));
  }
}

TEST(news_about_ranks_that_do_not_exist_does_no_harm) {
  for (const int rank : {-7, 2, 1 << 30}) {
    Ranks ranks(2, kMemory);
    ranks[0].peer_left(rank);
    ranks[0].fail({FailureCode::kPeerLost, rank, 1, 0, "a rank nobody knows"});
    CHECK(says(ranks[0].failure(), "nobody knows"));
  }
}

LINK_TEST(a_closed_link_is_a_loss_and_a_goodbye_explains_it) {
  for (const bool goodbye : {false, true}) {
    RawPeer raw(kind);
    Array array(4);
    const auto executor = raw.engine.bind(broadcast(1), kTile);
    const auto operation = submit(raw.engine, executor, array.data(), array.data(), 4);
    if (goodbye) raw.engine.peer_left(0);
    raw.to_link->close({});
    CHECK(settled(raw.engine, operation));
    CHECK(operation->failure.code == FailureCode::kPeerLost);
    CHECK_EQ(operation->failure.rank, 0);
    if (goodbye) CHECK(says(operation->failure, "had finished and left"));
  }
}

LINK_TEST(garbage_on_a_link_is_a_protocol_failure) {
  const auto mine = std::make_shared<Poller>();
  const auto theirs = std::make_shared<Poller>();
  Engine engine({1, 2, 9, 1}, mine);
  auto link = kind.make(theirs, mine);
  engine.add_link(0, std::move(link.second));
  Array array(4);
  const auto executor = engine.bind(broadcast(1), kTile);
  const auto operation = submit(engine, executor, array.data(), array.data(), 4);
  std::string garbage(64, 'x');
  std::thread writer([&] {
    CHECK(eventually([&] {
      theirs->sleep(0);
      const iovec piece{garbage.data(), garbage.size()};
      garbage.erase(0, link.first->write(&piece, 1));
      return garbage.empty();
    }));
  });
  CHECK(settled(engine, operation));
  writer.join();
  CHECK(operation->failure.code == FailureCode::kProtocol);
  CHECK(says(operation->failure, "no rank sends"));
}

// --- ranks that disagree ---

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

LINK_TEST(frames_of_an_earlier_epoch_or_operation_are_skipped) {
  RawPeer raw(kind);
  Array array(4);
  const auto executor = raw.engine.bind(broadcast(1), kTile);
  const auto operation = submit(raw.engine, executor, array.data(), array.data(), 4);
  FrameHeader old_epoch = raw.header(*operation, Array(1000));
  old_epoch.epoch = 0;
  old_epoch.operation = 77;
  FrameHeader abandoned = raw.header(*operation, Array(3));
  abandoned.operation = 0;
  abandoned.set_call({Collective::kReduce, Dtype::kUint8, ReduceOp::kMax, 1, 5, 24});
  FrameHeader waiting = raw.header(*operation, {});
  waiting.kind = FrameKind::kWaiting;
  std::thread writer([&] {
    raw.send_frame(old_epoch, Array(1000, -1)).join();
    raw.send_frame(abandoned, Array(3, -2)).join();
    raw.send_frame(waiting, {}).join();
    raw.send_frame(raw.header(*operation, array), Array(4, 42)).join();
  });
  CHECK(finish(raw.engine, operation));
  writer.join();
  CHECK(array == Array(4, 42));
}

// --- send and recv ---

LINK_TEST(messages_of_a_pair_arrive_in_order_beside_collectives) {
  constexpr size_t kMessages = 40;
  Ranks ranks(2, kind);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(allreduce(rank), kTile);
    std::vector<Array> out, in;
    for (size_t i = 0; i < kMessages; ++i) {
      out.push_back(Array(i % 5 * 10, static_cast<int64_t>(i) * (rank + 1)));
      in.push_back(Array(i % 5 * 10));
    }
    std::vector<std::shared_ptr<Operation>> operations;
    Array sum(10, 1);
    for (size_t i = 0; i < kMessages; ++i) {
      operations.push_back(
          post(engine, Collective::kRecv, 1 - rank, in[i], Dtype::kInt64, i % 2 == 0));
      operations.push_back(
          post(engine, Collective::kSend, 1 - rank, out[i], Dtype::kInt64, i % 3 == 0));
    }
    CHECK(finish(engine, submit(engine, executor, sum.data(), sum.data(), 10)));
    CHECK(sum == Array(10, 2));
    for (const auto& operation : operations) CHECK(finish(engine, operation));
    for (size_t i = 0; i < kMessages; ++i)
      CHECK(in[i] == Array(i % 5 * 10, static_cast<int64_t>(i) * (2 - rank)));
  });
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

TEST(a_message_to_a_rank_without_a_link_is_refused) {
  Engine engine({0, 2, 9, 1}, std::make_shared<Poller>());
  Array array(4);
  for (const int peer : {1, -1, 2}) {
    bool refused = false;
    try {
      post(engine, Collective::kSend, peer, array);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

LINK_TEST(a_withdrawn_receive_leaves_its_message_to_the_next) {
  Ranks ranks(2, kind);
  Array first(20, -1);
  Array second(20, -1);
  Array message(20, 6);
  const auto early = post(ranks[0], Collective::kRecv, 1, first);
  CHECK(!ranks[0].wait(early, Clock::now() + 10ms));
  CHECK(ranks[0].withdraw(early));
  CHECK(early->finished());
  CHECK(!ranks[0].withdraw(early));
  const auto never_looked_at = post(ranks[0], Collective::kRecv, 1, first);
  CHECK(ranks[0].withdraw(never_looked_at));
  const auto sending = post(ranks[1], Collective::kSend, 0, message, Dtype::kInt64, true);
  const auto late = post(ranks[0], Collective::kRecv, 1, second);
  CHECK(finish(ranks[0], late));
  CHECK(finish(ranks[1], sending));
  CHECK(!ranks[0].withdraw(late));
  CHECK(first == Array(20, -1));
  CHECK(second == message);
}

TEST(a_receive_that_has_begun_to_arrive_stays) {
  RawPeer raw(kLinkKinds[2]);  // the narrow one: a message cannot arrive at once
  Array array(4);
  const auto receive = post(raw.engine, Collective::kRecv, 0, array);
  FrameHeader header = raw.header(*receive, array);
  header.kind = FrameKind::kPair;
  header.collective = Collective::kSend;
  header.operation = 1;
  std::thread writer = RawPeer::writer(*raw.to_pair, *raw.poller, header, Array(4, 8));
  CHECK(eventually([&] {
    raw.engine.wait(receive, Clock::now() + 1ms);
    return receive->begun || receive->finished();
  }));
  CHECK(!raw.engine.withdraw(receive));
  CHECK(finish(raw.engine, receive));
  writer.join();
  CHECK(array == Array(4, 8));
}

// The progress thread gives way to whoever withdraws, and must come back afterwards.
TEST(withdrawing_does_not_stop_the_progress_thread) {
  Ranks ranks(2, kMemory);
  for (int round = 0; round < 20; ++round) {
    Array array(4);
    Array unused(4);
    Array value(4, round);
    const auto cast = ranks[1].bind(broadcast(1), kTile);
    const auto handle = submit(ranks[1], cast, array.data(), array.data(), 4, Dtype::kInt64, true);
    const auto receive = post(ranks[1], Collective::kRecv, 0, unused, Dtype::kInt64, true);
    CHECK(eventually([&] { return !ranks[1].waiting_for().empty(); }));  // it drives
    CHECK(ranks[1].withdraw(receive));
    const auto root = ranks[0].bind(broadcast(0), kTile);
    CHECK(finish(ranks[0], submit(ranks[0], root, value.data(), value.data(), 4)));
    CHECK(eventually([&] { return handle->finished(); }));
    CHECK(array == value);
  }
}

TEST(withdrawing_does_not_wait_for_another_threads_wait) {
  Ranks ranks(2, kMemory);
  Array array(4);
  Array unused(4);
  const auto executor = ranks[1].bind(broadcast(1), kTile);
  const auto operation = submit(ranks[1], executor, array.data(), array.data(), 4);
  const auto receive = post(ranks[1], Collective::kRecv, 0, unused);
  std::thread waiter([&] { CHECK(ranks[1].wait(operation, Clock::now() + kDeadline)); });
  CHECK(eventually([&] { return !ranks[1].waiting_for().empty(); }));
  const auto begun = Clock::now();
  CHECK(ranks[1].withdraw(receive));
  CHECK(Clock::now() - begun < kDeadline / 2);
  ranks[1].close(0ms);
  waiter.join();
}

// --- the end ---

LINK_TEST(closing_is_bounded_and_idempotent_with_a_blocked_driver) {
  Ranks ranks(2, kind);
  Array array(4);
  const auto executor = ranks[0].bind(allreduce(0), kTile);
  const auto operation = submit(ranks[0], executor, array.data(), array.data(), 4);
  const auto handle =
      submit(ranks[0], executor, array.data(), array.data(), 4, Dtype::kInt64, true);
  std::thread waiter([&] { CHECK(ranks[0].wait(operation, Clock::now() + kDeadline)); });
  CHECK(eventually([&] { return !ranks[0].waiting_for().empty(); }));
  const auto begun = Clock::now();
  std::thread other([&] { ranks[0].close(1s); });
  ranks[0].close(1s);
  other.join();
  ranks[0].close(1s);
  waiter.join();
  CHECK(Clock::now() - begun < 10s);
  CHECK(operation->failure.code == FailureCode::kClosed);
  CHECK(handle->finished() && handle->failure.code == FailureCode::kClosed);
  CHECK(!ranks[0].withdraw(handle));
  bool raised = false;
  try {
    submit(ranks[0], executor, array.data(), array.data(), 4);
  } catch (const Error& error) {
    raised = error.failure().code == FailureCode::kClosed;
  }
  CHECK(raised);
}

// What was sent before a close still arrives, however late the receiver looks.
LINK_TEST(a_rank_may_close_before_the_others_have_read_its_last_message) {
  if (std::string_view(kind.name) == "narrow_memory") return;  // holds no message
  Ranks ranks(2, kind);
  Array array(100, 3);
  Array other(100);
  const auto executor = ranks[0].bind(broadcast(0), 4096);
  CHECK(finish(ranks[0], submit(ranks[0], executor, array.data(), array.data(), 100)));
  ranks[0].close(1s);
  ranks[1].peer_left(0);
  const auto receive = ranks[1].bind(broadcast(1), 4096);
  CHECK(finish(ranks[1], submit(ranks[1], receive, other.data(), other.data(), 100)));
  CHECK(other == array);
}

TEST(news_does_not_wait_for_a_lingering_close) {
  const LinkKind& tcp = kLinkKinds[0];
  RawPeer raw(tcp);
  Array array(4'000'000);  // more than the sockets hold: the close lingers, as nobody reads
  const auto executor = raw.engine.bind(broadcast(1, 1), size_t{32} << 20);
  const auto operation = submit(raw.engine, executor, array.data(), array.data(), array.size());
  CHECK(!raw.engine.wait(operation, Clock::now() + 200ms));
  std::thread closer([&] { raw.engine.close(3s); });
  CHECK(eventually([&] { return raw.engine.failure().code == FailureCode::kClosed; }));
  const auto begun = Clock::now();
  for (int i = 0; i < 20; ++i) {
    raw.engine.peer_left(0);
    CHECK(raw.engine.records().size() == 1);
    std::this_thread::sleep_for(5ms);
  }
  CHECK(Clock::now() - begun < 2s);
  raw.to_link->close({});
  closer.join();
}

TEST(the_recorder_keeps_the_last_4096_operations) {
  Engine engine({0, 1, 9, 1}, std::make_shared<Poller>());
  const auto executor = engine.bind(plan_of(0, 1, {}, {}), kTile);
  Array array(1, 4);
  for (int i = 0; i < 5000; ++i)
    CHECK(finish(engine, submit(engine, executor, array.data(), array.data(), 1)));
  const auto records = engine.records();
  CHECK_EQ(records.size(), Recorder::kRecords);
  CHECK_EQ(records.front().number, 5000 - Recorder::kRecords + 1);
  CHECK_EQ(records.back().number, 5000u);
  for (size_t i = 1; i < records.size(); ++i) {
    CHECK_EQ(records[i].number, records[i - 1].number + 1);
    CHECK_EQ(records[i].sequence, records[i].number);
  }
  CHECK(records.back().state == Operation::State::kDone);
  CHECK(records.back().ended_ns >= records.back().begun_ns);
}

TEST(engines_come_and_go_without_leaving_descriptors) {
  const int before = ::dup(0);
  for (int round = 0; round < 50; ++round) {
    Ranks ranks(3, kLinkKinds[0]);
    Array array(4);
    const auto executor = ranks[0].bind(plan_of(0, 3, {}, {{recv(1, Space::kOut, 0)}}), kTile);
    submit(ranks[0], executor, array.data(), array.data(), 4, Dtype::kInt64, true);
  }
  const int after = ::dup(0);
  CHECK_EQ(before + 1, after);
  ::close(before);
  ::close(after);
}

}  // namespace
