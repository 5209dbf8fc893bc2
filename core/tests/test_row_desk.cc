// SPDX-License-Identifier: Apache-2.0
// A sparse table on one shard, by hand: messages that no client sends are refused, whatever they
// hold, and what comes after them is served; what is remembered is bounded.
#include "../store/row_desk.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "check.h"
#include "store/client.h"
#include "store/encoding.h"
#include "store/replay.h"
#include "store/shard.h"

using namespace commute;

namespace {

using Rng = std::mt19937_64;

struct Packet {
  StoreHeader header;
  std::vector<std::byte> payload;
};

// The client of worker 0 of 2 and the second of three shards; worker 1 only declares.
struct Hand {
  static constexpr uint32_t kWorkers = 2, kShards = 3, kSlots = 16;
  static constexpr int kShard = 1;

  explicit Hand(int32_t staleness, Dtype wire = Dtype::kFloat32, uint32_t width = 3)
      : shard({kWorkers, kShard, kShards, kSlots}, Replay::recorder(replay)),
        directory({kWorkers, 0, kShards, kSlots}) {
    spec.count = width;
    spec.staleness = staleness;
    spec.sparse = true;
    spec.wire = wire;
    spec.slots = kSlots;
    spec.update = {UpdateKind::kAdam, false, false, ReduceOp::kProd, 0.1, 0, 0.9, 0.9, 1e-8, 0, 0};
    spec.expire_after = 5;
    for (uint32_t worker = 0; worker < kWorkers; ++worker) {
      clients.emplace_back(Client::Settings{worker, 1, kShards, Planted::kNone, kSlots, 400});
      clients.back().declare_table("s/e", spec, "e");
      ask_directory(clients.back(), worker);
      clients.back().declare("s/e", spec, {});
      move(worker);
    }
  }

  void ask_directory(Client& client, uint32_t worker) {
    const StoreMessage* const message = client.next(0);
    directory.on_message(int(worker), message->header, message->payload);
    client.sent(0);
    const StoreMessage* const answer = directory.next(int(worker));
    client.on_message(0, answer->header, answer->payload);
    directory.sent(int(worker));
  }

  // Everything to and from the shard.
  void move(uint32_t worker) {
    Client& client = clients[worker];
    for (bool moved = true; std::exchange(moved, false);) {
      while (const StoreMessage* message = client.next(kShard)) {
        const Packet packet{message->header, {message->payload.begin(), message->payload.end()}};
        client.sent(kShard);
        shard.on_message(int(worker), packet.header, packet.payload);
        moved = true;
      }
      while (const StoreMessage* answer = shard.next(int(worker))) {
        client.on_message(kShard, answer->header, answer->payload);
        shard.sent(int(worker));
        moved = true;
      }
    }
  }

  // What the client of worker 0 would send next.
  Packet next() {
    const StoreMessage* const message = clients[0].next(kShard);
    CHECK(message != nullptr);
    Packet packet{message->header, {message->payload.begin(), message->payload.end()}};
    clients[0].sent(kShard);
    return packet;
  }

  // As if it came from worker 0; what is said to it is taken off.
  std::vector<StoreKind> give(const Packet& packet) {
    shard.on_message(0, packet.header, packet.payload);
    std::vector<StoreKind> said;
    while (const StoreMessage* answer = shard.next(0)) {
      said.push_back(answer->header.kind);
      shard.sent(0);
    }
    return said;
  }

  size_t rows() const {
    size_t count = 0;
    for (const auto& [number, slot] : shard.slots())
      if (const Slot::Part* part = slot.part(0)) count += part->rows->size();
    return count;
  }

  TableSpec spec;
  std::shared_ptr<Replay> replay = std::make_shared<Replay>();
  Shard shard;
  Shard directory;
  std::vector<Client> clients;
};

std::vector<uint64_t> some_keys(Rng& rng, size_t count) {
  std::vector<uint64_t> keys(count);
  for (uint64_t& key : keys) key = rng() % 100;
  return keys;
}

// A call of worker 0, of which it has sent nothing yet.
void call(Hand& hand, Rng& rng, std::vector<float>& memory) {
  Client& client = hand.clients[0];
  const auto keys = some_keys(rng, 1 + rng() % 40);
  memory.assign(keys.size() * hand.spec.count, 1.0f);
  auto* const rows = reinterpret_cast<std::byte*>(memory.data());
  const auto remember = Client::Remember(rng() % 3);
  const auto order = client.order_of(keys);
  switch (rng() % 6) {
    case 0:
      client.pull_rows(0, {order, nullptr, rows, false, remember, true}, [] {});
      break;
    case 1:
      client.drop_rows(0, {order, nullptr, nullptr, false, Client::Remember::kNo, true});
      break;
    case 2:
      client.ask(0, rng() % 2 == 0 ? kStoreSummary : kStoreTop, rng());
      break;
    case 3:
      client.set(0, hand.spec.update);
      break;
    default:
      client.push_rows(0, {order, rows, nullptr, rng() % 4 == 0, remember, true}, [] {});
  }
}

// Not of what a correct client counts on: numbers that are taken, and pieces.
void spoil(Packet& packet, Rng& rng) {
  static constexpr StoreKind kKinds[] = {
      StoreKind::kTable,  StoreKind::kDeclare, StoreKind::kPull, StoreKind::kWho,
      StoreKind::kPlaced, StoreKind::kReserve, StoreKind{12}};
  auto& bytes = packet.payload;
  switch (rng() % 7) {
    case 0:
      bytes.resize(rng() % (bytes.size() + 1));
      break;
    case 1:
      bytes.resize(bytes.size() + 1 + rng() % 40);
      break;
    case 2:
      packet.header.flags ^=
          rng() % 2 == 0 ? kStoreWants : kStoreAsks & static_cast<uint8_t>(rng());
      break;
    case 3:
      packet.header.version = rng();
      break;
    case 4:
      for (auto& byte : bytes) byte = static_cast<std::byte>(rng());
      break;
    case 5:  // the count, the form or the digest
      if (!bytes.empty()) bytes[rng() % std::min<size_t>(24, bytes.size())] ^= std::byte{0x5a};
      break;
    default:
      packet.header.kind = kKinds[rng() % std::size(kKinds)];
  }
}

TEST(garbage_is_refused_and_what_follows_is_served) {
  size_t refused = 0;
  for (const int32_t staleness : {-1, 0, 2}) {
    for (uint64_t seed = 0; seed < 150; ++seed) {
      Rng rng(seed);
      Hand hand(staleness, seed % 2 ? Dtype::kFloat16 : Dtype::kFloat32, seed % 3 ? 3 : 6);
      std::vector<float> memory;
      for (int turn = 0; turn < 30; ++turn) {
        call(hand, rng, memory);
        if (hand.clients[0].next(Hand::kShard) == nullptr) continue;
        Packet packet = hand.next();
        spoil(packet, rng);
        const auto said = hand.give(packet);
        refused += size_t(std::count(said.begin(), said.end(), StoreKind::kRefused));
        // The link breaks; everything is sent again as it should be.
        hand.clients[0].on_link(Hand::kShard, false);
        hand.shard.on_link_down(0);
        hand.clients[0].on_link(Hand::kShard, true);
        for (const uint32_t worker : {0u, 1u}) {
          if (worker == 1) hand.clients[1].tick(0);
          hand.move(worker);
        }
      }
      hand.replay->compare(hand.shard);
      CHECK(hand.replay->report().ends_with("equal"));
    }
  }
  CHECK(refused > 1000);
}

// A push of these keys as a client would send it, to be changed.
Packet push_of(Hand& hand, const std::vector<uint64_t>& keys,
               Client::Remember remember = Client::Remember::kNo) {
  static std::vector<float> rows;
  rows.assign(keys.size() * hand.spec.count, 1.0f);
  Client& client = hand.clients[0];
  client.push_rows(0,
                   {client.order_of(keys), reinterpret_cast<const std::byte*>(rows.data()), nullptr,
                    false, remember, true},
                   [] {});
  return hand.next();
}

// Two keys of the shard, and one of another.
std::vector<uint64_t> keys_here(size_t count, bool here = true) {
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < count; ++key)
    if ((slot_of(hash_of(key), Hand::kSlots) % Hand::kShards == Hand::kShard) == here)
      keys.push_back(key);
  return keys;
}

TEST(a_refused_push_takes_its_number) {
  Hand hand(-1);
  const auto keys = keys_here(2);
  Packet bad = push_of(hand, keys);
  const Packet good = push_of(hand, keys);
  bad.payload.pop_back();
  CHECK(hand.give(good) == (std::vector{StoreKind::kLater, StoreKind::kGo}));
  CHECK(hand.give(bad) == (std::vector{StoreKind::kRefused}));
  CHECK_EQ(hand.rows(), size_t{0});
  CHECK(hand.give(good) == (std::vector{StoreKind::kCommitted}));
  CHECK_EQ(hand.rows(), size_t{2});
  CHECK(hand.give(bad) == (std::vector{StoreKind::kRefused}));  // again, as it is sent again
  CHECK(hand.give(good) == (std::vector{StoreKind::kCommitted}));
}

TEST(keys_of_other_shards_are_refused) {
  Hand hand(-1);
  Packet bad = push_of(hand, keys_here(1));
  const uint64_t stranger = keys_here(1, false).front();
  std::memcpy(bad.payload.data() + sizeof(KeysHead), &stranger, sizeof stranger);
  CHECK(hand.give(bad) == (std::vector{StoreKind::kRefused}));
  CHECK_EQ(hand.rows(), size_t{0});
}

TEST(lists_are_known_by_their_digest) {
  Hand hand(-1);
  const auto keys = keys_here(4);
  const Packet first = push_of(hand, keys, Client::Remember::kYes),
               second = push_of(hand, keys, Client::Remember::kYes);
  CHECK(second.payload.size() + keys.size() * sizeof(uint64_t) == first.payload.size());
  CHECK(hand.give(second) == (std::vector{StoreKind::kUnknown}));
  CHECK(hand.give(first) == (std::vector{StoreKind::kCommitted}));
  Packet longer = second;
  longer.payload[0] ^= std::byte{1};  // the count
  CHECK(hand.give(second) == (std::vector{StoreKind::kCommitted}));
  CHECK(hand.give(longer) == (std::vector{StoreKind::kRefused}));
}

// Its digests are kept with an order; each must be of the message's own keys.
TEST(an_order_names_the_same_lists_again) {
  Hand hand(-1);
  Client& client = hand.clients[0];
  const auto order = client.order_of(keys_here(200));
  std::vector<float> memory(200 * hand.spec.count);
  const Client::RowCall call{
      order, nullptr, reinterpret_cast<std::byte*>(memory.data()), false, Client::Remember::kYes,
      true};
  client.pull_rows(0, call, [] {});
  std::vector<Digest> given;
  while (client.next(Hand::kShard) != nullptr) {
    const Packet packet = hand.next();
    Bytes keys(packet.payload);
    const auto head = take<KeysHead>(keys);
    std::vector<uint64_t> list(head.count);
    CHECK_EQ(keys.size(), list.size() * sizeof(uint64_t));
    std::memcpy(list.data(), keys.data(), keys.size());
    CHECK(head.form == KeysForm::kRemember);
    CHECK(head.digest == digest_of(list));
    given.push_back(head.digest);
  }
  CHECK(given.size() > 5);
  client.pull_rows(0, call, [] {});
  for (const Digest& digest : given) {
    const Packet packet = hand.next();
    Bytes rest(packet.payload);
    const auto head = take<KeysHead>(rest);
    CHECK(rest.empty());
    CHECK(head.form == KeysForm::kKnown);
    CHECK(head.digest == digest);
  }
}

// Of distinct keys lists are named by numbers: each order has its own, and each life of a worker,
// for a shard may still know lists of the life before.
TEST(an_order_of_distinct_keys_has_names_of_its_own) {
  Hand hand(-1);
  const auto keys = keys_here(4);
  std::vector<uint32_t> index(keys.size());
  std::vector<float> memory(keys.size() * hand.spec.count);
  const auto name_in = [&](Client& client, const Client::Order& order) {
    client.pull_rows(0,
                     {order, nullptr, reinterpret_cast<std::byte*>(memory.data()), false,
                      Client::Remember::kYes, true},
                     [] {});
    const StoreMessage* const message = client.next(Hand::kShard);
    CHECK(message != nullptr);
    Bytes payload = message->payload;
    const Digest name = take<KeysHead>(payload).digest;
    client.sent(Hand::kShard);
    return name;
  };
  Client& client = hand.clients[0];
  const auto first = client.distinct_of(keys, index.data());
  const auto second = client.distinct_of(keys, index.data());
  const Digest name = name_in(client, first);
  CHECK(name != name_in(client, second));
  CHECK(name == name_in(client, first));

  Client later(Client::Settings{0, 2, Hand::kShards, Planted::kNone, Hand::kSlots, 400});
  later.declare_table("s/e", hand.spec, "e");
  hand.ask_directory(later, 0);
  later.declare("s/e", hand.spec, {});
  while (later.next(Hand::kShard) != nullptr) later.sent(Hand::kShard);
  CHECK(name != name_in(later, later.distinct_of(keys, index.data())));
}

TEST(what_is_remembered_is_bounded) {
  Hand hand(-1);
  Slot& slot = const_cast<Slot&>(hand.shard.slots().begin()->second);
  RowDesk desk({&slot}, Hand::kShard, Hand::kSlots, 0, 3000);
  const auto keys = keys_here(2000);
  std::vector<uint64_t> mine;
  for (const uint64_t key : keys)
    if (slot_of(hash_of(key), Hand::kSlots) == Hand::kShard) mine.push_back(key);
  std::sort(mine.begin(), mine.end(),
            [](uint64_t a, uint64_t b) { return hash_of(a) < hash_of(b); });
  const auto known = [&](uint32_t worker, uint64_t name, size_t count, KeysForm form) {
    std::vector<std::byte> bytes;
    put(bytes, KeysHead{static_cast<uint32_t>(count), form, {name, 0}});
    if (!is_known(form)) put_bytes(bytes, mine.data(), count * sizeof(uint64_t));
    Bytes payload(bytes);
    return desk.keys_of(worker, payload) != nullptr;
  };
  for (uint64_t name = 0; name < 100; ++name) CHECK(known(0, name, 10, KeysForm::kRemember));
  std::set<uint64_t> left;
  for (uint64_t name = 0; name < 100; ++name)
    if (known(0, name, 10, KeysForm::kKnown)) left.insert(name);
  CHECK(left.size() >= 5 && left.size() <= 10);
  CHECK(*left.begin() == 100 - left.size());   // the newest
  CHECK(!known(1, 99, 10, KeysForm::kKnown));  // of another worker
  CHECK(known(0, 7, 100 < mine.size() ? 100 : mine.size(), KeysForm::kRemember));
  for (uint64_t name = 1000; name < 1100; ++name) CHECK(known(0, name, 0, KeysForm::kRemember));
  CHECK(!known(0, 1000, 0, KeysForm::kKnown));  // lists of nothing take room as well
}

size_t memory_of(const Hand& hand) {
  size_t bytes = 0;
  for (const auto& [number, slot] : hand.shard.slots())
    if (const Slot::Part* part = slot.part(0)) bytes += part->rows->memory();
  return bytes;
}

TEST(slots_that_are_full_grow_for_what_is_expected) {
  std::vector<uint64_t> keys(12'000);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> rows(keys.size() * 3, 1.0f);
  const auto push = [&](Hand& hand, size_t count) {
    Client& client = hand.clients[0];
    const auto order = client.order_of({keys.data(), count});
    client.push_rows(0, {order, reinterpret_cast<const std::byte*>(rows.data())}, [] {});
    hand.move(0);
    return memory_of(hand);
  };
  const auto reserve = [](Hand& hand, uint64_t rows) {
    hand.clients[0].reserve(0, rows);
    CHECK(hand.give(hand.next()) == (std::vector{StoreKind::kCommitted}));
  };
  Hand expecting(-1), plain(-1);
  const size_t before = push(expecting, 100);
  reserve(expecting, keys.size());
  CHECK(memory_of(expecting) == before);
  const size_t grown = push(expecting, 2'000);  // each slot was full once
  CHECK(grown > 4 * push(plain, 2'000));
  CHECK(push(expecting, keys.size()) == grown);
  CHECK(expecting.rows() > 3'000);  // those of a shard of three
  reserve(expecting, 10);           // never less
  CHECK(push(expecting, keys.size()) == grown);
}

// Rows of one slot only, as many as are pushed after a wish for more than there can be.
size_t memory_after_a_wish(size_t count, uint64_t memory) {
  Hand hand(-1);
  Slot& slot = const_cast<Slot&>(hand.shard.slots().begin()->second);
  RowDesk({&slot}, Hand::kShard, Hand::kSlots, 0).reserve(~uint64_t{0}, memory);
  CHECK(memory_of(hand) == 0);
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < count; ++key)
    if (slot_of(hash_of(key), Hand::kSlots) == Hand::kShard) keys.push_back(key);
  const std::vector<float> rows(keys.size() * hand.spec.count, 1.0f);
  Client& client = hand.clients[0];
  client.push_rows(0, {client.order_of(keys), reinterpret_cast<const std::byte*>(rows.data())},
                   [] {});
  hand.move(0);
  CHECK_EQ(hand.rows(), count);
  return memory_of(hand);
}

TEST(no_more_is_expected_than_there_is_memory_for) {
  const size_t taken = memory_after_a_wish(2'000, 1 << 20);
  CHECK(taken > 1 << 18);
  CHECK(taken < 1 << 20);
}

TEST(a_wrong_wish_takes_little) {
  CHECK(memory_after_a_wish(1, uint64_t{1} << 40) <= 1 << 16);
}

TEST(a_list_is_forgotten_after_its_last_use) {
  Hand hand(-1);
  const std::vector<uint64_t> keys = keys_here(2);
  const auto form_of_push = [&](Client::Remember remember) {
    const Packet packet = push_of(hand, keys, remember);
    Bytes payload(packet.payload);
    const auto head = take<KeysHead>(payload);
    CHECK(hand.give(packet) == (std::vector{StoreKind::kCommitted}));
    return head.form;
  };
  CHECK(form_of_push(Client::Remember::kLast) == KeysForm::kKeys);  // nobody was to know it
  CHECK(form_of_push(Client::Remember::kYes) == KeysForm::kRemember);
  CHECK(form_of_push(Client::Remember::kYes) == KeysForm::kKnown);
  CHECK(form_of_push(Client::Remember::kLast) == KeysForm::kLast);
  CHECK(form_of_push(Client::Remember::kYes) == KeysForm::kRemember);
}

}  // namespace
