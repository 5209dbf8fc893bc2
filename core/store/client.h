// SPDX-License-Identifier: Apache-2.0
// A store's client on one worker: slicing, numbering, what must be sent again, clocks, the cache.
//
// A pure machine like the shard: calls and messages in, messages out.
//
//   call -> one message per part of the table, to the shard that holds its slot
//   message     waiting --next, sent--> out --answered--> done
//                  ^                     |
//                  +-- the link broke, or "later" and then "go"
//
// Invariants: 1. Messages about one part leave in the order of the calls, and each that changes
// something is numbered once, whatever happens to it on the way. 2. A table's clock counts the
// contributions made here; a pull carries it, and so sees them. 3. A pull may be answered from the
// cache while what it holds is guaranteed for a clock of at least mine - s. There is a cache where
// s > 0: at 0 it could only serve a pull that nothing has happened before.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/keys.h"
#include "store/message.h"
#include "store/planted.h"
#include "store/slot.h"

namespace commute {

class Client {
 public:
  struct Settings {
    uint32_t worker = 0;
    uint32_t incarnation = 1;
    uint32_t shards = 1;
    Planted planted = Planted::kNone;
    uint32_t slots = kSlots;   // of the whole store
    size_t message_bytes = 0;  // of rows and their keys; 0: as is quick. Tests cut them small
  };
  // What a call came to, besides being done.
  struct Outcome {
    Refused code{};  // 0: it was not refused
    uint64_t about = 0;
    std::string why;
    std::vector<std::byte> answers;  // of a question: of each part, in no order
  };
  using Owner = std::shared_ptr<const std::vector<std::byte>>;
  // With the names of its messages' lists, by first key and length, once a call needed them: the
  // push of a ticket names the same lists as its pull. Only calls touch them, one at a time.
  struct RowOrder : KeyOrder {
    bool is_own = false;  // its lists are not looked for among others: numbers do as names
    mutable std::map<std::pair<uint32_t, uint32_t>, Digest> names;
  };
  using Order = std::shared_ptr<const RowOrder>;

  explicit Client(Settings settings);

  // --- calls; each returns its number, to be asked about below ---

  // Asks the directory; then `table_of` knows the table, and `declare` makes its parts.
  // `instead_of`: a maker that is gone, or does not make it; unless another took over already.
  uint64_t declare_table(const std::string& name, const TableSpec& whole,
                         const std::string& declaration, int64_t instead_of = -1);
  const TableEntry* table_of(const std::string& name) const;
  // `first` is the table's first value: all of it, one element for all, or nothing for zeros.
  uint64_t declare(const std::string& name, const TableSpec& whole, Bytes first);

  // The gradient must stay where it is until the call is done; `owner` may keep it. What becomes of
  // a push that nobody asks about is told by `trouble`.
  uint64_t push(uint32_t table, Bytes gradient, Owner owner, bool piece, bool asked_about = true);
  uint64_t push_pull(uint32_t table, Bytes gradient, Owner owner, std::byte* out);
  // `fresh`: not from the cache. Returns 0 when `out` is there already.
  uint64_t pull(uint32_t table, std::byte* out, bool fresh = false);
  // Of a sparse table. `given` is as long as the keys were that the order was made of, and is
  // read before this returns; `out` is null, or as long, and written until the call is done. Where
  // the shards `remember` the lists of keys, the next call with this order needs to send none;
  // kLast: there will be none. `move` is called after each message, as what is queued can be on its
  // way meanwhile.
  enum class Remember : uint8_t { kNo = 0, kYes = 1, kLast = 2 };
  struct RowCall {
    Order order;
    const std::byte* given = nullptr;
    std::byte* out = nullptr;
    bool piece = false;
    Remember remember = Remember::kNo;
    bool asked_about = true;
  };
  Order order_of(std::span<const uint64_t> keys) const;
  // `come_again`: in other orders too, so that their lists are known by what is in them.
  Order distinct_of(std::span<const uint64_t> keys, uint32_t* index, bool come_again = false) const;
  uint64_t push_rows(uint32_t table, const RowCall& call, const std::function<void()>& move);
  uint64_t pull_rows(uint32_t table, const RowCall& call, const std::function<void()>& move);
  uint64_t drop_rows(uint32_t table, const RowCall& call);
  // There will be so many rows in all: shards make room for them at once. Only a wish.
  uint64_t reserve(uint32_t table, uint64_t rows);
  // What is saved, of one part: rows with their state, from this hash on, as many as fit an answer;
  // of a dense part its array number `from`. `out` has room for kPayloadMax bytes.
  uint64_t items(uint32_t table, uint32_t part, uint64_t from, std::byte* out);
  // The other way, after `reset`, which one member calls for all: no rows, and everybody's clock;
  // all call `begin_at`.
  uint64_t reset(uint32_t table, uint64_t clock);
  void begin_at(uint32_t table, uint64_t clock);
  uint64_t load(uint32_t table, uint32_t part, std::vector<std::byte> saved);
  // `expected`: how many rows the slot of the first key will have.
  uint64_t load_rows(uint32_t table, const RowCall& call, uint64_t expected);

  // `flags`: kStoreSummary or kStoreTop.
  uint64_t ask(uint32_t table, uint8_t flags, uint64_t k);
  uint64_t set(uint32_t table, const Update& update);
  uint64_t who(uint32_t table);
  // Of a store, by its name; after everything is flushed.
  uint64_t leave(const std::string& store);
  // An empty contribution, unless there was one since the last tick.
  void tick(uint32_t table);
  // Empty contributions up to this clock, for a worker that comes back into the middle of things.
  void catch_up(uint32_t table, uint64_t clock);

  // --- messages ---

  void on_message(int shard, const StoreHeader& header, Bytes payload);
  void on_link(int shard, bool up);
  // The next message for this shard, or nothing; `sent` takes it off.
  const StoreMessage* next(int shard);
  void sent(int shard);

  // --- questions ---

  bool done(uint64_t call) const { return !calls_.contains(call); }
  bool refused(uint64_t call) const { return outcomes_.contains(call); }
  // Of a call that is done; forgets it.
  Outcome outcome(uint64_t call);
  // What was refused of calls that nobody asks about, pushes and ticks: the first since the last
  // time this was asked.
  Outcome trouble(uint32_t table);
  // Whether the table's clock is more than s + 1 ahead of the slowest member that is known of.
  bool ahead(uint32_t table) const;
  bool flushed() const { return changes_ == 0; }  // all that changes something is committed
  bool idle() const;                              // nothing waits to be sent
  bool quiet() const { return calls_.empty(); }   // and nothing for an answer
  const TableSpec& spec(uint32_t table) const { return tables_.at(table).spec; }
  std::vector<int> shards_of(uint32_t table) const;  // of each part
  // Of each part: its slot, its first byte in the table, and how many.
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> parts_of(uint32_t table) const;
  uint64_t clock(uint32_t table) const { return tables_.at(table).clock; }
  // Whether there are pieces of a contribution that is not complete.
  bool building(uint32_t table) const { return tables_.at(table).building; }
  uint64_t cache_hits(uint32_t table) const { return tables_.at(table).cache_hits; }
  size_t kept_bytes() const { return kept_bytes_; }
  uint64_t sent_bytes() const { return sent_bytes_; }  // headers included; again, if sent again

 private:
  struct Part {
    uint32_t slot = 0;
    int shard = 0;
    uint64_t first = 0;  // byte
    uint64_t bytes = 0;
    bool held = false;        // something was put off
    uint64_t slowest = 0;     // known of
    uint64_t guaranteed = 0;  // the cache's
    uint64_t found = 0;       // the clock that the shard knew of
    uint64_t number = 0;      // of the last message that changed something
    std::set<Digest> known;   // lists of keys that the shard was asked to remember
  };
  struct Table {
    TableSpec spec;
    std::vector<Part> parts;
    uint64_t clock = 0;
    bool pushed = false;           // since the last tick
    bool building = false;         // there are pieces of the next contribution
    std::vector<std::byte> cache;  // the last whole answer
    uint64_t cache_hits = 0;
    Outcome trouble;
  };
  enum class State : uint8_t { kWaiting, kOut, kDone };
  struct Kept {  // a message that is not answered
    StoreHeader header;
    Bytes payload;
    Owner owner;  // null: the caller's array, or none
    uint64_t call = 0;
    uint32_t part = 0;
    State state = State::kWaiting;
    bool committed = false;  // a push that still waits for a value
    Order order = nullptr;   // of rows: which of them
    uint32_t first = 0;
    uint32_t rows = 0;
  };
  struct Line {  // to one shard
    std::deque<Kept> kept;
    uint64_t base = 1;  // the number, among all to this shard, of the first kept
    size_t looked = 0;  // nothing before this one can be sent
    size_t chosen = 0;  // by `next`
    bool up = true;
  };
  struct Call {
    size_t left = 0;  // answers to come
    std::byte* out = nullptr;
    bool asked_about = true;
    Outcome outcome;
  };

  uint64_t begin(size_t answers, std::byte* out = nullptr, bool asked_about = true);
  // One message per part; `payload` is the whole table's, or with `same` each part's.
  void send_parts(uint64_t call, uint32_t id, StoreHeader header, Bytes payload, Owner owner,
                  bool same = false);
  void send(int shard, Kept kept);
  uint64_t send_rows(uint32_t table, StoreHeader header, const RowCall& call,
                     const std::function<void()>& move);
  struct Payload {
    Owner owner;
    Bytes bytes;
  };
  Payload row_payload(Part& part, const TableSpec& spec, const RowCall& call, uint32_t first,
                      uint32_t rows);
  Digest name_of(const RowOrder& order, std::span<const uint64_t> keys);
  static KeysForm form_of(Part& part, const Digest& digest, Remember remember);
  std::shared_ptr<std::vector<std::byte>> buffer_of(size_t bytes) const;
  void send_keys(Line& line, size_t at);
  // Before a message about this part: its number, if it changes something, and what it comes after.
  void put_number(StoreHeader& header, uint64_t number, Part& part) const;
  void put_off(Line& line, size_t at);
  void go(const StoreHeader& header);
  void take_value(const Kept& kept, const StoreHeader& answer, Bytes payload, Call& call);
  static void take_rows(const Kept& kept, const TableSpec& spec, Bytes payload, std::byte* out);
  void take_declared(uint32_t id, Table& table);
  void take_refusal(const Kept& kept, const StoreHeader& answer, Bytes payload, Call& call);
  void finish(Line& line, Kept& kept);
  bool cached(const Table& table) const;
  bool may_go(const Kept& kept) const;

  const Settings settings_;
  std::map<std::string, TableEntry> directory_;
  std::map<uint32_t, Table> tables_;
  std::vector<Line> lines_;                   // by shard
  std::unordered_map<uint64_t, Call> calls_;  // under way
  std::map<uint64_t, Outcome> outcomes_;      // of calls that are done, where there is any
  // Payloads of rows that were answered, to be used again: memory that is new to the process costs
  // more than filling it.
  struct Used {
    std::vector<std::unique_ptr<std::vector<std::byte>>> buffers;
    size_t bytes = 0;
  };
  std::shared_ptr<Used> used_ = std::make_shared<Used>();
  StoreMessage next_;
  uint64_t last_call_ = 0;
  uint64_t last_number_ = 0;
  uint64_t last_list_ = 0;
  size_t kept_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
  size_t changes_ = 0;
};

}  // namespace commute
