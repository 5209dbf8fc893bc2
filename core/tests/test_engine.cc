// SPDX-License-Identifier: Apache-2.0
// The engine: who drives, in what order, and what happens when something fails or closes.
#include "two_ranks.h"

namespace {

using namespace commute;
using namespace commute::check;

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
  const auto begun = Clock::now();
  std::thread closer([&] { raw.engine.close(8s); });
  CHECK(eventually([&] { return raw.engine.failure().code == FailureCode::kClosed; }));
  for (int i = 0; i < 20; ++i) {
    raw.engine.peer_left(0);
    CHECK(raw.engine.records().size() == 1);
    std::this_thread::sleep_for(5ms);
  }
  CHECK(Clock::now() - begun < 4s);
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
