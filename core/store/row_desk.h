// SPDX-License-Identifier: Apache-2.0
// A sparse table on one shard: its rows in all the shard's slots, and lists of keys that clients
// send again and again.
//
//   payload of a push or pull = head | keys, unless they are known by their digest | rows of a push
//
// A list that a client asks to be remembered is kept with the places of its rows, so that a push
// after the pull of the same keys (a ticket) needs neither keys nor a second look-up; places of
// rows that have moved or gone are looked up again. A list is forgotten when a client has used it
// for the last time; if that push is put off, it comes again with its keys. What is remembered is
// bounded per worker, the oldest goes; a client that names a list that is not known is asked for
// its keys.
//
// Looking up is done for many keys at once: while one row is used, the next ones are on their way
// from memory.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "store/contribution.h"
#include "store/keys.h"
#include "store/message.h"
#include "store/slot.h"

namespace commute {

struct KeyList {
  std::vector<uint64_t> keys;
  std::vector<Rows::Place> places;  // empty: not looked up
  uint64_t epoch = 0;               // in which they hold
};

class RowDesk {
 public:
  using Record = std::function<void(uint32_t slot, const SlotOp& op)>;
  static constexpr size_t kRememberedMax = 16 << 20;  // bytes, per worker

  // `slots` are those of the shard, in rising order, with `stride` between them.
  RowDesk(std::vector<Slot*> slots, uint32_t first, uint32_t stride, uint32_t table,
          size_t remembered_max = kRememberedMax);

  // The keys of a message; nothing when its digest is not known. Takes head and keys off `payload`.
  // Raises std::invalid_argument.
  std::shared_ptr<KeyList> keys_of(uint32_t worker, Bytes& payload);
  // The rows of the keys, as they travel.
  std::vector<std::byte> values(KeyList& list);
  // Applies to each slot what is its own.
  void apply(SlotOp op, const Record& record);
  void apply_everywhere(const SlotOp& op, const Record& record);
  // Drops rows that nobody has pushed for long, of some slots at a time.
  void expire(uint32_t table, uint64_t now, const Record& record);
  void forget(uint32_t worker) { known_.erase(worker); }
  // Where the list's rows are, so far as that was looked up and still holds; else nullptr.
  const Rows::Place* places_of(const KeyList& list) const;

  // The slot of this key will have so many rows.
  void reserve_slot(uint64_t key, size_t rows) const {
    parts_[slot_of(hash_of(key), spec().slots) / stride_]->rows->reserve(rows);
  }
  // All slots of the store together will have so many. They make room, when they are full, for as
  // many as there is memory for, in bytes, of which half is left.
  void reserve(uint64_t rows, uint64_t memory = free_memory()) const;

  const std::vector<Slot::Part*>& parts() const { return parts_; }
  const TableSpec& spec() const { return parts_.front()->spec; }

 private:
  struct Known {
    std::map<Digest, std::shared_ptr<KeyList>> lists;
    std::deque<Digest> order;  // in which they came, with some that are forgotten
    size_t bytes = 0;

    std::shared_ptr<KeyList> forget(const Digest& digest);
    void forget_oldest();
  };

  // Keys whose rows are being fetched, a few at a time.
  class NarrowFetcher;
  class WideFetcher;

  // Values of the list's rows, and in the list where these are.
  template <class Bytes>
  void copy_narrow(KeyList& list, std::byte* values, Bytes bytes) const;
  void copy_wide(KeyList& list, bool known, std::byte* values) const;

  static uint64_t free_memory();
  void find_rows();
  void remember(uint32_t worker, const Digest& digest, std::shared_ptr<KeyList> list);

  std::vector<Slot*> slots_;
  std::vector<Slot::Part*> parts_;
  std::vector<Rows*> rows_;  // by slot of the whole store; those of other shards are null
  uint32_t first_;
  uint32_t stride_;
  size_t remembered_max_;
  uint64_t epoch_ = 0;      // changes when rows go
  uint64_t expired_ = 0;    // the clock of the last time
  size_t next_expiry_ = 0;  // slot
  std::map<uint32_t, Known> known_;
};

}  // namespace commute
