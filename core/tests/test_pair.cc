// SPDX-License-Identifier: Apache-2.0
// Send and recv: the messages of a pair, and receives that are taken back.
#include "two_ranks.h"

namespace {

using namespace commute;
using namespace commute::check;

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

}  // namespace
