// SPDX-License-Identifier: Apache-2.0
// Observers, clients without a clock that come and go while a shard lives: by hand, and as threads
// of a server, for the sanitizers.
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "store/encoding.h"
#include "store/endpoint.h"
#include "store/replay.h"
#include "store/server.h"
#include "store/shard.h"
#include "store/status.h"

using namespace commute;
using namespace std::chrono_literals;

namespace {

constexpr uint32_t kMembers = 2;
constexpr uint32_t kObserver = 5, kOther = 6;

// A shard with two members' places and one element of a table at this staleness.
struct Hand {
  explicit Hand(int32_t staleness) {
    spec.dtype = Dtype::kFloat64;
    spec.count = 1;
    spec.staleness = staleness;
  }

  StoreHeader header(StoreKind kind, uint32_t worker) {
    StoreHeader made;
    made.kind = kind;
    made.worker = worker;
    made.incarnation = 1;
    made.call = ++calls;
    return made;
  }

  void give(const StoreHeader& header, Bytes payload) {
    shard.on_message(int(header.worker), header, payload);
    take();
  }

  void take() {
    answers.clear();
    for (int link = 0; link < 16; ++link)
      while (const StoreMessage* answer = shard.next(link)) {
        answers.push_back(answer->header);
        texts.assign(reinterpret_cast<const char*>(answer->payload.data()), answer->payload.size());
        shard.sent(link);
      }
  }

  // Asks the directory; the maker it names.
  uint32_t place(uint32_t worker, int64_t instead_of = -1) {
    StoreHeader asks = header(StoreKind::kTable, worker);
    asks.flags = instead_of >= 0 ? kStoreMaker : 0;
    asks.version = instead_of >= 0 ? uint64_t(instead_of) : 0;
    std::vector<std::byte> payload;
    put_text(payload, "store/t");
    const auto encoded = spec.encode();
    put_bytes(payload, encoded.data(), encoded.size());
    put_text(payload, "one");
    give(asks, payload);
    CHECK(answer() == StoreKind::kPlaced);
    return shard.slots().at(0).directory().at("store/t").maker;
  }

  void declare(uint32_t worker, uint32_t maker) {
    StoreHeader asks = header(StoreKind::kDeclare, worker);
    asks.flags = worker == maker ? kStoreMaker : 0;
    asks.version = maker;
    give(asks, spec.encode());
  }

  void push(uint32_t worker, double value, uint64_t number) {
    StoreHeader asks = header(StoreKind::kPush, worker);
    asks.number = asks.clock = number;
    asks.slowest = number - 1;
    give(asks, std::as_bytes(std::span(&value, 1)));
  }

  void pull(uint32_t worker, uint64_t clock, uint64_t after) {
    StoreHeader asks = header(StoreKind::kPull, worker);
    asks.clock = clock;
    asks.slowest = after;
    give(asks, {});
  }

  StoreKind answer() const { return answers.empty() ? StoreKind::kPush : answers.back().kind; }
  const Slot::Part& part() const { return *shard.slots().at(0).part(0); }
  double value() const {
    double found;
    std::memcpy(&found, part().value.data(), sizeof found);
    return found;
  }
  bool replays() {
    replay->compare(shard);
    return replay->report().ends_with(", equal");
  }

  TableSpec spec;
  uint64_t calls = 0;
  std::vector<StoreHeader> answers;
  std::string texts;
  std::shared_ptr<Replay> replay = std::make_shared<Replay>();
  Shard shard{{kMembers, 0, 1, 16, Planted::kNone}, Replay::recorder(replay)};
};

TEST(an_observer_counts_once_and_is_forgotten) {
  Hand hand(-1);
  hand.shard.on_came(kObserver);
  hand.declare(kObserver, hand.place(kObserver));
  CHECK(hand.answer() == StoreKind::kDeclared);
  hand.push(kObserver, 3, 1);
  hand.push(kObserver, 3, 1);  // sent again over a mended channel
  CHECK(hand.answer() == StoreKind::kCommitted && hand.value() == 3);
  CHECK(hand.part().last.contains(kObserver) && hand.part().clocks.contains(kObserver));

  hand.shard.on_gone(kObserver);
  CHECK(hand.part().last.empty() && hand.part().clocks.empty() && hand.value() == 3);
  hand.push(kObserver, 3, 2);
  CHECK(hand.answer() == StoreKind::kRefused && hand.value() == 3);
  CHECK(hand.replays());
}

TEST(an_observer_holds_up_nobody_and_waits_for_nobody) {
  Hand hand(0);
  hand.shard.on_came(kObserver);
  hand.declare(0, hand.place(0));
  hand.declare(1, 0);
  hand.declare(kObserver, 0);
  hand.push(kObserver, 100, 1);
  CHECK(hand.answer() == StoreKind::kRefused && hand.answers.back().code == Refused::kInvalid);
  CHECK(hand.texts.find("staleness None only") != std::string::npos);
  hand.push(0, 1, 1);
  hand.pull(kObserver, 1, 1);  // after what was refused, in the middle of a round
  CHECK(hand.answer() == StoreKind::kValue && hand.value() == 0);
  hand.push(1, 2, 1);
  CHECK(hand.value() == 3);
  StoreHeader leave = hand.header(StoreKind::kLeave, kObserver);
  hand.give(leave, {});
  hand.pull(kObserver, 1, 1);
  CHECK(hand.answer() == StoreKind::kValue);
  const auto status = status_of(hand.shard).tables.at(0);
  CHECK(status.clocks.size() == kMembers && status.clocks.at(0) == 1 && status.bytes == 8);
}

TEST(nobody_waits_for_a_maker_that_is_gone) {
  Hand hand(-1);
  for (const uint32_t observer : {kObserver, kOther, kOther + 1}) hand.shard.on_came(observer);
  CHECK(hand.place(kObserver) == kObserver);
  CHECK(hand.place(kOther) == kObserver);
  hand.declare(kOther, kObserver);
  CHECK(hand.answers.empty());

  hand.shard.on_gone(kObserver);
  hand.take();
  CHECK(hand.answer() == StoreKind::kRefused && hand.answers.back().code == Refused::kLost);
  CHECK(hand.answers.back().version == kObserver);
  hand.declare(kOther + 1, kObserver);  // it has not heard of it
  CHECK(hand.answer() == StoreKind::kRefused && hand.answers.back().version == kObserver);
  CHECK(hand.place(kOther, kObserver) == kOther);
  CHECK(hand.place(kOther + 1, kObserver) == kOther);  // too late: another is named
  hand.declare(kOther + 1, kOther);
  CHECK(hand.answers.empty());
  hand.declare(kOther, kOther);
  CHECK(hand.answers.size() == 2 && hand.answer() == StoreKind::kDeclared);
  CHECK(hand.replays());
}

TEST(nothing_grows_with_those_who_went) {
  Hand hand(-1);
  hand.shard.on_came(kObserver);
  hand.declare(kObserver, hand.place(kObserver));
  const size_t before = hand.shard.slots().at(0).image().size();
  for (uint32_t observer = kOther; observer < kOther + 9; ++observer) {
    hand.shard.on_came(observer);
    hand.declare(observer, kObserver);
    hand.push(observer, 1, 1);
    hand.shard.on_gone(observer);
    hand.shard.on_link_down(int(observer));
  }
  CHECK(hand.value() == 9);
  CHECK(hand.shard.slots().at(0).image().size() == before);
  CHECK(hand.replays());
}

// --- threads ---

void finish(Endpoint& endpoint, uint64_t call) {
  CHECK(endpoint.wait(call, Endpoint::Clock::now() + 30s));
}

// Comes, pushes so many times, and goes; without a word when it is to be killed.
void visit(Server& server, uint32_t observer, int pushes, bool killed) {
  server.on_came(observer);
  {
    Endpoint endpoint({observer, 1, 2, Planted::kNone});
    for (int shard = 0; shard < 2; ++shard) {
      int ends[2];
      CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      server.add_channel(uint32_t(shard), ends[0], -1, observer);
      endpoint.add_channel(shard, ends[1], -1);
    }
    TableSpec spec;
    spec.staleness = -1;
    spec.count = 20'000;  // two parts
    finish(endpoint, endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
      return client.declare_table("s/t", spec, "t");
    }));
    finish(endpoint, endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
      return client.declare("s/t", spec, {});
    }));
    const std::vector<float> ones(spec.count, 1);
    for (int i = 0; i < pushes; ++i)
      finish(endpoint, endpoint.call(Endpoint::Then::kReturn, [&](Client& client) {
        return client.push(0, std::as_bytes(std::span(ones)), nullptr, false);
      }));
    if (killed) server.on_gone(observer);  // while it is connected
  }
  if (!killed) server.on_gone(observer);
}

TEST(observers_of_a_server) {
  Server server({0, 0, 2, 2, 16});
  visit(server, 1, 1, false);  // makes the table
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&server, i] {
      for (uint32_t turn = 0; turn < 5; ++turn) visit(server, 2 + 4 * turn + i, 5, turn % 2 == 1);
    });
  for (int i = 0; i < 20; ++i) server.status();
  for (auto& thread : threads) thread.join();
  const auto status = server.status();
  CHECK_EQ(status.size(), size_t{2});
  CHECK_EQ(status[0].directory.size(), size_t{1});
  CHECK_EQ(status[0].tables.at(0).updates, uint64_t{101});
  CHECK_EQ(status[1].tables.at(0).updates, uint64_t{101});
  CHECK(status[0].clients.empty() && status[1].clients.empty());
  server.close();
  CHECK(server.status().empty());
}

}  // namespace
