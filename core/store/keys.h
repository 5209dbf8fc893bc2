// SPDX-License-Identifier: Apache-2.0
// The keys of one call, as users have them, and the order in which they travel.
//
// Users give any uint64, unsorted and repeated. What travels is each key once, per shard, in the
// order of the hashes: so the rows of a slot are together, two contributions are combined by
// merging them, and an answer needs no keys. `KeyOrder` remembers which given key went where:
//
//   keys      a c | b d        each once; those of shard 0 first, in the order of their hashes
//   begins    0   2   4        where a shard's keys begin, and the end
//   sources   0 3 1 | 2 4      positions in what the user gave, grouped by key, in rising order
//   groups    0 2 3 4 5        where a key's sources begin, and the end; empty when none repeats
//
// Keys that are given just so, each once and in the order of their hashes, are not sorted. With one
// shard they travel as they are given, and `sources` is empty too.
//
// Whoever uses a key's row at many places does better with each key once, in the order it travels
// already, and numbers instead of copies (`distinct`):
//
//   sources, groups            empty: rows are copied as they lie
//   index     0 2 3 0 1        of what was given: which of `keys` it is
//
// A contribution (`RowBytes`) is such keys with as many rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/message.h"
#include "store/slot.h"

namespace commute {

struct KeyOrder {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> begins;
  std::vector<uint32_t> sources;
  std::vector<uint32_t> groups;

  // At most 2^32 - 2 keys.
  static KeyOrder of(std::span<const uint64_t> given, uint32_t slots, uint32_t shards);
  // The distinct keys alone, and in order; `index` is as long as what is given.
  static KeyOrder distinct(std::span<const uint64_t> given, uint32_t slots, uint32_t shards,
                           uint32_t* index);
  bool repeats() const { return !groups.empty(); }
  // Whether rows are given as they travel.
  bool in_order() const { return sources.empty(); }
};

// Rows `first` to `first + count` of what travels, from what the user gave: repeated ones are
// combined by the table's operation (`assign`: the last one counts).
void gather_rows(const KeyOrder& order, const TableSpec& spec, size_t first, size_t count,
                 const std::byte* given, std::byte* rows);
// The other way: rows that came back, to everywhere their keys were given.
void scatter_rows(const KeyOrder& order, size_t row_bytes, size_t first, size_t count,
                  const std::byte* rows, std::byte* given);

// Keys and rows of a contribution; keys in the order of their hashes, each once.
struct RowBytes {
  std::vector<uint64_t> keys;
  std::vector<std::byte> rows;
};

// Contributions of a round, or pieces of one, becoming one: repeated keys are combined by the
// table's operation, in the order in which they were added. Between calls it holds at most about
// twice what it will give; while it combines, that result too.
//
// What was added lies one after the other. The first `whole_` keys are as they will be given; when
// those after them have become more, all are put in order: so a key is looked at a few times,
// however many pieces there are, and pieces that come in the order of their hashes are only copied.
class RowSum {
 public:
  void add(const TableSpec& spec, std::span<const uint64_t> keys, Bytes rows);
  bool empty() const { return held_.keys.empty(); }
  size_t bytes() const { return held_.keys.size() * sizeof(uint64_t) + held_.rows.size(); }
  // All as one; it is empty afterwards.
  RowBytes take(const TableSpec& spec);

 private:
  void combine(const TableSpec& spec);

  RowBytes held_;
  size_t whole_ = 0;
};

// A 128-bit name of a list of keys, the same on every machine. Different lists do not get the same
// one by accident; somebody who wants that can make them.
struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  auto operator<=>(const Digest&) const = default;
};
Digest digest_of(std::span<const uint64_t> keys);

// How the keys of a message travel.
enum class KeysForm : uint32_t {
  kKeys = 0,      // they follow
  kRemember = 1,  // they follow, and will be known by the digest
  kKnown = 2,     // by the digest
  kLast = 3,      // by the digest, and need not be known any more
};
inline bool is_known(KeysForm form) {
  return form == KeysForm::kKnown || form == KeysForm::kLast;
}

struct KeysHead {
  uint32_t count = 0;
  KeysForm form = KeysForm::kKeys;
  Digest digest;
};
static_assert(sizeof(KeysHead) == 24);

}  // namespace commute
