// SPDX-License-Identifier: Apache-2.0
#include "store/row_query.h"

#include <algorithm>
#include <cmath>

#include "store/encoding.h"

namespace commute {

RowSummary summarize_rows(const RowParts& parts) {
  RowSummary all;
  for (const Slot::Part* part : parts) {
    const TableSpec& spec = part->spec;
    part->rows->each([&](uint64_t, const std::byte* row) {
      const Summary one = summarize(spec.dtype, row, spec.count);
      all.values.sum += one.sum;
      all.values.squares += one.squares;
      all.values.whole = static_cast<int64_t>(static_cast<uint64_t>(all.values.whole) +
                                              static_cast<uint64_t>(one.whole));
      all.values.nonzero += one.nonzero;
    });
    all.rows += part->rows->size();
    all.bytes += part->rows->memory();
  }
  return all;
}

std::vector<Ranked> top_rows(const RowParts& parts, size_t k) {
  const auto before = [](const Ranked& a, const Ranked& b) {
    const double x = std::abs(a.value), y = std::abs(b.value);
    return x > y || (x == y && a.index < b.index);
  };
  std::vector<Ranked> best;  // a heap whose first is the least of the best
  for (const Slot::Part* part : parts) {
    const TableSpec& spec = part->spec;
    part->rows->each([&](uint64_t key, const std::byte* row) {
      const Summary one = summarize(spec.dtype, row, spec.count);
      const Ranked ranked{key, spec.count == 1 ? one.sum : std::sqrt(one.squares)};
      if (std::isnan(ranked.value)) return;
      if (best.size() == k && (k == 0 || !before(ranked, best.front()))) return;
      if (best.size() == k) {
        std::pop_heap(best.begin(), best.end(), before);
        best.pop_back();
      }
      best.push_back(ranked);
      std::push_heap(best.begin(), best.end(), before);
    });
  }
  std::sort_heap(best.begin(), best.end(), before);
  return best;
}

std::vector<std::byte> items(const RowParts& parts, uint64_t from) {
  const TableSpec& spec = parts.front()->spec;
  const size_t row_bytes = parts.front()->rows->layout().bytes;
  const size_t most = std::max<size_t>(1, kPartBytesMax / (sizeof(uint64_t) + row_bytes));
  ItemsHead head{0, 0, static_cast<uint32_t>(row_bytes)};
  std::vector<std::byte> keys, rows;
  // A shard's slots are every so many-th one; those before `from` need no look.
  const size_t stride = (spec.slots + parts.size() - 1) / parts.size();
  for (size_t i = slot_of(from, spec.slots) / stride; i < parts.size(); ++i) {
    const Slot::Part* const part = parts[i];
    if (part->rows->size() == 0) continue;
    const std::vector<uint64_t> sorted = part->rows->keys();
    auto next = std::partition_point(sorted.begin(), sorted.end(),
                                     [from](uint64_t key) { return hash_of(key) < from; });
    for (; next != sorted.end(); ++next) {
      if (head.count == most) {
        head.next = hash_of(*next);
        break;
      }
      const uint64_t rest = rest_of(hash_of(*next), spec.slots);
      put(keys, *next);
      put_bytes(rows, part->rows->at(part->rows->find(*next, rest), *next), row_bytes);
      ++head.count;
    }
    if (head.next != 0) break;
  }
  std::vector<std::byte> answer;
  answer.reserve(sizeof head + keys.size() + rows.size());
  put(answer, head);
  put_bytes(answer, keys.data(), keys.size());
  put_bytes(answer, rows.data(), rows.size());
  return answer;
}

}  // namespace commute
