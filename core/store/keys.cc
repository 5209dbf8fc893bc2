// SPDX-License-Identifier: Apache-2.0
#include "store/keys.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "store/rows.h"

namespace commute {
namespace {

// ---- Putting keys in order ----
//
// Hashes are evenly spread, so keys are dealt into many small buckets that follow each other in the
// order wanted; then an item is at most a bucket's length from its place, and insertion is quick.
//
//   item = the upper bits of a hash | source       as many bits as sources need
//
// So items are ordered as hashes and then sources are, save for hashes that differ in the lower
// bits only. Such ties are rare, and settled at the end.

// Keys of a bucket, at most, if they are spread well. Fewer: less to insert, more to count.
constexpr size_t kBucketKeys = 2;
// A longer bucket is sorted before, or insertion might take forever.
constexpr size_t kInsertionMax = 32;
// Fewer keys than a part of the slots are not worth a look at all slots.
constexpr size_t kSlotsPerKey = 16;

// Shard after shard: its slots, each cut by the bits after the slot's. Or, for few keys, a bucket
// is a whole shard.
class Buckets {
 public:
  // `slots` is a power of two.
  Buckets(size_t keys, uint32_t slots, uint32_t shards) : shards_(shards), begins_(shards + 1) {
    if (keys < slots / kSlotsPerKey)
      std::iota(begins_.begin(), begins_.end(), size_t{0});
    else
      cut(keys, slots);
    shift_ = 63 - static_cast<unsigned>(std::countr_zero(slots)) - cuts_;
  }

  size_t count() const { return begins_.back(); }
  // The first bucket of a shard; of `shards`: the end.
  size_t begin_of(uint32_t shard) const { return begins_[shard]; }
  size_t of(uint64_t hash) const {
    const size_t cut = hash >> 1 >> shift_;
    return moves_.empty() ? cut % shards_ : cut + moves_[cut >> cuts_];
  }

 private:
  void cut(size_t keys, uint32_t slots) {
    while ((size_t{slots} << cuts_) * kBucketKeys < keys) ++cuts_;
    moves_.resize(slots);
    size_t rank = 0;
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      begins_[shard] = rank << cuts_;
      for (size_t slot = shard; slot < slots; slot += shards_)
        moves_[slot] = (rank++ - slot) << cuts_;
    }
    begins_[shards_] = rank << cuts_;
  }

  uint32_t shards_;
  unsigned cuts_ = 0;          // bits
  unsigned shift_ = 0;         // and one more: all 64 bits may go
  std::vector<size_t> moves_;  // of slots: how far from where they would be with one shard
  std::vector<size_t> begins_;
};

// Items lie where the keys will be: of memory that is new to the process every page costs as much
// as sorting a hundred keys.
class Sorter {
 public:
  Sorter(std::span<const uint64_t> given, uint32_t shards)
      : given_(given),
        shards_(shards),
        source_bits_((uint64_t{1} << std::bit_width(given.size())) - 1) {}

  KeyOrder order(uint32_t slots) {
    items_.resize(given_.size());
    order_.begins.resize(shards_ + 1);
    const Buckets buckets(given_.size(), slots, shards_);
    sort(buckets);
    order_.sources.resize(given_.size());
    const size_t ties = count_ties();
    if (ties == 0) {
      take_distinct();
    } else if (!take_groups(given_.size() - ties)) {
      items_.resize(given_.size());
      sort(buckets);
      take(settle());
    }
    return std::move(order_);
  }

 private:
  void take(size_t distinct) {
    order_.groups.clear();
    if (distinct < given_.size())
      take_groups(distinct);
    else
      take_distinct();
  }

  uint32_t source(uint64_t item) const { return static_cast<uint32_t>(item & source_bits_); }
  uint64_t key(uint64_t item) const { return given_[item & source_bits_]; }
  bool tied(size_t i, size_t j) const { return (items_[i] ^ items_[j]) <= source_bits_; }

  // Returns the ends of the buckets.
  std::vector<uint32_t> deal(const Buckets& buckets) {
    std::vector<uint32_t> ends(buckets.count());
    for (const uint64_t key : given_) ++ends[buckets.of(hash_of(key))];
    uint32_t begin = 0;
    for (uint32_t& end : ends) begin += std::exchange(end, begin);
    // The begin of a bucket moves on with its items, and so becomes its end.
    for (size_t i = 0; i < given_.size(); ++i) {
      const uint64_t hash = hash_of(given_[i]);
      items_[ends[buckets.of(hash)]++] = (hash & ~source_bits_) | i;
    }
    return ends;
  }

  void sort(const Buckets& buckets) {
    const std::vector<uint32_t> ends = deal(buckets);
    uint32_t begin = 0;
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      const uint32_t first = begin;
      order_.begins[shard] = first;
      for (size_t i = buckets.begin_of(shard); i < buckets.begin_of(shard + 1); ++i) {
        if (ends[i] - begin > kInsertionMax) sort_long(begin, ends[i]);
        begin = ends[i];
      }
      insert(first, begin);
    }
    order_.begins[shards_] = begin;
  }

  // A long bucket is mostly one key that was given often, or keys that are in order already.
  void sort_long(size_t begin, size_t end) {
    uint64_t* const items = items_.data();
    if (!std::is_sorted(items + begin, items + end)) std::sort(items + begin, items + end);
  }

  void insert(size_t begin, size_t end) {
    for (size_t i = begin + 1; i < end; ++i) {
      const uint64_t item = items_[i];
      size_t to = i;
      for (; to > begin && items_[to - 1] > item; --to) items_[to] = items_[to - 1];
      items_[to] = item;
    }
  }

  void take_distinct() {
    for (size_t i = 0; i < items_.size(); ++i) {
      order_.sources[i] = source(items_[i]);
      items_[i] = key(items_[i]);
    }
  }

  // Without branches: whether a key is repeated is hard to foretell. False if different keys are
  // tied, so that there are more than `distinct`; then nothing is in order, and it ends early.
  bool take_groups(size_t distinct) {
    order_.groups.resize(distinct + 1);
    uint32_t keys = 0, i = 0;
    uint64_t before = 0;
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      order_.begins[shard] = keys;
      for (const uint32_t end = order_.begins[shard + 1]; i < end; ++i) {
        const uint64_t item = items_[i], now = key(item);
        keys += i == 0 || now != before;
        if (keys > distinct) return false;
        order_.sources[i] = source(item);
        order_.groups[keys] = i + 1;
        items_[keys - 1] = before = now;
      }
    }
    order_.begins[shards_] = keys;
    order_.keys.resize(distinct);
    if (distinct < given_.size() / 2) order_.keys.shrink_to_fit();
    return true;
  }

  size_t count_ties() const {
    size_t ties = 0;
    for (size_t i = 1; i < items_.size(); ++i) ties += tied(i - 1, i);
    return ties;
  }

  // Puts ties in order; returns how many different keys there are.
  size_t settle() {
    size_t distinct = 0;
    for (size_t i = 0, end; i < items_.size(); i = end) {
      for (end = i + 1; end < items_.size() && tied(i, end);) ++end;
      if (any_mixed(i, end)) sort_by_hash(i, end);
      for (size_t at = i; at < end; ++at)
        distinct += at == i || key(items_[at - 1]) != key(items_[at]);
    }
    return distinct;
  }

  // Whether different keys are tied. Without branches, as above.
  bool any_mixed(size_t begin, size_t end) const {
    bool any = false;
    uint64_t before = key(items_[begin]);
    for (size_t i = begin + 1; i < end; ++i) {
      const uint64_t now = key(items_[i]);
      const bool differ = now != before, tie = tied(i - 1, i);
      any |= differ & tie;
      before = now;
    }
    return any;
  }

  void sort_by_hash(size_t begin, size_t end) {
    uint64_t* const items = items_.data();
    std::sort(items + begin, items + end, [this](uint64_t a, uint64_t b) {
      const uint64_t hash_a = hash_of(key(a)), hash_b = hash_of(key(b));
      return hash_a != hash_b ? hash_a < hash_b : a < b;
    });
  }

  std::span<const uint64_t> given_;
  uint32_t shards_;
  uint64_t source_bits_;  // of an item
  KeyOrder order_;
  std::vector<uint64_t>& items_ = order_.keys;
};

// ---- Rows ----

// Calls f(row_bytes), for usual widths with a constant, of which the compiler makes plain moves.
template <class F>
void with_row_bytes(size_t row_bytes, F f) {
  switch (row_bytes) {
    case 4:
      return f(std::integral_constant<size_t, 4>{});
    case 8:
      return f(std::integral_constant<size_t, 8>{});
    case 16:
      return f(std::integral_constant<size_t, 16>{});
    case 32:
      return f(std::integral_constant<size_t, 32>{});
    case 64:
      return f(std::integral_constant<size_t, 64>{});
    case 128:
      return f(std::integral_constant<size_t, 128>{});
    default:
      return f(row_bytes);
  }
}

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

KeyOrder KeyOrder::of(std::span<const uint64_t> given, uint32_t slots, uint32_t shards) {
  return Sorter(given, shards).order(slots);
}

void gather_rows(const KeyOrder& order, const TableSpec& spec, size_t first, size_t count,
                 const std::byte* given, std::byte* rows) {
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
