// SPDX-License-Identifier: Apache-2.0
// The store's machines on a simulated network, under a seed: links deliver in order but at any
// time, break with what is on its way, and come back; workers die and come back as a new
// incarnation. Every run is checked:
//
//   exactly once   worker w adds 2^k to element w with its k-th push: a value tells which it holds
//   staleness      a pull at clock n holds all contributions up to n - s; with s = 0, exactly those
//   monotone       what a worker has read never goes back
//   own writes     a pull holds the caller's pushes (a cached one may lack the last s)
//   death          of a push that was under way when its worker died, a slot has all or nothing;
//   what
//                  was committed stays
//   replay         the recorded ops make the same slots again, byte for byte
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <random>
#include <set>
#include <utility>

#include "check.h"
#include "store/client.h"
#include "store/shard.h"

using namespace commute;

namespace {

struct Packet {
  StoreHeader header;
  std::vector<std::byte> payload;
};

// The first promise that was not kept is what a run ends with.
#define EXPECT(truth)             \
  if (!(truth) && broken.empty()) \
  broken = std::string(#truth) + " in line " + std::to_string(__LINE__)
#define EXPECT_EQ(a, b) EXPECT((a) == (b))

struct World {
  static constexpr uint32_t kTables = 2;

  World(uint64_t seed, uint32_t workers, int shards, int32_t staleness, bool breaking,
        Planted planted)
      : planted(planted),
        random(seed),
        workers(workers),
        shards(shards),
        staleness(staleness),
        breaking(breaking) {
    ops.resize(size_t(shards));
    for (int s = 0; s < shards; ++s)
      machines.push_back(std::make_unique<Shard>(
          workers,
          [this, s](int link, const StoreHeader& header, Bytes payload) {
            back[size_t(link)][size_t(s)].push_back({header, {payload.begin(), payload.end()}});
          },
          [this, s](uint32_t slot, const SlotOp& op) {
            ops[size_t(s)].emplace_back(slot, op.encode());
          },
          planted));
    forth.assign(workers, std::vector<std::deque<Packet>>(size_t(shards)));
    back = forth;
    up.assign(workers, std::vector<bool>(size_t(shards), true));
    for (uint32_t w = 0; w < workers; ++w) clients.push_back(born(w));
    pushed.assign(workers, std::vector<std::vector<uint64_t>>(kTables, {0}));
    read.assign(workers, std::vector<std::vector<int64_t>>(kTables, std::vector<int64_t>(count())));
    out = read;
    waiting.assign(workers, 0);
    steps.assign(workers, 0);
  }

  std::unique_ptr<Client> born(uint32_t w) {
    return std::make_unique<Client>(
        w, ++incarnations[w], shards,
        [this, w](int s, const StoreHeader& header, Bytes payload) {
          forth[w][size_t(s)].push_back({header, {payload.begin(), payload.end()}});
        },
        planted);
  }

  size_t count() const { return 2 * workers; }  // of a table: two parts

  void declare(uint32_t w) {
    const std::vector<int64_t> zeros(count());
    for (uint32_t table = 0; table < kTables; ++table) {
      TableSpec spec;
      spec.dtype = Dtype::kInt64;
      spec.staleness = staleness;
      spec.count = count();
      std::vector<Client::PartPlace> places;
      for (uint32_t part = 0; part < 2; ++part)
        places.push_back(
            {10 * table + part, int((table + part) % uint32_t(shards)), part * workers, workers});
      declaring[w].push_back(
          clients[w]->declare(table, spec, places, std::as_bytes(std::span(zeros))));
    }
  }

  // A worker dies, with all that is on its way to it and from it, and comes back at the beginning
  // of its next iteration.
  void die(uint32_t w) {
    for (int s = 0; s < shards; ++s) {
      break_link(w, s);
      up[w][size_t(s)] = true;
    }
    for (const auto& [call, push] : under_way[w])
      if (clients[w]->done(call)) committed[{w, push.first}] |= push.second;
    under_way[w].clear();
    clients[w] = born(w);
    died.insert(w);
    waiting[w] = 0;
    steps[w] = std::min(kSteps, (steps[w] / kPhases + 1) * kPhases);
    for (uint32_t table = 0; table < kTables; ++table) pushed_since_tick[{w, table}] = 0;
    declare(w);
  }

  bool declared(uint32_t w) {
    if (declaring[w].empty()) return true;
    std::erase_if(declaring[w], [&](uint64_t call) { return clients[w]->done(call); });
    if (!declaring[w].empty()) return false;
    // The iteration in which it died ends here, on all tables alike.
    uint64_t clock = 0;
    for (uint32_t table = 0; table < kTables; ++table)
      clock = std::max(clock, clients[w]->clock(table));
    for (uint32_t table = 0; table < kTables; ++table)
      if (clients[w]->clock(table) < clock) clients[w]->catch_up(table, clock);
    return true;
  }

  // Nothing but delivery until all is quiet.
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t w = 0; w < workers; ++w)
        for (int s = 0; s < shards; ++s) {
          restore(w, s);
          while (deliver(w, s)) moved = true;
        }
    }
  }

  bool deliver(uint32_t w, int s) {
    auto &there = forth[w][size_t(s)], &here = back[w][size_t(s)];
    const bool forwards = !there.empty() && (here.empty() || random() % 2);
    auto& queue = forwards ? there : here;
    if (queue.empty() || !up[w][size_t(s)]) return false;
    const Packet packet = std::move(queue.front());
    queue.pop_front();
    if (forwards)
      machines[size_t(s)]->on_message(int(w), packet.header, packet.payload);
    else
      clients[w]->on_message(s, packet.header, packet.payload);
    return true;
  }

  void break_link(uint32_t w, int s) {
    up[w][size_t(s)] = false;
    forth[w][size_t(s)].clear();
    back[w][size_t(s)].clear();
    clients[w]->on_link(s, false);
    machines[size_t(s)]->on_link_down(int(w));
  }

  void restore(uint32_t w, int s) {
    if (up[w][size_t(s)]) return;
    up[w][size_t(s)] = true;
    clients[w]->on_link(s, true);
  }

  // --- what a worker does ---

  // An iteration: for each table, in order, a contribution or none; a tick; some pulls. (Workers
  // that wait for each other in different orders would wait for ever, in any store.)
  void step(uint32_t w) {
    if (!declared(w) || (waiting[w] != 0 && !clients[w]->done(waiting[w]))) return;
    if (waiting[w] != 0) check_read(w);
    waiting[w] = 0;
    if (steps[w] == kSteps || clients[w]->kept_bytes() > 2000) return;
    const auto phase = uint32_t(steps[w]++ % kPhases);
    if (phase < kTables) {
      contribute(w, phase);
    } else if (phase == kTables) {
      for (uint32_t table = 0; table < kTables; ++table)
        if (std::exchange(pushed_since_tick[{w, table}], 0) == 0) made(w, table, 0);
      clients[w]->tick();
    } else if (random() % 2) {
      const uint32_t table = phase - kTables - 1;
      reading[w] = table;
      waiting[w] = clients[w]->pull(table, into(w, table), random() % 4 == 0);
      if (waiting[w] == 0) check_read(w);  // from the cache
    }
  }

  void contribute(uint32_t w, uint32_t table) {
    const auto kind = random() % (table == kTables - 1 ? 4 : 3);  // who waits owes nobody anything
    if (kind == 0) return;
    uint64_t bits = 0;
    if (kind == 1) bits |= push(w, table, true, false);  // a piece
    bits |= push(w, table, false, kind == 3);
    made(w, table, bits);
  }

  // Returns what it adds.
  uint64_t push(uint32_t w, uint32_t table, bool piece, bool pull) {
    const uint64_t bit = uint64_t{1} << pushes[{w, table}]++;
    std::vector<int64_t>& gradient = gradients[w];
    gradient.assign(count(), 0);
    for (uint32_t part = 0; part < 2; ++part) gradient[part * workers + w] = int64_t(bit);
    const Bytes bytes = std::as_bytes(std::span(gradient));
    const uint64_t call = pull ? clients[w]->push_pull(table, bytes, into(w, table))
                               : clients[w]->push(table, bytes, piece);
    under_way[w].push_back({call, {table, bit}});
    if (pull) {
      reading[w] = table;
      waiting[w] = call;
    }
    return bit;
  }

  std::byte* into(uint32_t w, uint32_t table) {
    return reinterpret_cast<std::byte*>(out[w][table].data());
  }

  void made(uint32_t w, uint32_t table, uint64_t bits) {
    pushed[w][table].push_back(pushed[w][table].back() | bits);
    pushed_since_tick[{w, table}] += bits != 0;
  }

  // The pushes in the first `clock` contributions of a worker that has lived all the time.
  uint64_t within(uint32_t v, uint32_t table, uint64_t clock) const {
    const auto& history = pushed[v][table];
    return history[std::min<uint64_t>(clock, history.size() - 1)];
  }

  static bool holds(uint64_t all, uint64_t some) { return (all & some) == some; }

  void check_read(uint32_t w) {
    const uint32_t table = reading[w];
    const uint64_t mine = clients[w]->clock(table);
    for (size_t i = 0; i < count(); ++i) {
      const auto v = uint32_t(i % workers);
      const auto got = uint64_t(out[w][table][i]);
      const uint64_t all = pushed[v][table].back();
      EXPECT(holds(got, uint64_t(read[w][table][i])));
      EXPECT(holds(all, got));
      read[w][table][i] = int64_t(got);
      if (died.contains(v)) continue;
      if (staleness < 0) {
        if (v == w) EXPECT_EQ(got, all);
        continue;
      }
      const uint64_t bound = mine - std::min<uint64_t>(mine, uint64_t(staleness));
      EXPECT(holds(got, within(v, table, bound)));
      // Who is further behind?
      if (!left.contains(v)) EXPECT(pushed[v][table].size() - 1 >= bound);
      if (staleness == 0) EXPECT_EQ(got, within(v, table, mine));
    }
  }

  bool finished() const {
    for (uint32_t w = 0; w < workers; ++w)
      if (steps[w] < kSteps || (waiting[w] != 0 && !clients[w]->done(waiting[w])) ||
          !clients[w]->flushed())
        return false;
    return true;
  }

  void run() {
    for (uint32_t w = 0; w < workers; ++w) declare(w);
    settle();
    for (int events = 0; !all_stopped() && broken.empty() && events < 100'000; ++events) {
      const auto w = uint32_t(random() % workers);
      const int s = int(random() % uint64_t(shards));
      const auto chance = random() % 1000;
      if (breaking && chance < 1 && deaths < kDeaths && !left.contains(w)) {
        ++deaths;
        die(w);
      } else if (breaking && chance < 10) {
        break_link(w, s);
      } else if (chance < 200) {
        restore(w, s);
        step(w);
      } else {
        deliver(w, s);
      }
    }
    finish();
    check_end();
  }

  // At staleness s a worker that has done all its steps would hold up the others: it leaves.
  bool all_stopped() {
    bool all = true;
    for (uint32_t w = 0; w < workers; ++w) {
      const bool idle =
          declared(w) && steps[w] == kSteps && (waiting[w] == 0 || clients[w]->done(waiting[w]));
      if (idle && !left.contains(w)) {
        if (waiting[w] != 0) check_read(w);
        waiting[w] = 0;
        left.insert(w);
        clients[w]->leave();
      }
      all &= idle;
    }
    return all;
  }

  void finish() {
    settle();
    EXPECT(all_stopped());
    settle();
    EXPECT(finished());
  }

  void check_end() {
    for (int s = 0; s < shards; ++s) {
      std::map<uint32_t, Slot> again;
      for (const auto& [slot, bytes] : ops[size_t(s)]) again[slot].apply(SlotOp::decode(bytes));
      for (const auto& [slot, state] : machines[size_t(s)]->slots()) {
        EXPECT(state.image() == again[slot].image());
        for (const auto& [table, part] : state.parts())
          for (uint32_t v = 0; v < workers; ++v) {
            uint64_t got;
            std::memcpy(&got, part.value.data() + v * sizeof got, sizeof got);
            EXPECT(holds(pushed[v][table].back(), got));
            EXPECT(holds(got, died.contains(v) ? committed[{v, table}] : pushed[v][table].back()));
          }
      }
      EXPECT_EQ(machines[size_t(s)]->held_bytes(), size_t{0});
    }
  }

  static constexpr int kPhases = 2 * kTables + 1;  // of an iteration
  static constexpr int kSteps = 12 * kPhases;
  static constexpr int kDeaths = 2;
  const Planted planted;
  std::string broken;
  std::mt19937_64 random;
  const uint32_t workers;
  const int shards;
  const int32_t staleness;
  const bool breaking;
  std::vector<std::unique_ptr<Shard>> machines;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<std::vector<std::deque<Packet>>> forth, back;  // by worker and shard
  std::vector<std::vector<bool>> up;
  std::vector<std::vector<std::pair<uint32_t, std::vector<std::byte>>>> ops;  // by shard
  std::vector<std::vector<std::vector<uint64_t>>> pushed;  // by worker, table, clock
  std::vector<std::vector<std::vector<int64_t>>> read, out;
  std::map<std::pair<uint32_t, uint32_t>, int> pushed_since_tick;
  std::map<uint32_t, std::vector<int64_t>> gradients;
  std::map<std::pair<uint32_t, uint32_t>, int> pushes;  // by worker and table
  // Pushes of this life: the call, and what it adds to which table.
  std::map<uint32_t, std::vector<std::pair<uint64_t, std::pair<uint32_t, uint64_t>>>> under_way;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> committed;  // when a worker died
  std::map<uint32_t, uint32_t> incarnations;
  std::map<uint32_t, std::vector<uint64_t>> declaring;  // calls
  std::set<uint32_t> died;
  int deaths = 0;
  std::map<uint32_t, uint32_t> reading;
  std::vector<uint64_t> waiting;
  std::vector<int> steps;
  std::set<uint32_t> left;
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
      {UpdateKind::kSgd, false, 0.1, 0.01, 0, 0, 0, 0, 0},
      {UpdateKind::kMomentum, false, 0.1, 0.01, 0.9, 0.1, 0, 0, 0},
      {UpdateKind::kMomentum, true, 0.1, 0, 0.9, 0, 0, 0, 0},
      {UpdateKind::kAdagrad, false, 0.1, 0.01, 0, 0, 1e-10, 0.05, 0.2},
      {UpdateKind::kAdam, false, 0.01, 0.01, 0.9, 0.999, 1e-8, 0, 0},
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

// --- one shard, by hand ---

struct Hand {
  explicit Hand(TableSpec of, uint32_t workers)
      : spec(of), shard(workers, [this](int, const StoreHeader& header, Bytes payload) {
          answers.push_back({header, {payload.begin(), payload.end()}});
        }) {
    spec.count = 1;
    const double first = 10;
    StoreHeader header;
    header.kind = StoreKind::kDeclare;
    shard.on_message(0, header, spec.encode(std::as_bytes(std::span(&first, 1))));
  }

  void push(uint32_t worker, double value, uint64_t clock, uint32_t incarnation = 0) {
    StoreHeader header;
    header.worker = worker;
    header.incarnation = incarnation;
    header.number = header.clock = clock;
    shard.on_message(int(worker), header, std::as_bytes(std::span(&value, 1)));
  }

  double value() const {
    double found;
    std::memcpy(&found, shard.slots().at(0).part(0)->value.data(), sizeof found);
    return found;
  }

  std::string refusal() const {
    const Packet& last = answers.back();
    if (last.header.kind != StoreKind::kRefused) return "";
    return {reinterpret_cast<const char*>(last.payload.data()), last.payload.size()};
  }

  TableSpec spec;
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
  }
}

TEST(deterministic_rounds_add_in_rank_order) {
  TableSpec spec = doubles(UpdateKind::kAssign);
  spec.update.kind = UpdateKind::kSum;
  spec.deterministic = true;
  Hand hand(spec, 3);
  hand.push(2, 1e16, 1);
  hand.push(1, -1e16, 1);
  hand.push(0, 0.25, 1);
  CHECK_EQ(hand.value(), 10 + ((0.25 + -1e16) + 1e16));
}

TEST(who_is_ahead_waits_and_who_is_lost_does_not_count) {
  Hand hand(doubles(UpdateKind::kSum), 2);
  hand.push(0, 1, 1);
  hand.push(0, 1, 2);  // two ahead: kept
  CHECK(hand.shard.held_bytes() > 0);
  CHECK_EQ(hand.value(), 10.0);
  hand.push(1, 5, 1);
  CHECK_EQ(hand.value(), 16.0);
  hand.shard.on_lost(1);
  CHECK_EQ(hand.value(), 17.0);
  CHECK_EQ(hand.shard.held_bytes(), size_t{0});
}

TEST(an_older_incarnation_is_refused) {
  Hand hand(doubles(UpdateKind::kSum), 1);
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
  const std::vector<std::byte> three(3);
  hand.shard.on_message(0, header, three);
  CHECK_EQ(hand.refusal(), "expected 8 bytes, got 3");
  header.table = 9;
  hand.shard.on_message(0, header, three);
  CHECK_EQ(hand.refusal(), "the table is not declared");
  header.table = 0;
  header.worker = 7;
  hand.shard.on_message(0, header, three);
  CHECK_EQ(hand.refusal(), "there is no such worker");
  header.worker = 0;
  header.kind = StoreKind::kDeclare;
  const double first = 0;
  TableSpec other = doubles(UpdateKind::kSgd);
  other.count = 1;
  hand.shard.on_message(0, header, other.encode(std::as_bytes(std::span(&first, 1))));
  CHECK_EQ(hand.refusal(),
           "declared as 1 float64 with sum, staleness 0, and as 1 float64 with SGD(lr=1), "
           "staleness 0");
  hand.shard.on_message(0, header, three);
  CHECK(!hand.refusal().empty());
  CHECK_EQ(hand.value(), 10.0);
}

// --- simulated ---

constexpr uint64_t kSeeds = 200;

std::string first_broken(uint64_t seed, Planted planted) {
  const int32_t staleness[] = {0, 0, 1, 3, -1};
  World world(seed, 1 + uint32_t(seed % 4), 1 + int(seed % 3), staleness[seed % 5], seed % 2,
              planted);
  try {
    world.run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return world.broken;
}

TEST(simulated_stores_keep_their_promises) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string broken = first_broken(seed, Planted::kNone);
    if (!broken.empty()) check::fail("seed", int(seed), broken);
  }
}

TEST(planted_bugs_are_found) {
  for (int bug = int(Planted::kNoDeduplication); bug <= int(Planted::kHalfSlot); ++bug) {
    uint64_t seed = 0;
    while (seed < kSeeds && first_broken(seed, Planted(bug)).empty()) ++seed;
    std::printf("planted bug %d: found by seed %llu\n", bug, static_cast<unsigned long long>(seed));
    CHECK(seed < kSeeds);
  }
}

}  // namespace
