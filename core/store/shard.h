// SPDX-License-Identifier: Apache-2.0
// A shard: some slots of a store, and the rules by which contributions become values.
//
// A pure machine: messages and news of members in, messages out; no socket, no clock, no thread.
// One thread at a time owns it from receive through sum, update and reply.
//
//   push --whole?--> contribution --in turn?--> round or value
//           | piece: added to what this worker builds        | more than s + 1 ahead: kept, in
//           order
//
// Per part (one table in one slot), with staleness s:
//   clock(w)   contributions of worker w that have been received, empty ones included
//   slowest    the smallest clock of the members; who has left or is lost does not count
//   1. A contribution that makes clock n is taken when n <= slowest + s + 1, else it waits.
//   2. s = 0: round n is the n-th contribution of every member. It is applied, once, when all are
//      there; so at most one round is open. Otherwise a contribution is applied when it is taken.
//   3. A pull at clock n is answered when slowest >= n - s, and with unbounded staleness at once.
//   4. A push is known by (worker, incarnation, number): one that was received already is answered
//      and not counted again. An older incarnation is refused.
//
// Memory: per open round one accumulator (deterministic, and `assign`: one per worker), plus what
// waits by rule 1, which the client bounds.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "store/message.h"
#include "store/planted.h"
#include "store/slot.h"

namespace commute {

class Shard {
 public:
  // Sends a message on a link; the payload is valid during the call.
  using Send = std::function<void(int link, const StoreHeader& header, Bytes payload)>;
  // Told of every op before it is applied.
  using Record = std::function<void(uint32_t slot, const SlotOp& op)>;

  // Members are the workers 0 to `workers` - 1.
  Shard(uint32_t workers, Send send, Record record = {}, Planted planted = Planted::kNone);

  void on_message(int link, const StoreHeader& header, Bytes payload);
  void on_link_down(int link);    // nobody waits on it for an answer any more
  void on_lost(uint32_t worker);  // by the coordinator's word; what arrived whole stays

  const std::map<uint32_t, Slot>& slots() const { return slots_; }
  size_t held_bytes() const { return held_bytes_; }  // of contributions that wait

 private:
  struct Contribution {
    Author author;
    bool empty = true;
    std::vector<std::byte> data;
  };
  struct Setting {   // new numbers of an update
    uint64_t after;  // this round
    Author author;
    std::vector<std::byte> numbers;
  };
  struct Waiting {  // a pull
    int link;
    StoreHeader header;
  };
  struct Seen {  // what has been received of a worker
    uint32_t incarnation = 0;
    uint64_t number = 0;
  };
  // What a part has beside the slot's state.
  struct Desk {
    std::map<uint32_t, uint64_t> clocks;        // received, by worker
    std::map<uint32_t, uint64_t> left;          // last clocks of those who left, or are lost
    std::map<uint32_t, Contribution> building;  // pieces, by worker
    std::map<uint32_t, std::list<Contribution>> ahead;  // rule 1, by worker
    std::map<uint32_t, Contribution> round;             // the open round, by worker
    std::vector<std::byte> sum;                         // of those in it, where order is no matter
    uint64_t closed = 0;                                // rounds
    std::list<Setting> settings;                        // that wait for a round to close
    std::list<Waiting> pulls;
  };
  using Key = std::pair<uint32_t, uint32_t>;  // slot, table

  void declare(int link, const StoreHeader& header, Bytes payload);
  void push(int link, const StoreHeader& header, Bytes payload);
  void tick(int link, const StoreHeader& header);
  void set(int link, const StoreHeader& header, Bytes payload);
  void leave(int link, const StoreHeader& header);

  bool is_news(const StoreHeader& header);
  void build(Desk& desk, const TableSpec& spec, const StoreHeader& header, Bytes payload);
  void complete(const Key& key, Desk& desk, Contribution contribution);
  bool may_take(const Desk& desk, const TableSpec& spec, uint64_t clock) const;
  void take(const Key& key, Desk& desk, Contribution contribution);
  void join_round(Desk& desk, const TableSpec& spec, Contribution contribution);
  std::vector<std::byte> combined(Desk& desk, const TableSpec& spec) const;
  void progress(const Key& key, Desk& desk);  // takes what may be taken, closes, answers
  bool close_round(const Key& key, Desk& desk);
  bool change_settings(const Key& key, Desk& desk);
  void answer_pulls(const Key& key, Desk& desk);
  void apply(uint32_t slot, const SlotOp& op);

  uint64_t slowest(const Desk& desk) const;
  bool counts(const Desk& desk, uint32_t worker, uint64_t round) const;
  const TableSpec& spec_of(const Key& key) const;
  void reply(int link, const StoreHeader& to, StoreKind kind, const Key& key, Bytes payload = {});
  void refuse(int link, const StoreHeader& to, const std::string& why);

  const uint32_t workers_;
  Send send_;
  Record record_;
  const Planted planted_;
  std::map<uint32_t, Slot> slots_;
  std::map<Key, Desk> desks_;
  std::map<std::pair<uint32_t, uint32_t>, Seen> seen_;  // by slot and worker
  std::map<uint32_t, uint32_t> incarnations_;           // the newest of each worker
  size_t held_bytes_ = 0;
};

}  // namespace commute
