// SPDX-License-Identifier: Apache-2.0
// Questions about a sparse table's rows, answered where they lie; the client merges the answers.
#pragma once

#include <cstdint>
#include <vector>

#include "store/query.h"
#include "store/slot.h"

namespace commute {

using RowParts = std::vector<Slot::Part*>;

struct RowSummary {
  Summary values;
  uint64_t rows = 0;
  uint64_t bytes = 0;  // of memory: keys, values, states and what finding them takes
};
// With `sizes_only` the rows themselves are not read: a shard of millions serves others meanwhile.
RowSummary summarize_rows(const RowParts& parts, bool sizes_only);

// The rows of largest Euclidean norm, as `index` the key; rows of one element by its magnitude, and
// with its sign.
std::vector<Ranked> top_rows(const RowParts& parts, size_t k);

// Rows with their state in the order of their hashes, from the one with hash `from` on, as columns:
//
//   answer = head | runs | keys | values | states | states | steps? | touched?
struct ItemsHead {
  uint64_t next = 0;   // the hash to go on from; 0: that was all
  uint32_t count = 0;  // rows
  uint32_t runs = 0;
};
struct ItemsRun {  // rows of one slot
  uint32_t slot = 0;
  uint32_t count = 0;
};
// Of a shard's slots: `first` and every `stride`-th from there.
std::vector<std::byte> items(const RowParts& parts, uint32_t first, uint32_t stride, uint64_t from);

}  // namespace commute
