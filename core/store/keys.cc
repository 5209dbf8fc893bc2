// SPDX-License-Identifier: Apache-2.0
#include "store/keys.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "copy.h"
#include "kernels.h"
#include "store/row_bytes.h"
#include "store/rows.h"

namespace commute {
namespace {

// ---- Rows ----

// Narrower rows are put side by side for the kernels, whose vectors they would not fill.
constexpr size_t kNarrowBytes = 32;
// Calls for fewer rows than that are not worth the copies.
constexpr size_t kTogetherMin = 8;

// Combines what repeated keys were given with, into rows that hold the first already.
class Combiner {
 public:
  Combiner(const KeyOrder& order, const TableSpec& spec, const std::byte* given)
      : order_(order),
        count_(spec.count),
        bytes_(spec.bytes()),
        given_(given),
        reduce_(kernels().reduce_for(spec.dtype, spec.update.combines_by())) {}

  // The other rows of a key from the `done`-th on, one after the other.
  void add_others(size_t key, std::byte* row, uint32_t done = 1) const {
    for (uint32_t at = order_.groups[key] + done; at < order_.groups[key + 1]; ++at)
      reduce_(row, row, source(at), count_);
  }

  // As above for many keys: of all of them the second, then the third, and so on.
  template <class Size>
  void add_others_together(size_t first, size_t count, std::byte* rows, Size bytes) const {
    const auto times = [&](uint32_t i) {
      return order_.groups[first + i + 1] - order_.groups[first + i];
    };
    std::vector<uint32_t> open;
    for (uint32_t i = 0; i < count; ++i)
      if (times(i) > 1) open.push_back(i);
    std::vector<std::byte> sums(open.size() * bytes), more(open.size() * bytes);
    uint32_t done = 1;
    for (; open.size() >= kTogetherMin; ++done) {
      for (size_t i = 0; i < open.size(); ++i) {
        std::memcpy(&sums[i * bytes], rows + open[i] * bytes, bytes);
        std::memcpy(&more[i * bytes], source(order_.groups[first + open[i]] + done), bytes);
      }
      reduce_(sums.data(), sums.data(), more.data(), open.size() * count_);
      for (size_t i = 0; i < open.size(); ++i)
        std::memcpy(rows + open[i] * bytes, &sums[i * bytes], bytes);
      std::erase_if(open, [&](uint32_t i) { return times(i) == done + 1; });
    }
    for (const uint32_t i : open) add_others(first + i, rows + i * bytes, done);
  }

 private:
  const std::byte* source(uint32_t at) const { return given_ + order_.sources[at] * bytes_; }

  const KeyOrder& order_;
  size_t count_;
  size_t bytes_;
  const std::byte* given_;
  Reduce reduce_;
};

// ---- Digests ----

// Two chains, each of which tells all lists apart that differ in one key. Both have a
// multiplication between a key and its place in the chain, and one between keys, and a rotation
// that brings the upper bits, which a product mixes best, down.
struct Chains {
  uint64_t low;
  uint64_t high;

  void add(uint64_t key) {
    const uint64_t product = key * 0x9e3779b97f4a7c15;
    low = std::rotl(low + product, 31) * 0xc2b2ae3d27d4eb4f;
    high = (std::rotl(high, 27) ^ product) * 0xd6e8feb86659fd93;
  }
};

}  // namespace

void gather_rows(const KeyOrder& order, const TableSpec& spec, size_t first, size_t count,
                 const std::byte* given, std::byte* rows) {
  if (order.in_order()) {
    copy_bytes(rows, given + first * spec.bytes(), count * spec.bytes());
    return;
  }
  const bool assigns = spec.update.kind == UpdateKind::kAssign;
  // By value: else the compiler fears that a row overwrites them, and loads them again.
  const auto copy_all = [=](auto row_bytes, auto source) {
    for (size_t i = 0; i < count; ++i)
      std::memcpy(rows + i * row_bytes, given + source(first + i) * row_bytes, row_bytes);
  };
  const uint32_t* const sources = order.sources.data();
  const uint32_t* const groups = order.groups.data();
  with_row_bytes(spec.bytes(), [&](auto row_bytes) {
    if (!order.repeats()) return copy_all(row_bytes, [=](size_t key) { return sources[key]; });
    if (assigns)
      return copy_all(row_bytes, [=](size_t key) { return sources[groups[key + 1] - 1]; });
    copy_all(row_bytes, [=](size_t key) { return sources[groups[key]]; });
    const Combiner combiner(order, spec, given);
    if (row_bytes <= kNarrowBytes)
      return combiner.add_others_together(first, count, rows, row_bytes);
    for (size_t i = 0; i < count; ++i) combiner.add_others(first + i, rows + i * row_bytes);
  });
}

// Rows whose place is fetched before they are written there.
constexpr size_t kWriteAhead = 16;

void scatter_rows(const KeyOrder& order, size_t row_bytes, size_t first, size_t count,
                  const std::byte* rows, std::byte* given) {
  if (order.in_order()) {
    copy_bytes(given + first * row_bytes, rows, count * row_bytes);
    return;
  }
  const uint32_t* const sources = order.sources.data();
  with_row_bytes(row_bytes, [&](auto row_bytes) {
    if (!order.repeats()) {
      for (size_t i = 0; i < count; ++i) {
        if (i + kWriteAhead < count) {
          std::byte* const later = given + sources[first + i + kWriteAhead] * row_bytes;
          __builtin_prefetch(later, 1);
          __builtin_prefetch(later + row_bytes - 1, 1);  // few arrays begin on a line's border
        }
        std::memcpy(given + sources[first + i] * row_bytes, rows + i * row_bytes, row_bytes);
      }
      return;
    }
    for (size_t i = 0; i < count; ++i) {
      for (uint32_t at = order.groups[first + i]; at < order.groups[first + i + 1]; ++at)
        std::memcpy(given + sources[at] * row_bytes, rows + i * row_bytes, row_bytes);
    }
  });
}

void RowSum::add(const TableSpec& spec, std::span<const uint64_t> keys, Bytes rows) {
  if (keys.empty()) return;
  const bool follows = whole_ == held_.keys.size() &&
                       (whole_ == 0 || hash_of(held_.keys.back()) < hash_of(keys.front()));
  held_.keys.insert(held_.keys.end(), keys.begin(), keys.end());
  held_.rows.insert(held_.rows.end(), rows.begin(), rows.end());
  if (follows)
    whole_ = held_.keys.size();
  else if (held_.keys.size() - whole_ > whole_)
    combine(spec);
}

RowBytes RowSum::take(const TableSpec& spec) {
  if (whole_ < held_.keys.size()) combine(spec);
  whole_ = 0;
  return std::exchange(held_, {});
}

void RowSum::combine(const TableSpec& spec) {
  // One shard, so one slot: what counts is the order of the hashes.
  KeyOrder order = KeyOrder::of(held_.keys, 1, 1);
  std::vector<std::byte> rows(order.keys.size() * spec.bytes());
  gather_rows(order, spec, 0, order.keys.size(), held_.rows.data(), rows.data());
  held_ = {std::move(order.keys), std::move(rows)};
  whole_ = held_.keys.size();
}

Digest digest_of(std::span<const uint64_t> keys) {
  // Every other key goes elsewhere: two multiplications at a time.
  Chains even{0x243f6a8885a308d3, 0x13198a2e03707344};
  Chains odd{0xa4093822299f31d0, 0x082efa98ec4e6c89};
  for (size_t i = 0; i + 1 < keys.size(); i += 2) {
    even.add(keys[i]);
    odd.add(keys[i + 1]);
  }
  if (keys.size() % 2 == 1) even.add(keys.back());
  for (const uint64_t more : {odd.low, odd.high, uint64_t{keys.size()}}) even.add(more);
  return {hash_of(even.low + even.high), hash_of(even.high)};
}

}  // namespace commute
