// SPDX-License-Identifier: Apache-2.0
// What a push brings to a part, and how several become one.
//
// Of a dense table it is an array as large as the part; of a sparse one keys, each once and in the
// order of their hashes, with as many rows. A tick brings nothing: `pushed` is false then.
#pragma once

#include <span>
#include <vector>

#include "store/keys.h"
#include "store/message.h"
#include "store/rows.h"
#include "store/slot.h"

namespace commute {

struct Contribution {
  bool pushed = false;
  Bytes payload;
  std::span<const uint64_t> keys;
  const Rows::Place* places = nullptr;  // where the keys' rows were found, if somebody has looked
};

// Several contributions becoming one, by the table's operation, in the order they come.
class Pile {
 public:
  bool empty() const { return !any_; }
  void add(const TableSpec& spec, const Contribution& more);
  // All as one; valid until the pile changes.
  Contribution all(const TableSpec& spec);
  // For changing what `all` gave.
  std::vector<std::byte>& bytes() { return sparse_ ? whole_.rows : dense_; }
  void clear();

 private:
  bool any_ = false;
  bool sparse_ = false;
  std::vector<std::byte> dense_;
  RowSum rows_;
  RowBytes whole_;
};

}  // namespace commute
