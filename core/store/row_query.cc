// SPDX-License-Identifier: Apache-2.0
#include "store/row_query.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "store/encoding.h"
#include "store/row_bytes.h"

namespace commute {
namespace {

// What a row is compared by: one element with its sign, more by their norm.
double rank_of(const TableSpec& spec, const std::byte* row) {
  if (spec.count == 1 && spec.dtype == Dtype::kFloat32) {  // at once: there may be millions
    float value;
    std::memcpy(&value, row, sizeof value);
    return double{value};
  }
  const Summary one = summarize(spec.dtype, row, spec.count);
  return spec.count == 1 ? one.sum : std::sqrt(one.squares);
}

}  // namespace

RowSummary summarize_rows(const RowParts& parts, bool sizes_only) {
  RowSummary all;
  for (const Slot::Part* part : parts) {
    const TableSpec& spec = part->spec;
    if (!sizes_only)
      part->rows->each([&](uint64_t, const std::byte* row) {
        all.values += summarize(spec.dtype, row, spec.count);
      });
    all.rows += part->rows->size();
    all.bytes += part->rows->memory();
  }
  return all;
}

std::vector<Ranked> top_rows(const RowParts& parts, size_t k) {
  std::vector<Ranked> best;  // a heap whose first is the least of the best
  double least = -1;         // no row below that is one of the best
  for (const Slot::Part* part : parts) {
    part->rows->each([&](uint64_t key, const std::byte* row) {
      const Ranked ranked{key, rank_of(part->spec, row)};
      if (!(std::abs(ranked.value) >= least)) return;  // or it is not a number
      if (best.size() == k && (k == 0 || !ranks_before(ranked, best.front()))) return;
      if (best.size() == k) {
        std::pop_heap(best.begin(), best.end(), ranks_before);
        best.pop_back();
      }
      best.push_back(ranked);
      std::push_heap(best.begin(), best.end(), ranks_before);
      if (best.size() == k) least = std::abs(best.front().value);
    });
  }
  std::sort_heap(best.begin(), best.end(), ranks_before);
  return best;
}

namespace {

// Rows of the shard from this hash on, at most so many; and the hash of the one after them, or 0.
uint64_t find_items(const RowParts& parts, uint32_t first, uint32_t stride, uint64_t from,
                    size_t most, std::vector<Rows::Found>& found) {
  const uint32_t slot = slot_of(from, parts.front()->spec.slots);
  const size_t begin = slot <= first ? 0 : (slot - first + stride - 1) / stride;
  for (size_t i = begin; i < parts.size(); ++i) {
    const bool within = first + i * stride == slot;
    parts[i]->rows->find_from(within ? from : 0, most + 1 - found.size(), found);
    if (found.size() <= most) continue;
    const uint64_t next = found[most].hash;
    found.resize(most);
    return next;
  }
  return 0;
}

// The rows column by column; the padding of a row is left out.
void put_columns(const RowLayout& layout, const std::vector<Rows::Found>& found, std::byte* to) {
  constexpr size_t kAhead = 16;
  const size_t count = found.size(), arrays = 1 + layout.states;
  std::byte* const keys = to;
  std::byte* const values = keys + count * sizeof(uint64_t);
  std::byte* counted = values + count * layout.value_bytes * arrays;
  with_row_bytes(layout.value_bytes, [&](auto bytes) {
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) prefetch_lines(found[i + kAhead].row, layout.bytes);
      std::memcpy(keys + i * sizeof(uint64_t), &found[i].key, sizeof(uint64_t));
      for (size_t array = 0; array < arrays; ++array)
        std::memcpy(values + (array * count + i) * bytes, found[i].row + array * bytes, bytes);
    }
  });
  for (const ptrdiff_t at : {layout.step_at, layout.touched_at}) {
    if (at < 0) continue;
    for (size_t i = 0; i < count; ++i, counted += sizeof(uint32_t))
      std::memcpy(counted, found[i].row + at, sizeof(uint32_t));
  }
}

}  // namespace

std::vector<std::byte> items(const RowParts& parts, uint32_t first, uint32_t stride,
                             uint64_t from) {
  const TableSpec& spec = parts.front()->spec;
  const RowLayout& layout = parts.front()->rows->layout();
  const size_t row_bytes = sizeof(uint64_t) + layout.value_bytes * (1 + layout.states) +
                           sizeof(uint32_t) * ((layout.step_at >= 0) + (layout.touched_at >= 0));
  const size_t room = kPartBytesMax - sizeof(ItemsRun) * parts.size();
  const size_t most = std::max<size_t>(1, room / row_bytes);
  std::vector<Rows::Found> found;
  found.reserve(most + 1);
  ItemsHead head;
  head.next = find_items(parts, first, stride, from, most, found);
  head.count = static_cast<uint32_t>(found.size());
  std::vector<ItemsRun> runs;
  for (const Rows::Found& one : found) {
    const uint32_t slot = slot_of(one.hash, spec.slots);
    if (runs.empty() || runs.back().slot != slot) runs.push_back({slot, 0});
    ++runs.back().count;
  }
  head.runs = static_cast<uint32_t>(runs.size());
  std::vector<std::byte> answer;
  answer.reserve(sizeof head + runs.size() * sizeof(ItemsRun) + found.size() * row_bytes);
  put(answer, head);
  put_all(answer, runs);
  const size_t columns = answer.size();
  answer.resize(columns + found.size() * row_bytes);
  put_columns(layout, found, answer.data() + columns);
  return answer;
}

}  // namespace commute
