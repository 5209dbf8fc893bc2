// SPDX-License-Identifier: Apache-2.0
// The store's machines by hand: updates, one shard, slots in the directory, and messages that no
// client sends. Whole stores under a seed are simulated in Python, with the same machines
// (src/commute/testing/simulate.py); processes and threads are in test_store_threads.cc.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "check.h"
#include "store/encoding.h"
#include "store/query.h"
#include "store/replay.h"
#include "store/shard.h"

using namespace commute;

namespace {

struct Packet {
  StoreHeader header;
  std::vector<std::byte> payload;
};

// --- updates ---

// Some steps of an update on one number, by the formulas of update.h in double.
double stepped(const Update& update, const std::vector<double>& gradients) {
  double x = 0.5, a = initial_state(update), b = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto step = double(i + 1);
    const double g = gradients[i] + update.weight_decay * x;
    if (update.kind == UpdateKind::kSgd) x -= update.lr * g;
    if (update.kind == UpdateKind::kMomentum) {
      a = i == 0 ? g : update.momentum * a + (1 - update.dampening) * g;
      x -= update.lr * (update.nesterov ? g + update.momentum * a : a);
    }
    if (update.kind == UpdateKind::kAdagrad) {
      a += g * g;
      x -= update.lr / (1 + (step - 1) * update.lr_decay) * g / (std::sqrt(a) + update.eps);
    }
    if (update.kind == UpdateKind::kAdam) {
      a = update.momentum * a + (1 - update.momentum) * g;
      b = update.dampening * b + (1 - update.dampening) * g * g;
      x -= update.lr / (1 - std::pow(update.momentum, step)) * a /
           (std::sqrt(b) / std::sqrt(1 - std::pow(update.dampening, step)) + update.eps);
    }
    if (update.kind == UpdateKind::kFtrl) {
      a += g - (std::sqrt(b + g * g) - std::sqrt(b)) / update.lr * x;
      b += g * g;
      const double beyond = std::max(std::abs(a) - update.momentum, 0.0);
      const double steep = (update.eps + std::sqrt(b)) / update.lr + update.dampening;
      x = (a > 0 ? -beyond : beyond) / steep;
    }
  }
  return x;
}

template <class T>
double updated(const Update& update, Dtype dtype, const std::vector<double>& gradients) {
  std::vector<T> value(7, T(0.5)), one(7, T(initial_state(update))), two(7);
  void* states[] = {one.data(), two.data()};
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::vector<T> gradient(7, T(gradients[i]));
    apply_update(update, dtype, value.data(), states, gradient.data(), 7, i + 1);
  }
  CHECK(value.front() == value.back());
  return double(value[3]);
}

TEST(updates_follow_their_formulas) {
  const Update updates[] = {
      {UpdateKind::kSgd, false, false, ReduceOp::kProd, 0.1, 0.01, 0, 0, 0, 0, 0},
      {UpdateKind::kMomentum, false, false, ReduceOp::kProd, 0.1, 0.01, 0.9, 0.1, 0, 0, 0},
      {UpdateKind::kMomentum, true, false, ReduceOp::kProd, 0.1, 0, 0.9, 0, 0, 0, 0},
      {UpdateKind::kAdagrad, false, false, ReduceOp::kProd, 0.1, 0.01, 0, 0, 1e-10, 0.05, 0.2},
      {UpdateKind::kAdam, false, false, ReduceOp::kProd, 0.01, 0.01, 0.9, 0.999, 1e-8, 0, 0},
      {UpdateKind::kFtrl, false, false, ReduceOp::kProd, 0.1, 0, 0.2, 0.3, 1, 0, 0},
  };
  const std::vector<double> gradients = {0.3, -0.7, 0.2, 1.5, -0.1};
  for (const Update& update : updates) {
    const double expected = stepped(update, gradients);
    CHECK(std::abs(updated<double>(update, Dtype::kFloat64, gradients) - expected) < 1e-12);
    CHECK(std::abs(updated<float>(update, Dtype::kFloat32, gradients) - expected) < 1e-5);
    CHECK(Update::decode(update.encode()) == update);
    CHECK(!update.takes(Dtype::kInt32) && !update.takes(Dtype::kFloat16));
  }
}

TEST(numbers_are_written_as_short_as_they_read_back) {
  CHECK_EQ(shortest(0.1), "0.1");
  CHECK_EQ(shortest(1), "1");
  CHECK_EQ(shortest(-1e-8), "-1e-08");
  CHECK_EQ(shortest(0.1 + 0.2), "0.30000000000000004");
  const Update ftrl{UpdateKind::kFtrl, false, false, ReduceOp::kProd, 0.1, 0, 0, 0, 1, 0, 0};
  CHECK_EQ(ftrl.describe(), "FTRL(lr=0.1, beta=1, l1=0, l2=0)");
  CHECK_EQ(ftrl.states(), size_t{2});
}

// --- one shard, by hand ---

struct Hand {
  explicit Hand(TableSpec of, uint32_t workers)
      : spec(of), shard({workers, 0, 1, 16, Planted::kNone}, Replay::recorder(replay)) {
    spec.count = 1;
    for (uint32_t worker = 0; worker < workers; ++worker) declare(worker, 0);
  }

  void declare(uint32_t worker, uint32_t incarnation) {
    const double first = 10;
    StoreHeader header;
    header.kind = StoreKind::kDeclare;
    header.flags = kStoreMaker;
    header.worker = worker;
    header.incarnation = incarnation;
    std::vector<std::byte> payload = spec.encode();
    put(payload, first);
    give(header, payload);
  }

  void give(const StoreHeader& header, Bytes payload) {
    const int link = int(header.worker);
    shard.on_message(link, header, payload);
    for (int other = 0; other < 8; ++other)
      while (const StoreMessage* answer = shard.next(other)) {
        answers.push_back({answer->header, {answer->payload.begin(), answer->payload.end()}});
        shard.sent(other);
      }
  }

  void push(uint32_t worker, double value, uint64_t clock, uint32_t incarnation = 0) {
    StoreHeader header;
    header.worker = worker;
    header.incarnation = incarnation;
    header.number = header.clock = clock;
    header.slowest = clock - 1;
    give(header, std::as_bytes(std::span(&value, 1)));
  }

  double value() const {
    double found;
    std::memcpy(&found, shard.slots().at(0).part(0)->value.data(), sizeof found);
    return found;
  }

  StoreKind answer() const { return answers.back().header.kind; }

  std::string refusal() const {
    const Packet& last = answers.back();
    if (last.header.kind != StoreKind::kRefused) return "";
    return {reinterpret_cast<const char*>(last.payload.data()), last.payload.size()};
  }

  TableSpec spec;
  std::shared_ptr<Replay> replay = std::make_shared<Replay>();
  std::vector<Packet> answers;
  Shard shard;
};

TableSpec doubles(UpdateKind kind) {
  TableSpec spec;
  spec.dtype = Dtype::kFloat64;
  spec.update.kind = kind;
  spec.update.lr = 1;
  return spec;
}

TEST(a_round_is_combined_as_its_update_says) {
  TableSpec mean = doubles(UpdateKind::kSgd);
  mean.mean = true;
  const std::pair<TableSpec, double> cases[] = {{doubles(UpdateKind::kSum), 10 + 1 + 2 + 6},
                                                {doubles(UpdateKind::kAssign), 6},
                                                {doubles(UpdateKind::kMin), 1},
                                                {doubles(UpdateKind::kMax), 10},
                                                {doubles(UpdateKind::kProd), 10 * 1 * 2 * 6},
                                                {doubles(UpdateKind::kSgd), 10 - 9},
                                                {mean, 10 - 3}};
  for (const auto& [spec, expected] : cases) {
    Hand hand(spec, 3);
    hand.push(2, 6, 1);
    hand.push(0, 1, 1);
    CHECK_EQ(hand.value(), 10.0);  // not before all are there
    hand.push(1, 2, 1);
    CHECK_EQ(hand.value(), expected);
    hand.replay->compare(hand.shard);
    CHECK(hand.replay->report().ends_with("equal"));
  }
}

TEST(deterministic_rounds_add_in_rank_order) {
  TableSpec spec = doubles(UpdateKind::kSum);
  spec.deterministic = true;
  Hand hand(spec, 3);
  hand.push(2, 1e16, 1);
  hand.push(1, -1e16, 1);
  hand.push(0, 0.25, 1);
  CHECK_EQ(hand.value(), 10 + ((0.25 + -1e16) + 1e16));
}

TEST(who_is_ahead_is_put_off_and_told_when_to_come) {
  Hand hand(doubles(UpdateKind::kSum), 2);
  hand.push(0, 1, 1);
  CHECK(hand.answer() == StoreKind::kCommitted);
  hand.push(0, 1, 2);  // two ahead
  CHECK(hand.answer() == StoreKind::kLater);
  hand.push(1, 5, 1);
  CHECK_EQ(hand.value(), 16.0);
  bool told = false;
  for (const Packet& packet : hand.answers) told |= packet.header.kind == StoreKind::kGo;
  CHECK(told);
  hand.push(0, 1, 2);
  CHECK(hand.answer() == StoreKind::kCommitted);
}

TEST(a_message_waits_for_what_it_comes_after) {
  TableSpec spec = doubles(UpdateKind::kSum);
  spec.staleness = -1;
  Hand hand(spec, 1);
  StoreHeader tick;
  tick.kind = StoreKind::kTick;
  tick.number = tick.clock = 2;
  tick.slowest = 1;  // after a push that has not come
  hand.give(tick, {});
  CHECK(hand.answers[hand.answers.size() - 2].header.kind == StoreKind::kLater);
  CHECK(hand.answer() == StoreKind::kGo);
  hand.push(0, 3, 1);
  hand.give(tick, {});
  CHECK(hand.answer() == StoreKind::kCommitted);
  CHECK_EQ(hand.value(), 13.0);
}

TEST(who_is_lost_does_not_count_where_the_table_goes_on) {
  for (const bool continues : {true, false}) {
    TableSpec spec = doubles(UpdateKind::kSum);
    spec.continues = continues;
    Hand hand(spec, 2);
    hand.push(0, 1, 1);
    hand.shard.on_lost(1);
    CHECK_EQ(hand.value(), continues ? 11.0 : 10.0);
    hand.push(0, 1, 2);
    CHECK_EQ(hand.refusal(), continues ? "" : "rank 1 was lost");
  }
}

TEST(a_value_that_waits_to_be_sent_is_that_of_its_round) {
  Hand hand(doubles(UpdateKind::kSum), 1);
  StoreHeader header;
  header.number = header.clock = 1;
  header.flags = kStoreWants;
  const double one = 1;
  hand.shard.on_message(0, header, std::as_bytes(std::span(&one, 1)));
  header.number = header.clock = 2;
  header.slowest = 1;
  hand.shard.on_message(0, header, std::as_bytes(std::span(&one, 1)));
  for (const double expected : {11.0, 12.0}) {
    double got;
    std::memcpy(&got, hand.shard.next(0)->payload.data(), sizeof got);
    CHECK_EQ(got, expected);
    hand.shard.sent(0);
  }
  CHECK(hand.shard.next(0) == nullptr);
}

TEST(a_client_that_does_not_read_is_not_read_from) {
  TableSpec spec;
  spec.staleness = -1;
  spec.count = kPartBytesMax / sizeof(float);
  Shard shard({1, 0, 1, 16, Planted::kNone});
  StoreHeader header;
  header.kind = StoreKind::kDeclare;
  header.flags = kStoreMaker;
  shard.on_message(0, header, spec.encode());
  header.kind = StoreKind::kPull;
  header.flags = 0;
  size_t pulls = 0;
  for (; shard.wants(0) && pulls < 1000; ++pulls) shard.on_message(0, header, {});
  CHECK_EQ(pulls, Shard::kOwedMax / kPartBytesMax + 1);
  while (shard.next(0) != nullptr) shard.sent(0);
  CHECK(shard.wants(0));
}

TEST(an_older_incarnation_is_refused) {
  Hand hand(doubles(UpdateKind::kSum), 1);
  hand.declare(0, 2);
  hand.push(0, 1, 1, 2);
  hand.push(0, 1, 1, 2);  // the same push again
  CHECK_EQ(hand.value(), 11.0);
  hand.push(0, 1, 2, 1);
  CHECK(hand.refusal().find("newer incarnation") != std::string::npos);
  CHECK_EQ(hand.value(), 11.0);
}

TEST(bad_messages_change_nothing) {
  Hand hand(doubles(UpdateKind::kSum), 1);
  StoreHeader header;
  header.number = header.clock = 1;
  const std::vector<std::byte> three(3);
  hand.give(header, three);
  CHECK_EQ(hand.refusal(), "expected 8 bytes, got 3");
  header.table = 9;
  hand.give(header, three);
  CHECK_EQ(hand.refusal(), "the table is not declared");
  header.table = 0;
  header.worker = 7;
  hand.give(header, three);
  CHECK_EQ(hand.refusal(), "no correct client sends this");
  header.worker = 0;
  header.kind = StoreKind::kTable;
  hand.give(header, three);
  CHECK_EQ(hand.refusal(), "it ends too early");
  CHECK_EQ(hand.value(), 10.0);
}

// Whatever comes, the shard answers or ignores it, and its slots are what their ops make.
TEST(random_messages_do_no_harm) {
  std::mt19937_64 random(7);
  for (int run = 0; run < 300; ++run) {
    Hand hand(doubles(UpdateKind(run % kUpdateKinds)), 3);
    for (int i = 0; i < 60; ++i) {
      StoreHeader header;
      header.kind = StoreKind(random() % 9);
      header.flags = uint8_t(random() % 32);
      header.worker = uint32_t(random() % 4);
      header.slot = uint32_t(random() % 3);
      header.table = uint32_t(random() % 2);
      header.incarnation = uint32_t(random() % 2);
      header.number = random() % 8;
      header.clock = random() % 8;
      header.slowest = random() % 8;
      header.version = random() % 8;
      std::vector<std::byte> payload(random() % 4 ? 8 : random() % 200);
      for (std::byte& byte : payload) byte = std::byte(random());
      if (random() % 4 == 0) {
        TableSpec spec = doubles(UpdateKind::kSum);
        spec.count = random() % 3;
        payload = spec.encode();
      }
      hand.give(header, payload);
      if (random() % 20 == 0) hand.shard.on_link_down(int(random() % 3));
      if (random() % 60 == 0) hand.shard.on_lost(uint32_t(random() % 3));
    }
    hand.replay->compare(hand.shard);
    CHECK(hand.replay->report().ends_with("equal"));
  }
}

// --- the directory ---

TEST(chunks_are_spread_over_slots_and_shards) {
  CHECK_EQ(chunk_bytes_for(0, 1024), uint64_t{kChunkBytes});
  CHECK_EQ(chunk_bytes_for(1 << 30, 1024), uint64_t{1 << 20});
  CHECK_EQ(chunk_bytes_for((uint64_t{1} << 30) + 1, 1024), uint64_t{0});
  CHECK_EQ(chunks_of(0, kChunkBytes), uint64_t{1});
  std::map<std::string, TableEntry> tables;
  std::vector<uint64_t> shards(4);
  for (int i = 0; i < 8; ++i) {
    TableEntry entry;
    entry.name = std::to_string(i);
    entry.bytes = uint64_t(i) * 100'000;
    entry.chunk_bytes = kChunkBytes;
    entry.slots = place(tables, entry.bytes, entry.chunk_bytes, 64, 4);
    CHECK_EQ(entry.slots.size(), size_t(chunks_of(entry.bytes, entry.chunk_bytes)));
    for (size_t chunk = 0; chunk < entry.slots.size(); ++chunk)
      shards[entry.slots[chunk] % 4] +=
          std::min<uint64_t>(kChunkBytes, entry.bytes - chunk * kChunkBytes);
    CHECK(TableEntry::decode(entry.encode()).slots == entry.slots);
    tables[entry.name] = entry;
  }
  const auto [least, most] = std::minmax_element(shards.begin(), shards.end());
  CHECK(*most - *least <= 2 * kChunkBytes);
}

// --- questions ---

TEST(questions_about_a_part) {
  const float x[] = {1, -3, 0, 2, NAN};
  const Summary four = summarize(Dtype::kFloat32, x, 4);
  CHECK_EQ(four.sum, 0.0);
  CHECK_EQ(four.squares, 14.0);
  CHECK_EQ(four.nonzero, uint64_t{3});
  const auto best = top(Dtype::kFloat32, x, 5, 2);
  CHECK_EQ(best.size(), size_t{2});
  CHECK_EQ(best[0].index, uint64_t{1});
  CHECK_EQ(best[1].value, 2.0);
  CHECK(has_nan(Dtype::kFloat32, x, 5) && !has_nan(Dtype::kFloat32, x, 4));
  const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7e00};  // 1, -2, the smallest, NaN
  CHECK_EQ(summarize(Dtype::kFloat16, halves, 2).sum, -1.0);
  CHECK_EQ(summarize(Dtype::kFloat16, halves + 2, 1).sum, std::ldexp(1.0, -24));
  CHECK(has_nan(Dtype::kFloat16, halves, 4));
  const uint64_t large[] = {~uint64_t{0}, 3};
  CHECK_EQ(summarize(Dtype::kUint64, large, 2).whole, int64_t{2});
}

}  // namespace
