// SPDX-License-Identifier: Apache-2.0
// A store's client on one worker: slicing, numbering, what must be sent again, clocks, the cache.
//
// A pure machine like the shard: calls and messages in, messages out.
//
//   call -> one message per part of the table, to the shard that holds its slot
//   push     kept until it is committed; after a broken link all that is kept goes out again, in
//            the order of its numbers, and then the pulls that wait for an answer
//   pull     done when every part has answered
//
// Invariants: 1. Messages to one shard leave in the order of the calls. 2. A push is numbered once,
// whatever happens to it on the way. 3. A table's clock counts the contributions made here; a pull
// carries it, and so sees them. 4. A pull may be answered from the cache while what it holds is
// guaranteed for a clock of at least mine - s.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/message.h"
#include "store/planted.h"
#include "store/slot.h"

namespace commute {

class Client {
 public:
  // Sends a message to a shard whose link is up; the payload is valid during the call.
  using Send = std::function<void(int shard, const StoreHeader& header, Bytes payload)>;

  struct PartPlace {  // where a part lives, and which elements it is
    uint32_t slot = 0;
    int shard = 0;
    uint64_t first = 0;
    uint64_t count = 0;
  };

  Client(uint32_t worker, uint32_t incarnation, int shards, Send send,
         Planted planted = Planted::kNone);

  // `first` is the whole table's first value. Each returns a call, to be asked about below.
  uint64_t declare(uint32_t table, const TableSpec& spec, std::vector<PartPlace> places,
                   Bytes first);
  uint64_t push(uint32_t table, Bytes gradient, bool piece);
  uint64_t push_pull(uint32_t table, Bytes gradient, std::byte* out);
  // `fresh`: not from the cache.
  uint64_t pull(uint32_t table, std::byte* out, bool fresh = false);
  uint64_t set(uint32_t table, const Update& update);
  uint64_t leave();
  // An empty contribution for each table that has had none since the last tick.
  void tick();
  // Empty contributions up to this clock, for a worker that comes back into the middle of things.
  void catch_up(uint32_t table, uint64_t clock);

  void on_message(int shard, const StoreHeader& header, Bytes payload);
  void on_link(int shard, bool up);

  bool done(uint64_t call) const { return !calls_.contains(call); }
  // Why a call was refused; empty for none.
  std::string refusal(uint64_t call) const;
  bool flushed() const { return kept_pushes_ == 0; }
  size_t kept_bytes() const { return kept_bytes_; }
  uint64_t clock(uint32_t table) const { return tables_.at(table).clock; }
  uint64_t cache_hits() const { return cache_hits_; }

 private:
  struct Table {
    TableSpec spec;
    std::vector<PartPlace> places;
    uint64_t clock = 0;
    bool pushed = false;  // since the last tick
    // The last whole answer, and for which clock each part of it is good.
    std::vector<std::byte> cache;
    std::vector<uint64_t> guaranteed;  // by part
    std::vector<uint64_t> found;       // by part: the clock that the shard knew of
  };
  struct Kept {  // a message that is not committed
    StoreHeader header;
    Bytes payload;
    std::shared_ptr<const std::vector<std::byte>> owner;  // null: the caller's array
  };
  struct Call {
    size_t left = 0;  // answers to come
    std::byte* out = nullptr;
  };

  using Owner = std::shared_ptr<const std::vector<std::byte>>;

  uint64_t begin(size_t answers, std::byte* out = nullptr);
  // One message per part; `payload` is the whole table's, or empty.
  void send_parts(uint64_t call, uint32_t id, StoreHeader header, Bytes payload, Owner owner);
  void send(int shard, Kept kept);
  bool release(int shard, const StoreHeader& answer);
  void take_value(const StoreHeader& answer, Bytes payload, std::byte* out);
  void take_declared(const StoreHeader& answer);
  size_t part_of(const Table& table, uint32_t slot) const;
  bool cached(const Table& table) const;

  const uint32_t worker_;
  const uint32_t incarnation_;
  Send send_;
  const Planted planted_;
  std::map<uint32_t, Table> tables_;
  std::vector<bool> up_;
  std::vector<std::deque<Kept>> kept_;  // by shard, in order
  std::map<uint64_t, Call> calls_;      // under way
  std::map<uint64_t, std::string> refused_;
  uint64_t last_call_ = 0;
  uint64_t last_number_ = 0;
  size_t kept_bytes_ = 0;
  size_t kept_pushes_ = 0;
  uint64_t cache_hits_ = 0;
};

}  // namespace commute
