// SPDX-License-Identifier: Apache-2.0
// A slot: the unit that a store keeps, and later moves, replicates and saves.
//
// It holds one part of each table: of a dense one a chunk (value, the update's state, how often it
// was updated), of a sparse one the rows of the keys that belong here; and of each worker its clock
// and the last push applied. Slot 0 holds the directory too. All of that changes only by
// `apply(op)`. Ops are bytes: whoever has a slot's ops can make the slot anew, bit for bit, and a
// slot at some op plus the ops after it is the slot now.
//
//   op = header | authors | keys | payload
//
// What has arrived but is not applied (open rounds, pieces) is the shard's business, not the
// slot's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/by_worker.h"
#include "store/directory.h"
#include "store/message.h"
#include "store/rows.h"
#include "store/sightings.h"
#include "store/update.h"

namespace commute {

struct TableSpec {
  Dtype dtype = Dtype::kFloat32;
  bool mean = false;           // rounds are divided by the number of workers that pushed
  bool deterministic = false;  // rounds are added up in rank order
  bool continues = false;      // when a member is lost
  bool sparse = false;
  Dtype wire = Dtype::kFloat32;  // of rows on their way; as `dtype` where nothing is saved
  int32_t staleness = 0;         // -1: unbounded
  uint64_t count = 0;            // elements of this part; sparse: of a row
  Update update;
  // Of sparse tables:
  Initial initial;
  uint32_t slots = 0;         // of the whole store
  uint32_t admit = 1;         // a row is made when its key is pushed for the so many-th time
  uint64_t expire_after = 0;  // clocks without a push; 0: never

  bool operator==(const TableSpec&) const = default;
  bool bounded() const { return staleness >= 0; }
  bool in_step() const { return staleness == 0; }
  size_t bytes() const { return count * item_bytes(dtype); }  // sparse: of a row's value
  size_t wire_bytes() const { return count * item_bytes(wire); }
  RowLayout layout() const { return {dtype, uint32_t(count), update, expire_after != 0}; }
  std::string describe() const;

  static constexpr size_t kEncodedBytes = 56 + Update::kEncodedBytes;
  std::vector<std::byte> encode() const;
  // Takes what it needs from the front of `bytes`. Raises std::invalid_argument.
  static TableSpec decode(Bytes& bytes);
};

// Whose push, and which; `clock` is the author's on the op's table afterwards.
struct Author {
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  uint64_t number = 0;
  uint64_t clock = 0;

  bool operator==(const Author&) const = default;
};

enum class OpKind : uint8_t {
  kCreate = 1,      // payload: spec, then the first value: all of it, one element for all, or none
                    // for zeros
  kContribute = 2,  // payload: what goes into the value, or into the rows of `keys`; none for
                    // empty contributions
  kSet = 3,         // payload: an update whose numbers are new, or NaN where nothing changes
  kTable = 4,       // payload: an entry of the directory
  kDrop = 5,        // the rows of `keys`
  kExpire = 6,      // payload: a clock; rows that were last pushed too long before it
  kReset = 7,       // payload: everybody's clock; there are no rows any more
  kLoad = 8,        // payload: rows of `keys` with their state; or a SavedArray and its bytes
  kForget = 9,      // its authors: they are gone for good
};

struct SlotOp {
  OpKind kind = OpKind::kContribute;
  uint32_t table = 0;
  std::vector<Author> authors;
  std::span<const uint64_t> keys;
  Bytes payload;
  const Rows::Place* places = nullptr;  // of the keys, where they have been looked up; not encoded

  std::vector<std::byte> encode() const;
  // Views into `bytes`. Raises std::invalid_argument.
  static SlotOp decode(Bytes bytes);
};

// An array of a dense part: 0 the value, then the states.
struct SavedArray {
  uint64_t updates = 0;  // of the part
  uint64_t which = 0;
};

class Slot {
 public:
  struct Last {
    uint32_t incarnation = 0;
    uint64_t number = 0;
  };
  struct Part {
    TableSpec spec;
    std::vector<std::byte> value;
    std::vector<std::vector<std::byte>> states;
    std::unique_ptr<Rows> rows;  // instead, of a sparse table
    Sightings sightings;         // of keys without a row, where rows are admitted
    uint64_t updates = 0;        // contributions, or rounds, in the value
    ByWorker<uint64_t> clocks;
    ByWorker<Last> last;  // push applied; of the worker's newest incarnation
  };

  // Slots of one shard share the memory of their rows.
  explicit Slot(std::shared_ptr<Pages> pages = std::make_shared<Pages>())
      : pages_(std::move(pages)) {}
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  // The part of an op's table, for callers that have it at hand, saves the look-up. Raises
  // std::invalid_argument, and then nothing has changed.
  void apply(const SlotOp& op, Part* part = nullptr);

  const Part* part(uint32_t table) const;
  Part* part(uint32_t table) { return const_cast<Part*>(std::as_const(*this).part(table)); }
  const std::map<uint32_t, Part>& parts() const { return parts_; }
  const std::map<std::string, TableEntry>& directory() const { return directory_; }
  // Everything above as bytes, to compare slots.
  std::vector<std::byte> image() const;

 private:
  void create(const SlotOp& op);
  static void contribute(const SlotOp& op, Part& part);
  static void contribute_rows(const SlotOp& op, Part& part);
  static void expire(const SlotOp& op, Part& part);
  void reset(const SlotOp& op, Part& part) const;
  static void load(const SlotOp& op, Part& part);

  std::shared_ptr<Pages> pages_;
  std::map<uint32_t, Part> parts_;  // by table
  std::map<std::string, TableEntry> directory_;
};

}  // namespace commute
