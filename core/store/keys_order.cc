// SPDX-License-Identifier: Apache-2.0
// Keys in the order they travel: by sorting, with all their places; or each once, by a table. Those
// that come in the order of their hashes are dealt to the shards as they are.
#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <tuple>
#include <utility>

#include "store/keys.h"
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
  Buckets(size_t keys, uint32_t slots, uint32_t shards)
      : shards_(shards),
        slot_shift_(63 - static_cast<unsigned>(std::countr_zero(slots))),
        begins_(shards + 1) {
    if (keys < slots / kSlotsPerKey)
      std::iota(begins_.begin(), begins_.end(), size_t{0});
    else
      cut(keys, slots);
    shift_ = slot_shift_ - cuts_;
  }

  size_t count() const { return begins_.back(); }
  // The first bucket of a shard; of `shards`: the end.
  size_t begin_of(uint32_t shard) const { return begins_[shard]; }
  size_t of(uint64_t hash) const {
    return has_places() ? bucket(place_of(hash)) : (hash >> 1 >> shift_) % shards_;
  }

  // A place is a hash whose first bits are the rank of its slot, so places are in the order wanted.
  // There is none where a bucket is a whole shard.
  bool has_places() const { return !moves_.empty(); }
  uint64_t place_of(uint64_t hash) const { return hash + moves_[hash >> 1 >> slot_shift_]; }
  size_t bucket(uint64_t place) const { return place >> 1 >> shift_; }
  uint64_t first_place(size_t bucket) const { return uint64_t{bucket} << 1 << shift_; }

 private:
  void cut(size_t keys, uint32_t slots) {
    while ((size_t{slots} << cuts_) * kBucketKeys < keys) ++cuts_;
    moves_.resize(slots);
    size_t rank = 0;
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      begins_[shard] = rank << cuts_;
      for (size_t slot = shard; slot < slots; slot += shards_)
        moves_[slot] = (rank++ - slot) << 1 << slot_shift_;
    }
    begins_[shards_] = rank << cuts_;
  }

  uint32_t shards_;
  unsigned slot_shift_;          // and one more, as below: all 64 bits may go
  unsigned shift_ = 0;           // to the bucket
  unsigned cuts_ = 0;            // bits
  std::vector<uint64_t> moves_;  // of slots: how far from where they would be with one shard
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

// ---- Keys in order already ----

// Strictly, so none is there twice.
bool hashes_rise(std::span<const uint64_t> given) {
  uint64_t before = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const uint64_t hash = hash_of(given[i]);
    if (i > 0 && hash <= before) return false;
    before = hash;
  }
  return true;
}

// Those of a shard stay as they are among themselves.
KeyOrder deal_in_order(std::span<const uint64_t> given, uint32_t slots, uint32_t shards) {
  KeyOrder order;
  order.begins.resize(shards + 1);
  if (shards == 1) {
    order.keys.assign(given.begin(), given.end());
    order.begins[1] = static_cast<uint32_t>(given.size());
    return order;
  }
  const auto shard_of = [=](uint64_t key) { return slot_of(hash_of(key), slots) % shards; };
  for (const uint64_t key : given) ++order.begins[shard_of(key) + 1];
  std::partial_sum(order.begins.begin(), order.begins.end(), order.begins.begin());
  std::vector<uint32_t> ends(order.begins.begin(), order.begins.end() - 1);
  order.keys.resize(given.size());
  order.sources.resize(given.size());
  for (uint32_t i = 0; i < given.size(); ++i) {
    const uint32_t to = ends[shard_of(given[i])]++;
    order.keys[to] = given[i];
    order.sources[to] = i;
  }
  return order;
}

// ---- Telling keys apart ----
//
// A table of buckets in the order wanted, each with room for one key, the next where it is taken:
//
//   given     b a c a          numbered as they come: b 1, a 2, c 3, and a again 2
//   table     0 2 0 1 3 0      numbers, 0: none
//   in order  a b c            after a walk, and moves of the few that were not at home
//
// Hashes are evenly spread, so it is a step or two to a key. Keys that somebody chose to crowd the
// table are sorted.

// Buckets for so many times the keys, by twos: two thirds are taken if none repeats.
constexpr size_t kRoomKeys = 3;
// Steps from home, at most; and of all keys together, for each.
constexpr ptrdiff_t kStepsMax = 256;
constexpr size_t kStepsPerKey = 4;
// Keys whose buckets are fetched before they are looked at: what is foretold wrongly is known
// sooner.
constexpr size_t kAhead = 64;

// Kept from call to call: of memory that is new to the process, filling it costs more than all
// else.
struct NumberRoom {
  std::vector<uint32_t> table;
  std::vector<uint64_t> keys, places;  // by number
  std::vector<uint32_t> walked;        // numbers in the order of places
  std::vector<uint64_t> sorted;        // these places
  std::vector<uint32_t> ranks;         // by number

  void fit(size_t buckets, size_t given) {
    table.assign(buckets, 0);
    if (places.size() >= given) return;
    for (auto* longs : {&keys, &places, &sorted}) longs->resize(given);
    for (auto* shorts : {&walked, &ranks}) shorts->resize(given + 1);
  }
};
// Of more keys, memory is given back.
constexpr size_t kRoomKeysKept = 1 << 18;

class Numberer {
 public:
  Numberer(std::span<const uint64_t> given, uint32_t slots, uint32_t shards, uint32_t* index,
           NumberRoom& room)
      : given_(given),
        shards_(shards),
        index_(index),
        buckets_(given.size() * kRoomKeys, slots, shards),
        room_(room),
        steps_left_(static_cast<ptrdiff_t>(given.size() * kStepsPerKey)) {}

  // Whether keys are spread well enough; if not there is no order.
  bool run() {
    if (given_.empty() || !buckets_.has_places()) return false;
    room_.fit(buckets_.count() + kStepsMax, given_.size());
    // With one shard places are hashes: a fourteenth of the time.
    const bool spread = shards_ == 1
                            ? number([](uint64_t hash) { return hash; })
                            : number([this](uint64_t hash) { return buckets_.place_of(hash); });
    if (!spread) return false;
    walk();
    sort();
    return true;
  }

  KeyOrder order() {
    KeyOrder order;
    order.keys.resize(count_);
    for (uint32_t rank = 0; rank < count_; ++rank) {
      const uint32_t number = room_.walked[rank];
      room_.ranks[number] = rank;
      order.keys[rank] = room_.keys[number];
    }
    const uint32_t* const ranks = room_.ranks.data();
    for (size_t i = 0; i < given_.size(); ++i) index_[i] = ranks[index_[i]];
    order.begins = begins();
    return order;
  }

 private:
  template <class PlaceOf>
  bool number(PlaceOf place_of) {
    std::array<uint64_t, kAhead> places;
    for (size_t first = 0; first < given_.size(); first += kAhead) {
      const auto keys = given_.subspan(first, std::min(kAhead, given_.size() - first));
      for (size_t i = 0; i < keys.size(); ++i) {
        places[i] = place_of(hash_of(keys[i]));
        __builtin_prefetch(&room_.table[buckets_.bucket(places[i])], 1);
      }
      if (!number(keys, places.data(), index_ + first)) return false;
    }
    return true;
  }

  // Without branches where a key is at home: whether it is new is hard to foretell.
  bool number(std::span<const uint64_t> given, const uint64_t* given_places, uint32_t* index) {
    const auto [table, keys, places] =
        std::tuple(room_.table.data(), room_.keys.data(), room_.places.data());
    uint32_t count = count_;
    for (size_t i = 0; i < given.size(); ++i) {
      const uint64_t place = given_places[i];
      size_t at = buckets_.bucket(place);
      keys[count] = given[i];
      places[count] = place;
      const uint32_t there = table[at];
      uint32_t number = there | (-uint32_t{there == 0} & (count + 1));
      if (places[number - 1] != place) [[unlikely]] {
        steps_left_ -= look_on(place, count + 1, at, number);
        if (steps_left_ < 0) return false;
      }
      table[at] = number;
      count += number > count;
      index[i] = number - 1;
    }
    count_ = count;
    return true;
  }

  // From a bucket that another has taken; returns how many steps it was.
  ptrdiff_t look_on(uint64_t place, uint32_t fresh, size_t& at, uint32_t& number) const {
    for (ptrdiff_t steps = 1; steps < kStepsMax; ++steps) {
      const uint32_t next = room_.table[++at];
      number = next == 0 ? fresh : next;
      if (room_.places[number - 1] == place) return steps;
    }
    return PTRDIFF_MAX;
  }

  void walk() {
    uint32_t* to = room_.walked.data();
    for (const uint32_t number : room_.table) {
      *to = number - 1;
      to += number != 0;
    }
  }

  // Most numbers are in order already, none is far from its place.
  void sort() {
    uint32_t* const walked = room_.walked.data();
    uint64_t* const sorted = room_.sorted.data();
    for (size_t i = 0; i < count_; ++i) {
      const uint32_t number = walked[i];
      const uint64_t place = room_.places[number];
      size_t to = i;
      for (; to > 0 && sorted[to - 1] > place; --to) {
        sorted[to] = sorted[to - 1];
        walked[to] = walked[to - 1];
      }
      sorted[to] = place;
      walked[to] = number;
    }
  }

  std::vector<uint32_t> begins() const {
    const auto begin = room_.sorted.begin(), end = begin + count_;
    std::vector<uint32_t> begins(shards_ + 1, count_);
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      const size_t first = buckets_.begin_of(shard);
      if (first == buckets_.count()) continue;  // more shards than slots
      const auto at = std::lower_bound(begin, end, buckets_.first_place(first));
      begins[shard] = static_cast<uint32_t>(at - begin);
    }
    return begins;
  }

  std::span<const uint64_t> given_;
  uint32_t shards_;
  uint32_t* index_;
  Buckets buckets_;
  NumberRoom& room_;
  ptrdiff_t steps_left_;
  uint32_t count_ = 0;  // of numbers
};

}  // namespace

KeyOrder KeyOrder::of(std::span<const uint64_t> given, uint32_t slots, uint32_t shards) {
  if (hashes_rise(given)) return deal_in_order(given, slots, shards);
  return Sorter(given, shards).order(slots);
}

KeyOrder KeyOrder::distinct(std::span<const uint64_t> given, uint32_t slots, uint32_t shards,
                            uint32_t* index) {
  thread_local NumberRoom kept;
  NumberRoom fresh;
  Numberer numberer(given, slots, shards, index, given.size() > kRoomKeysKept ? fresh : kept);
  if (numberer.run()) return numberer.order();
  KeyOrder order = Sorter(given, shards).order(slots);
  for (uint32_t key = 0; key < order.keys.size(); ++key) {
    const uint32_t end = order.repeats() ? order.groups[key + 1] : key + 1;
    for (uint32_t at = order.repeats() ? order.groups[key] : key; at < end; ++at)
      index[order.sources[at]] = key;
  }
  order.sources.clear();
  order.groups.clear();
  return order;
}

}  // namespace commute
