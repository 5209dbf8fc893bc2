// SPDX-License-Identifier: Apache-2.0
// A shard: some slots of a store, and the rules by which contributions become values.
//
// A pure machine: messages and news of members in, messages out; no socket, no clock, no thread.
// One thread at a time owns it from receive through sum, update and reply.
//
//   push --its turn, and not too far ahead?--> contribution or piece --whole?--> round or value
//            | no: answered "later", kept by the client, "go" when it may come again
//
// A part is what is answered for as one: of a dense table a chunk in one slot, of a sparse one all
// its rows on this shard (row_desk.h). Per part, with staleness s:
//   clock(w)   contributions of worker w that have been received, empty ones included
//   slowest    the smallest clock of the members; who has left or is lost does not count
//   1. A worker's messages are taken in the order of its calls: each names the number of what it
//      comes after. A push that makes clock n is taken when n <= slowest + s + 1. What is not taken
//      holds no memory here. Ticks are taken however far ahead.
//   2. s = 0: round n is the n-th contribution of every member. It is applied, once, when all are
//      there; by rule 1 at most one round has data. Otherwise a contribution is applied when it
//      is taken.
//   3. A pull at clock n is answered when slowest >= n - s, and with unbounded staleness at once.
//   4. A push is known by (worker, incarnation, number): one that was received already is answered
//      and not counted again. An older incarnation is refused.
//   5. A member that is lost does not count any more where the table goes on (`continues`);
//      elsewhere everybody who waits, or comes later, is told.
//   6. An observer is no member: nobody waits for it, and it never waits. It may change tables with
//      unbounded staleness only; its pulls are answered at once. Rule 4 holds for it as long as it
//      is connected; after that nothing of it is kept.
//
// Answers wait in a queue per link. A value is not copied into it: what is sent is the part as it
// is then, which with s > 0 may be newer, and with s = 0 is copied just before the next round
// changes it. A client that owes reading more than kOwedMax is not read from.
//
// Memory: per open round one accumulator (deterministic, and `assign`: one per worker), per worker
// that builds a contribution of several pieces one more, and kOwedMax per link.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/contribution.h"
#include "store/message.h"
#include "store/planted.h"
#include "store/row_desk.h"
#include "store/slot.h"

namespace commute {

class Shard {
 public:
  static constexpr size_t kOwedMax = 64 << 20;

  struct Settings {
    uint32_t workers = 1;  // members are 0 to workers - 1, observers above
    uint32_t index = 0;    // of `shards`; the first keeps the directory
    uint32_t shards = 1;
    uint32_t slots = kSlots;  // of the whole store
    Planted planted = Planted::kNone;
    size_t remembered_max = RowDesk::kRememberedMax;  // bytes of lists of keys, per worker
  };
  // Told of every op before it is applied.
  using Record = std::function<void(uint32_t slot, const SlotOp& op)>;

  explicit Shard(Settings settings, Record record = {});
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  void on_message(int link, const StoreHeader& header, Bytes payload);
  void on_link_down(int link);    // nobody waits on it for an answer any more
  void on_lost(uint32_t worker);  // by the coordinator's word; what arrived whole stays
  void on_left(uint32_t worker);  // it has ended in peace
  // An observer is heard from here on, and not any more.
  void on_came(uint32_t observer) { present_.insert(observer); }
  void on_gone(uint32_t observer);

  // The next answer for this link, or nothing; `sent` takes it off the queue.
  const StoreMessage* next(int link);
  void sent(int link);
  // Whether this link should be read from.
  bool wants(int link) const;

  const Settings& settings() const { return settings_; }
  const std::map<uint32_t, Slot>& slots() const { return slots_; }
  uint64_t pushes() const { return pushes_; }  // taken

 private:
  struct Out {  // an answer
    StoreHeader header;
    std::vector<std::byte> bytes;
    const Slot::Part* part = nullptr;  // instead of bytes: its value
  };
  struct Waiting {  // a pull, or a declaration
    int link;
    StoreHeader header;
    std::shared_ptr<KeyList> list = nullptr;  // of a sparse table's pull
  };
  struct Change {
    std::vector<std::byte> bytes;   // new numbers of the update
    std::shared_ptr<KeyList> list;  // rows to drop
  };
  struct Setting {
    uint64_t after = 0;  // this round
    OpKind kind = OpKind::kSet;
    Author author;
    Change with;
  };
  struct Standing {  // of one worker in one part
    uint64_t clock = 0;
    uint32_t incarnation = 0;
    uint64_t number = 0;  // the last received
    bool declared = false;
    bool gone = false;      // left or lost, with this clock
    bool in_round = false;  // it has pushed in the open round
    int eager = -1;         // the link that was told "later"
    Pile pieces;
    Pile data;  // in the open round, where the order matters
  };
  // What a part has beside the slot's state.
  struct Desk {
    uint64_t store = 0;
    uint32_t slot = 0;
    uint32_t table = 0;
    Slot::Part* part = nullptr;     // of a sparse table the first
    std::unique_ptr<RowDesk> rows;  // of a sparse table
    std::vector<Standing> workers;
    std::unordered_map<uint32_t, Standing> observers;
    Pile sum;             // of the open round, where order is no matter
    Contribution only;    // while the round of a single contribution is closed: that contribution
    uint64_t closed = 0;  // rounds
    std::deque<Setting> settings;
    std::deque<Waiting> pulls;
    size_t owed = 0;  // answers in queues that will be this part's value
    int lost = -1;    // a member, where the table does not go on

    const TableSpec& spec() const { return part->spec; }
    Standing& of(uint32_t worker) {
      return worker < workers.size() ? workers[worker] : observers[worker];
    }
  };
  using Key = uint64_t;  // slot and table
  static Key key_of(const StoreHeader& header) {
    return uint64_t{header.slot} << 32 | header.table;
  }

  void declare_table(int link, const StoreHeader& header, Bytes payload);
  TableEntry new_entry(const StoreHeader& header, Bytes payload) const;
  void declare(int link, const StoreHeader& header, Bytes payload);
  void create(const StoreHeader& header, Bytes payload);
  void welcome(int link, const StoreHeader& header, Desk& desk);
  void push(int link, const StoreHeader& header, const Contribution& given,
            std::shared_ptr<KeyList> list, Desk& desk);
  void take(const StoreHeader& header, const Contribution& given, Desk& desk, Standing& standing);
  void complete(const Author& author, Desk& desk, Standing& standing);
  void push_rows(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void tick(int link, const StoreHeader& header, Desk& desk);
  void pull(int link, const StoreHeader& header, std::shared_ptr<KeyList> list, Desk& desk);
  void pull_rows(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void set(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void change(int link, const StoreHeader& header, OpKind kind, Change with, Desk& desk);
  void leave(int link, const StoreHeader& header);
  void reset(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void load(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void reserve(int link, const StoreHeader& header, Desk& desk);
  void drop(int link, const StoreHeader& header, Bytes payload, Desk& desk);
  void who(int link, const StoreHeader& header, const Desk& desk);

  bool observes(uint32_t worker) const { return worker >= settings_.workers; }
  std::string name_of(uint64_t worker) const;
  bool is_news(const StoreHeader& header, Standing& standing) const;
  // Whether what it comes after has been taken.
  bool its_turn(const StoreHeader& header, const Standing& standing) const;
  void put_off(int link, const StoreHeader& header, Desk& desk);
  void refuse_change(int link, const StoreHeader& header, const std::string& why, Desk& desk);
  // `counts`: it is the last of its contribution, and moves the author's clock.
  void contribute(const Author& author, const Contribution& given, bool counts, Desk& desk);
  void progress(Desk& desk);  // closes rounds, changes settings, answers
  bool close_round(Desk& desk);
  Contribution combined(Desk& desk) const;
  bool change_settings(Desk& desk);
  void answer_pulls(Desk& desk);
  std::vector<std::byte> told(const Waiting& pull, const Desk& desk) const;
  void say_go(Desk& desk);
  void keep_owed(Desk& desk);
  void apply(Desk& desk, const SlotOp& op);
  void apply_rows(Desk& desk, const SlotOp& op);
  Slot& slot(uint32_t number);
  void gone(Desk& desk, uint32_t worker);

  uint64_t slowest(const Desk& desk) const;
  uint64_t bound(const Desk& desk) const;  // the largest clock that may be reached now
  StoreHeader answer(const StoreHeader& to, StoreKind kind, const Desk& desk) const;
  void queue(int link, StoreHeader header, std::vector<std::byte> bytes = {},
             Desk* value_of = nullptr);
  void owes(int link, const std::shared_ptr<KeyList>& list, bool more);
  void refuse(int link, const StoreHeader& to, Refused code, const std::string& why,
              uint64_t about = 0);
  void refuse_lost(int link, const StoreHeader& to, const Desk& desk);
  void refuse_unmade(int link, const StoreHeader& to);

  const Settings settings_;
  Record record_;
  std::shared_ptr<Pages> pages_ = std::make_shared<Pages>();
  std::map<uint32_t, Slot> slots_;
  std::unordered_map<Key, Desk> desks_;
  std::map<Key, std::vector<Waiting>> not_yet_;  // declarations of parts that their maker has not
                                                 // made yet
  std::map<uint32_t, uint32_t> incarnations_;    // the newest of each worker
  struct Queue {
    std::deque<Out> out;
    size_t bytes = 0;
  };
  std::unordered_map<int, Queue> queues_;  // by link
  StoreMessage next_;
  std::map<uint32_t, bool> lost_;                 // and whether it was a loss
  std::set<std::pair<uint64_t, uint32_t>> left_;  // store and worker
  std::set<uint32_t> present_;                    // observers
  uint64_t pushes_ = 0;
};

}  // namespace commute
