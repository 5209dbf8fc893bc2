// SPDX-License-Identifier: Apache-2.0
// The order in which keys travel, rows in that order, sums of contributions, digests and half-width
// numbers: all against references that are slow and plain.
#include "store/keys.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "kernels.h"
#include "seeded.h"
#include "store/rows.h"
#include "store/wire.h"

namespace {

using namespace commute;
using Keys = std::vector<uint64_t>;
using Data = std::vector<std::byte>;

constexpr uint32_t kShards[] = {1, 2, 3, 5};
constexpr uint32_t kSlots[] = {16, 1024};
constexpr UpdateKind kKinds[] = {UpdateKind::kSum, UpdateKind::kAssign, UpdateKind::kMin,
                                 UpdateKind::kMax, UpdateKind::kProd,   UpdateKind::kAdam};

// The key of a hash, to make hashes that are hard to tell apart.
uint64_t unhashed(uint64_t hash) {
  const auto inverse = [](uint64_t odd) {
    uint64_t x = odd;
    for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
    return x;
  };
  const auto unshift = [](uint64_t x, int by) {
    uint64_t y = x;
    for (int i = by; i < 64; i += by) y = x ^ y >> by;
    return y;
  };
  hash = unshift(hash, 31) * inverse(0x94d049bb133111eb);
  hash = unshift(hash, 27) * inverse(0xbf58476d1ce4e5b9);
  return unshift(hash, 30);
}

// `different` of them, about; 0: any.
Keys random_keys(Rng& rng, size_t count, uint64_t different) {
  Keys keys(count);
  for (uint64_t& key : keys) key = different == 0 ? rng() : rng() % different;
  return keys;
}

// Sources, by shard and hash.
std::map<std::pair<uint32_t, uint64_t>, std::vector<uint32_t>> reference_order(const Keys& given,
                                                                               uint32_t slots,
                                                                               uint32_t shards) {
  std::map<std::pair<uint32_t, uint64_t>, std::vector<uint32_t>> order;
  for (uint32_t i = 0; i < given.size(); ++i) {
    const uint64_t hash = hash_of(given[i]);
    order[{slot_of(hash, slots) % shards, hash}].push_back(i);
  }
  return order;
}

// The same keys, each once; no copies to make, and every given one has its number.
void check_distinct(const KeyOrder& order, const Keys& given, uint32_t slots, uint32_t shards) {
  std::vector<uint32_t> index(given.size());
  const KeyOrder distinct = KeyOrder::distinct(given, slots, shards, index.data());
  CHECK(distinct.keys == order.keys);
  CHECK(distinct.begins == order.begins);
  CHECK(distinct.in_order());
  CHECK(!distinct.repeats());
  bool right = true;
  for (size_t i = 0; i < given.size(); ++i) right &= distinct.keys.at(index[i]) == given[i];
  CHECK(right);
}

void check_order(const Keys& given, uint32_t slots, uint32_t shards) {
  const KeyOrder order = KeyOrder::of(given, slots, shards);
  const auto expected = reference_order(given, slots, shards);
  Keys keys;
  std::vector<uint32_t> begins(shards + 1), sources, groups{0};
  for (const auto& [at, from] : expected) {
    keys.push_back(given[from.front()]);
    sources.insert(sources.end(), from.begin(), from.end());
    groups.push_back(static_cast<uint32_t>(sources.size()));
    for (uint32_t shard = at.first + 1; shard <= shards; ++shard) ++begins[shard];
  }
  if (keys.size() == given.size()) groups.clear();
  if (shards == 1 && keys == given) sources.clear();  // rows travel as they are given
  CHECK(order.keys == keys);
  CHECK(order.begins == begins);
  CHECK(order.sources == sources);
  CHECK(order.groups == groups);
  CHECK_EQ(order.repeats(), keys.size() < given.size());
  check_distinct(order, given, slots, shards);
}

void check_orders(const Keys& given) {
  for (const uint32_t shards : kShards)
    for (const uint32_t slots : kSlots) check_order(given, slots, shards);
  check_order(given, 1, 1);
}

TEST(keys_go_by_shard_and_hash) {
  Rng rng = seeded(31);
  for (const size_t count : {0, 1, 2, 3, 17, 63, 64, 65, 300, 5000})
    for (const uint64_t different : {0, 1, 2, 7, 100, 3000})
      check_orders(random_keys(rng, count, different));
}

// Each once and in the order of their hashes: they are dealt to the shards, and not sorted.
TEST(keys_that_are_in_order_already) {
  Rng rng = seeded(43);
  for (const size_t count : {0, 1, 2, 3, 17, 64, 300, 5000}) {
    const Keys given = KeyOrder::of(random_keys(rng, count, 0), 1, 1).keys;
    CHECK(KeyOrder::of(given, 1024, 1).in_order());
    check_orders(given);
    if (count < 3) continue;
    // Nearly so: one key twice, two the wrong way round, at the very end too.
    for (const size_t at : {size_t{0}, rng() % (count - 1), count - 2}) {
      Keys twice = given, swapped = given;
      twice[at + 1] = twice[at];
      std::swap(swapped[at], swapped[at + 1]);
      check_orders(twice);
      check_orders(swapped);
      CHECK(!KeyOrder::of(twice, 1024, 1).in_order());
      CHECK(!KeyOrder::of(swapped, 1024, 1).in_order());
    }
  }
}

TEST(every_key_is_legal) {
  check_orders({0, ~uint64_t{0}, 0, 1, ~uint64_t{0} - 1, ~uint64_t{0}, uint64_t{1} << 63});
  check_orders({unhashed(0), unhashed(~uint64_t{0}), unhashed(0)});
}

// An item has room for a part of the hash only.
TEST(hashes_that_differ_in_their_last_bits_are_told_apart) {
  Rng rng = seeded(32);
  CHECK_EQ(hash_of(unhashed(12345)), 12345u);
  for (const uint64_t spread : {2, 16, 256, 100000}) {
    Keys given = random_keys(rng, 500, 0);
    for (int i = 0; i < 2000; ++i) {
      const uint64_t near = rng() % 3 * 0x5555555555555555;
      given.push_back(unhashed(near + rng() % spread));
    }
    std::shuffle(given.begin(), given.end(), rng);
    check_orders(given);
  }
  Keys distinct;
  for (uint64_t i = 0; i < 40; ++i) distinct.push_back(unhashed(39 - i));
  check_orders(distinct);
}

TEST(keys_that_are_not_spread_are_ordered) {
  Rng rng = seeded(33);
  Keys one_slot;
  while (one_slot.size() < 3000) {
    const uint64_t key = rng();
    if (slot_of(hash_of(key), 1024) == 5) one_slot.push_back(key);
  }
  check_orders(one_slot);
  check_orders(KeyOrder::of(one_slot, 1024, 1).keys);  // in order already
  Keys skewed = random_keys(rng, 5000, 0);
  for (int i = 0; i < 5000; ++i) skewed.push_back(skewed[rng() % (1 + rng() % 30)]);
  std::shuffle(skewed.begin(), skewed.end(), rng);
  check_orders(skewed);
}

// Would take minutes if each key stepped over all that came before.
TEST(keys_that_crowd_a_bucket) {
  Rng rng = seeded(41);
  Keys crowd;
  for (uint64_t i = 0; i < 200'000; ++i) crowd.push_back(unhashed((uint64_t{7} << 60) + i));
  std::shuffle(crowd.begin(), crowd.end(), rng);
  const KeyOrder order = KeyOrder::of(crowd, 1024, 2);
  check_distinct(order, crowd, 1024, 2);
  // A few of them among others, up to the very end of the table.
  for (const size_t count : {10, 100, 250, 300, 1000}) {
    Keys given = random_keys(rng, 5000, 0);
    for (uint64_t i = 0; i < count; ++i) given.push_back(unhashed(~uint64_t{0} - i));
    std::shuffle(given.begin(), given.end(), rng);
    check_orders(given);
  }
}

// Would take hours if it were quadratic in the copies of a key.
TEST(millions_of_a_few_keys) {
  for (const uint64_t different : {1, 3, 40}) {
    Keys given(2'000'000);
    for (size_t i = 0; i < given.size(); ++i) given[i] = i * i % different;
    const KeyOrder order = KeyOrder::of(given, 1024, 2);
    CHECK_EQ(order.keys.size(), std::set<uint64_t>(given.begin(), given.end()).size());
    CHECK_EQ(order.groups.size(), order.keys.size() + 1);
    CHECK_EQ(order.groups.back(), given.size());
    check_distinct(order, given, 1024, 2);
    bool right = true;
    for (size_t k = 0; k < order.keys.size(); ++k)
      for (uint32_t i = order.groups[k]; i < order.groups[k + 1]; ++i)
        right &= given[order.sources[i]] == order.keys[k] &&
                 (i == order.groups[k] || order.sources[i - 1] < order.sources[i]);
    CHECK(right);
  }
}

// ---- Rows ----

TableSpec spec_of(UpdateKind kind, Dtype dtype, uint64_t width) {
  TableSpec spec;
  spec.sparse = true;
  spec.dtype = dtype;
  spec.wire = dtype;
  spec.count = width;
  spec.slots = 1024;
  spec.update.kind = kind;
  return spec;
}

Data random_rows(Rng& rng, const TableSpec& spec, size_t rows) {
  Data data(rows * spec.bytes());
  for (size_t at = 0; at < data.size(); at += item_bytes(spec.dtype)) {
    if (spec.dtype == Dtype::kFloat32) {
      const float value = static_cast<float>(static_cast<int64_t>(rng() % 4001) - 2000) / 7;
      std::memcpy(&data[at], &value, sizeof value);
    } else {
      const uint64_t bits = rng();
      std::memcpy(&data[at], &bits, item_bytes(spec.dtype));
    }
  }
  return data;
}

// One row after the other into the same one, as they come.
using Table = std::map<uint64_t, Data>;  // by hash
void contribute(Table& table, const TableSpec& spec, uint64_t key, const std::byte* row) {
  const auto [at, is_new] = table.try_emplace(hash_of(key), row, row + spec.bytes());
  Data& value = at->second;
  if (is_new) return;
  if (spec.update.kind == UpdateKind::kAssign)
    value.assign(row, row + spec.bytes());
  else
    kernels().reduce_for(spec.dtype, spec.update.combines_by())(value.data(), value.data(), row,
                                                                spec.count);
}

Table contributed(const TableSpec& spec, const Keys& keys, const Data& rows) {
  Table table;
  for (size_t i = 0; i < keys.size(); ++i)
    contribute(table, spec, keys[i], rows.data() + i * spec.bytes());
  return table;
}

void check_gather(Rng& rng, const TableSpec& spec, const Keys& given, uint32_t shards) {
  const KeyOrder order = KeyOrder::of(given, spec.slots, shards);
  const Data data = random_rows(rng, spec, given.size());
  const Table expected = contributed(spec, given, data);
  Data gathered(order.keys.size() * spec.bytes());
  // In several parts, as messages take it.
  for (size_t first = 0; first < order.keys.size();) {
    const size_t count = std::min(order.keys.size() - first, 1 + rng() % 700);
    gather_rows(order, spec, first, count, data.data(), gathered.data() + first * spec.bytes());
    first += count;
  }
  for (size_t i = 0; i < order.keys.size(); ++i) {
    const auto row = gathered.begin() + static_cast<ptrdiff_t>(i * spec.bytes());
    const Data& wanted = expected.at(hash_of(order.keys[i]));
    CHECK(std::equal(wanted.begin(), wanted.end(), row));
  }
}

TEST(rows_of_repeated_keys_are_combined) {
  Rng rng = seeded(34);
  for (const UpdateKind kind : kKinds) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kInt64, Dtype::kUint8, Dtype::kFloat16}) {
      for (const uint64_t width : {1, 2, 3, 4, 8, 13, 16, 32, 33, 200}) {
        const TableSpec spec = spec_of(kind, dtype, width);
        for (const uint64_t different : {0, 1, 5, 200})
          check_gather(rng, spec, random_keys(rng, 400, different), kShards[rng() % 4]);
      }
    }
  }
  check_gather(rng, spec_of(UpdateKind::kSum, Dtype::kFloat32, 1), random_keys(rng, 9000, 3000), 2);
  check_gather(rng, spec_of(UpdateKind::kSum, Dtype::kFloat32, 1), {}, 2);
  const Keys in_order = KeyOrder::of(random_keys(rng, 3000, 0), 1, 1).keys;
  for (const uint32_t shards : kShards)
    check_gather(rng, spec_of(UpdateKind::kSum, Dtype::kFloat32, 3), in_order, shards);
}

TEST(rows_of_distinct_keys_are_copied_as_they_lie) {
  Rng rng = seeded(42);
  const TableSpec spec = spec_of(UpdateKind::kSum, Dtype::kFloat32, 3);
  const Keys given = random_keys(rng, 3000, 500);
  std::vector<uint32_t> index(given.size());
  const KeyOrder order = KeyOrder::distinct(given, spec.slots, 2, index.data());
  const Data data = random_rows(rng, spec, order.keys.size());
  Data gathered(data.size()), back(data.size());
  const size_t half = order.keys.size() / 2, at = half * spec.bytes();
  gather_rows(order, spec, 0, half, data.data(), gathered.data());
  gather_rows(order, spec, half, order.keys.size() - half, data.data(), &gathered[at]);
  scatter_rows(order, spec.bytes(), 0, half, data.data(), back.data());
  scatter_rows(order, spec.bytes(), half, order.keys.size() - half, &data[at], back.data());
  CHECK(gathered == data);
  CHECK(back == data);
}

TEST(rows_come_back_to_all_their_keys) {
  Rng rng = seeded(35);
  for (const size_t row_bytes : {1, 4, 8, 16, 24, 32, 64, 128, 300}) {
    for (const uint64_t different : {0, 1, 30, 1000, 2000}) {
      Keys given = random_keys(rng, 1000, different);
      if (different == 2000) given = KeyOrder::of(given, 1, 1).keys;  // in order already
      const KeyOrder order = KeyOrder::of(given, 1024, kShards[rng() % 4]);
      Data rows(order.keys.size() * row_bytes), got(given.size() * row_bytes);
      for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = static_cast<std::byte>(order.keys[i / row_bytes] * 31 + i % row_bytes);
      const size_t half = order.keys.size() / 2;
      scatter_rows(order, row_bytes, 0, half, rows.data(), got.data());
      scatter_rows(order, row_bytes, half, order.keys.size() - half, &rows[half * row_bytes],
                   got.data());
      bool right = true;
      for (size_t i = 0; i < got.size(); ++i)
        right &= got[i] == static_cast<std::byte>(given[i / row_bytes] * 31 + i % row_bytes);
      CHECK(right);
    }
  }
}

// ---- Sums ----

void check_taken(const Table& expected, const TableSpec& spec, const RowBytes& taken) {
  CHECK_EQ(taken.keys.size(), expected.size());
  CHECK_EQ(taken.rows.size(), expected.size() * spec.bytes());
  if (taken.keys.size() != expected.size()) return;
  size_t i = 0;
  for (const auto& [hash, row] : expected) {
    CHECK_EQ(hash_of(taken.keys[i]), hash);
    CHECK(std::equal(row.begin(), row.end(),
                     taken.rows.begin() + static_cast<ptrdiff_t>(i * spec.bytes())));
    ++i;
  }
}

TEST(sums_combine_in_the_order_of_adding) {
  Rng rng = seeded(36);
  for (const UpdateKind kind : kKinds) {
    for (const uint64_t different : {0, 1, 50, 2000}) {
      const TableSpec spec = spec_of(kind, Dtype::kFloat32, 3);
      RowSum sum;
      for (int round = 0; round < 3; ++round) {  // it can be used again
        Table expected;
        size_t largest = 0;
        for (uint64_t piece = rng() % 20; piece > 0; --piece) {
          const Keys keys =
              KeyOrder::of(random_keys(rng, rng() % 300, different), spec.slots, 1).keys;
          const Data rows = random_rows(rng, spec, keys.size());
          for (size_t i = 0; i < keys.size(); ++i)
            contribute(expected, spec, keys[i], rows.data() + i * spec.bytes());
          sum.add(spec, keys, rows);
          largest = std::max(largest, keys.size());
          CHECK(sum.bytes() <= (2 * expected.size() + largest) * (8 + spec.bytes()));
        }
        CHECK_EQ(sum.empty(), expected.empty());
        check_taken(expected, spec, sum.take(spec));
        CHECK(sum.empty());
        CHECK_EQ(sum.bytes(), 0u);
      }
    }
  }
}

TEST(sums_of_pieces_in_order) {
  Rng rng = seeded(37);
  const TableSpec spec = spec_of(UpdateKind::kSum, Dtype::kFloat32, 2);
  RowSum sum;
  Table expected;
  for (int worker = 0; worker < 3; ++worker) {
    const Keys keys = KeyOrder::of(random_keys(rng, 3000, 5000), spec.slots, 1).keys;
    const Data rows = random_rows(rng, spec, keys.size());
    for (size_t first = 0; first < keys.size();) {
      const size_t count = std::min(keys.size() - first, rng() % 400);
      sum.add(spec, std::span(keys).subspan(first, count),
              Bytes(rows).subspan(first * spec.bytes(), count * spec.bytes()));
      first += count;
    }
    for (size_t i = 0; i < keys.size(); ++i)
      contribute(expected, spec, keys[i], rows.data() + i * spec.bytes());
  }
  check_taken(expected, spec, sum.take(spec));
}

// ---- Digests ----

TEST(different_lists_have_different_digests) {
  Rng rng = seeded(38);
  std::set<Digest> seen;
  size_t lists = 0;
  const auto see = [&](const Keys& keys) {
    seen.insert(digest_of(keys));
    ++lists;
  };
  for (size_t zeros = 0; zeros < 70; ++zeros) see(Keys(zeros));
  for (const size_t count : {1, 2, 3, 9}) {
    const Keys keys = random_keys(rng, count, 0);
    see(keys);
    for (size_t i = 0; i < 64 * count; ++i) {
      Keys other = keys;
      other[i / 64] ^= uint64_t{1} << i % 64;
      see(other);
      for (size_t j = 0; j < i; ++j) {
        Keys third = other;
        third[j / 64] ^= uint64_t{1} << j % 64;
        see(third);
      }
    }
  }
  for (uint64_t a = 1; a < 60; ++a)
    for (uint64_t b = 1; b < 60; ++b)
      for (uint64_t c = 1; c < 60; ++c) see({a, b, c});
  CHECK_EQ(seen.size(), lists);
  CHECK(digest_of(Keys{1, 2}) == digest_of(Keys{1, 2}));
}

// Of a bit more or less, half of the digest's bits change; each half alone is good, too.
TEST(digests_spread) {
  Rng rng = seeded(39);
  for (const size_t count : {1, 2, 5, 100}) {
    double low = 0, high = 0;
    constexpr int kTimes = 4000;
    for (int i = 0; i < kTimes; ++i) {
      Keys keys = random_keys(rng, count, 1000);
      const Digest before = digest_of(keys);
      keys[rng() % count] ^= uint64_t{1} << rng() % 64;
      const Digest after = digest_of(keys);
      low += std::popcount(before.low ^ after.low);
      high += std::popcount(before.high ^ after.high);
    }
    CHECK(std::abs(low / kTimes - 32) < 0.5);
    CHECK(std::abs(high / kTimes - 32) < 0.5);
  }
}

// Clients and shards may run on different machines.
TEST(digests_are_the_same_everywhere) {
  CHECK_EQ(digest_of(Keys{}).low, 0x4747eeff3cbb7102u);
  CHECK_EQ(digest_of(Keys{1, 2, 3}).low, 0x4fa34e1cb482e380u);
  CHECK_EQ(digest_of(Keys{1, 2, 3}).high, 0xc0912b22b5f024b4u);
}

// ---- Half-width numbers ----

struct Half {
  Dtype dtype;
  int mantissa_bits;
  int bias;
  uint16_t infinity;
};
constexpr Half kHalves[] = {{Dtype::kFloat16, 10, 15, 0x7c00}, {Dtype::kBfloat16, 7, 127, 0x7f80}};

double decoded(const Half& half, uint16_t bits) {
  const int magnitude = bits & 0x7fff;
  const double sign = bits >= 0x8000 ? -1 : 1;
  if (magnitude == half.infinity) return sign * std::numeric_limits<double>::infinity();
  if (magnitude > half.infinity) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = magnitude >> half.mantissa_bits;
  const int one = 1 << half.mantissa_bits;
  const int mantissa = magnitude % one + (exponent > 0 ? one : 0);
  return sign * std::ldexp(mantissa, std::max(exponent, 1) - half.bias - half.mantissa_bits);
}

uint16_t encoded(const Half& half, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value))
    return static_cast<uint16_t>(half.infinity + (half.infinity & -half.infinity) / 2);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | half.infinity);
  const int exponent = std::max(value == 0 ? -9999 : std::ilogb(value), 1 - half.bias);
  const double steps = std::nearbyint(std::ldexp(std::fabs(value), half.mantissa_bits - exponent));
  // A mantissa that rounds up to the next power of two carries into the exponent by itself.
  const int magnitude =
      ((exponent + half.bias - 1) << half.mantissa_bits) + static_cast<int>(steps);
  return static_cast<uint16_t>(sign | std::min<int>(magnitude, half.infinity));
}

template <class T>
std::vector<T> items(const Data& data) {
  std::vector<T> values(data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data.data(), data.size());
  return values;
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST(halves_widen_exactly_and_come_back) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Half& half : kHalves) {
    const Data wide = widened(half.dtype, bytes_of(all));
    const auto floats = items<float>(wide);
    const auto back = items<uint16_t>(narrowed(half.dtype, wide));
    for (size_t i = 0; i < all.size(); ++i) {
      const double expected = decoded(half, all[i]);
      if (std::isnan(expected)) {
        CHECK(std::isnan(floats[i]));
        CHECK_EQ(back[i], encoded(half, expected));
      } else {
        CHECK_EQ(static_cast<double>(floats[i]), expected);
        CHECK_EQ(std::signbit(floats[i]), all[i] >= 0x8000);
        CHECK_EQ(back[i], all[i]);
      }
    }
  }
}

void check_narrowed(const Half& half, const std::vector<float>& floats) {
  const auto narrow = items<uint16_t>(narrowed(half.dtype, bytes_of(floats)));
  CHECK_EQ(narrow.size(), floats.size());
  for (size_t i = 0; i < floats.size(); ++i) CHECK_EQ(narrow[i], encoded(half, floats[i]));
}

TEST(floats_narrow_to_the_nearest_half) {
  Rng rng = seeded(40);
  for (const Half& half : kHalves) {
    // Around every half and every middle between two: ties go to even.
    std::vector<float> floats;
    for (uint32_t i = 0; i < half.infinity; ++i) {
      const double low = decoded(half, static_cast<uint16_t>(i));
      const double high = i + 1u == half.infinity
                              ? 2 * low - decoded(half, static_cast<uint16_t>(i - 1))
                              : decoded(half, static_cast<uint16_t>(i + 1));
      for (const double value : {low, low / 2 + high / 2}) {
        const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
        for (const uint32_t near : {bits - (bits > 0), bits, bits + 1})
          for (const uint32_t sign : {0u, 1u << 31})
            floats.push_back(std::bit_cast<float>(near | sign));
      }
    }
    check_narrowed(half, floats);
    floats.resize(1 << 20);
    for (float& value : floats) value = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    check_narrowed(half, floats);
    check_narrowed(half,
                   {0.0f, -0.0f, std::numeric_limits<float>::infinity(), -65520.0f, 65519.0f,
                    std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                    std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu)});
    for (size_t count = 0; count < 40; ++count) {  // ends of vectors
      std::vector<float> few(count);
      for (float& value : few) value = static_cast<float>(rng() % 1000) / 3;
      check_narrowed(half, few);
    }
  }
}

TEST(half_a_value_is_refused) {
  bool refused = false;
  try {
    widened(Dtype::kFloat16, Data(3));
  } catch (const std::invalid_argument& error) {
    refused = std::string(error.what()).find("float16") != std::string::npos;
  }
  CHECK(refused);
}

}  // namespace
