// SPDX-License-Identifier: Apache-2.0
// Rows against std::unordered_map, and what they promise about places, order and memory.
#include "../store/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace commute {

// The first two of rows.h, of every bucket.
struct RowsInvariants {
  static bool hold(const Rows& rows) {
    const uint32_t buckets = rows.buckets();
    uint32_t least = buckets;  // home of what is further on
    for (uint32_t i = buckets; i-- > 0;) {
      std::byte* const here = rows.bucket(i);
      const bool marked = (rows.meta(here) & Rows::kPassedOn) != 0;
      const bool full = std::popcount(rows.used(here)) == int(rows.layout_.entries);
      if (marked != (least <= i) || (marked && !full)) return false;
      for (uint32_t left = rows.used(here); left != 0; left &= left - 1) {
        const uint64_t key = Rows::key(here, uint32_t(std::countr_zero(left)));
        const uint32_t home = rows.home_of(rest_of(hash_of(key), rows.slots_));
        if (home > i) return false;
        least = std::min(least, home);
      }
    }
    return true;
  }
};

}  // namespace commute

using namespace commute;

namespace {

constexpr uint32_t kSlots = 1024;
constexpr uint64_t kMark = 0x6d61726b;

using Random = std::mt19937_64;

Update update_of(UpdateKind kind, double lr_decay = 0) {
  Update update;
  update.kind = kind;
  update.lr = 0.1;
  update.lr_decay = lr_decay;
  update.initial = 0.5;
  return update;
}

// Undoes hash_of.
uint64_t key_of(uint64_t hash) {
  const auto unshifted = [](uint64_t x, int shift) {
    uint64_t y = x;
    for (int known = shift; known < 64; known += shift) y = x ^ y >> shift;
    return y;
  };
  uint64_t key = unshifted(hash, 31);
  key *= 0x319642b2d24d8ec3;
  key = unshifted(key, 27);
  key *= 0x96de1b173f119089;
  return unshifted(key, 30);
}

// One slot's rows, and what should be in them.
struct Pair {
  explicit Pair(const RowLayout& layout, Initial initial = {}, double first_state = 0,
                uint32_t slots = kSlots)
      : slots(slots), initial(initial), rows(layout, initial, first_state, slots, pages) {}

  uint64_t rest(uint64_t key) const { return rest_of(hash_of(key), slots); }
  Rows::Place find(uint64_t key) const { return rows.find(key, rest(key)); }

  // Makes the row if need be and writes a new stamp into all of its value.
  void write(uint64_t key, uint64_t stamp, Rows::Place hint = Rows::kUnknown) {
    std::byte* const row = rows.at_or_make(key, rest(key), hint);
    const bool fresh = !expected.contains(key);
    CHECK_EQ(rows.size(), expected.size() + fresh);
    for (size_t i = 0; i < rows.layout().value_bytes; ++i) row[i] = byte_of(key, stamp, i);
    if (rows.layout().step_at >= 0) {
      auto& step = *reinterpret_cast<uint32_t*>(row + rows.layout().step_at);
      CHECK_EQ(step, fresh ? 0 : uint32_t(expected[key] ^ kMark));
      step = uint32_t(stamp ^ kMark);
    }
    expected[key] = stamp;
  }
  void drop(uint64_t key) { CHECK_EQ(rows.drop(key, rest(key)), expected.erase(key) == 1); }

  void check(uint64_t key) const {
    const Rows::Place place = find(key);
    std::byte* const row = rows.at(place, key);
    const auto found = expected.find(key);
    CHECK_EQ(row != nullptr, found != expected.end());
    CHECK_EQ(row != nullptr, place != Rows::kAbsent);
    const RowLayout& layout = rows.layout();
    std::vector<std::byte> value(layout.value_bytes), wanted(layout.value_bytes);
    rows.copy_value(key, rest(key), place, value.data());
    if (found == expected.end())
      initial_row(initial, layout.dtype, key, wanted.data(), layout.width);
    else
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = byte_of(key, found->second, i);
    CHECK(value == wanted);
    rows.copy_value(key, rest(key), Rows::kUnknown, value.data());
    CHECK(value == wanted);
    if (row == nullptr) return;
    CHECK_EQ(reinterpret_cast<uintptr_t>(row) % item_bytes(layout.dtype), 0u);
    if (layout.step_at >= 0)
      CHECK_EQ(*reinterpret_cast<uint32_t*>(row + layout.step_at), uint32_t(found->second ^ kMark));
  }

  void check_all() const {
    CHECK(RowsInvariants::hold(rows));
    CHECK_EQ(rows.size(), expected.size());
    for (const auto& [key, stamp] : expected) check(key);
    size_t seen = 0;
    rows.each([&](uint64_t key, const std::byte* row) {
      const auto found = expected.find(key);
      CHECK(found != expected.end());
      if (found != expected.end()) CHECK(row[0] == byte_of(key, found->second, 0));
      ++seen;
    });
    CHECK_EQ(seen, expected.size());
    const std::vector<uint64_t> keys = rows.keys();
    CHECK_EQ(keys.size(), expected.size());
    CHECK(std::is_sorted(keys.begin(), keys.end(),
                         [](uint64_t a, uint64_t b) { return hash_of(a) < hash_of(b); }));
    for (const uint64_t key : keys) CHECK(expected.contains(key));
  }

  static std::byte byte_of(uint64_t key, uint64_t stamp, size_t i) {
    return std::byte(hash_of(key + stamp * 31 + i / 8) >> i % 8 * 8);
  }

  uint32_t slots;
  Initial initial;
  std::shared_ptr<Pages> pages = std::make_shared<Pages>();
  Rows rows;
  std::unordered_map<uint64_t, uint64_t> expected;  // stamp by key
};

// `range` different keys of one slot.
uint64_t some_key(Random& random, uint64_t range, uint32_t slots) {
  const uint64_t rest = hash_of(random() % range + 1);
  return key_of(rest / slots + (slots == 1 ? 0 : (uint64_t{7} << 32) * (0x100000000 / slots)));
}

void churn(Pair& pair, size_t turns, uint64_t range, uint64_t seed) {
  Random random(seed);
  for (size_t turn = 0; turn < turns; ++turn) {
    const uint64_t key = some_key(random, range, pair.slots);
    const uint64_t die = random() % 10;
    if (die < 5)
      pair.write(key, turn, die < 2 ? pair.find(key) : Rows::kUnknown);
    else if (die < 7)
      pair.drop(key);
    else
      pair.check(key);
  }
  pair.check_all();
}

const std::vector<UpdateKind> kAll = {
    UpdateKind::kSum,  UpdateKind::kAssign, UpdateKind::kMin,      UpdateKind::kMax,
    UpdateKind::kProd, UpdateKind::kSgd,    UpdateKind::kMomentum, UpdateKind::kAdagrad,
    UpdateKind::kAdam, UpdateKind::kFtrl};

template <class F>
void each_layout(F f) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kInt8, Dtype::kFloat16})
    for (const uint32_t width : {1, 2, 3, 4, 5, 16, 4096})
      for (const UpdateKind kind : kAll)
        for (const double lr_decay : {0.0, 0.1})
          for (const bool expires : {false, true}) {
            const Update update = update_of(kind, lr_decay);
            if (lr_decay != 0 && kind != UpdateKind::kAdagrad) continue;
            if (update.takes(dtype)) f(RowLayout(dtype, width, update, expires), update);
          }
}

TEST(keys_come_back_from_hashes) {
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t key = random();
    CHECK_EQ(key_of(hash_of(key)), key);
  }
}

TEST(layouts_are_aligned_and_buckets_used_well) {
  each_layout([](const RowLayout& layout, const Update& update) {
    const size_t item = item_bytes(layout.dtype);
    const bool counts = update.kind == UpdateKind::kMomentum || update.kind == UpdateKind::kAdam ||
                        update.lr_decay != 0;
    CHECK_EQ(layout.value_bytes, layout.width * item);
    CHECK_EQ(layout.states, update.states());
    CHECK_EQ(layout.bytes % item, 0u);
    CHECK_EQ(layout.step_at >= 0, counts);
    size_t end = layout.value_bytes * (1 + layout.states);
    for (const ptrdiff_t at : {layout.step_at, layout.touched_at}) {
      if (at < 0) continue;
      CHECK(size_t(at) >= end && size_t(at) < end + 4);
      CHECK_EQ(at % 4, 0);
      CHECK_EQ(layout.bytes % 4, 0u);
      end = size_t(at) + 4;
    }
    CHECK(layout.bytes >= end && layout.bytes < end + std::max<size_t>(item, 4));
    const size_t entry = 8 + (layout.is_inline ? layout.bytes : 4);
    const size_t used = layout.entries * entry + 4;
    CHECK_EQ(layout.is_inline, layout.width <= kInlineWidth);
    CHECK(layout.entries >= 1 && layout.entries <= 7);
    CHECK(used <= layout.bucket_bytes && used * 100 >= layout.bucket_bytes * 70);
    CHECK(std::has_single_bit(layout.bucket_bytes) && layout.bucket_bytes <= 256);
  });
  const RowLayout wide(Dtype::kFloat32, 16, update_of(UpdateKind::kAdagrad), false);
  CHECK_EQ(wide.bytes, 128u);
  CHECK_EQ(wide.bucket_bytes, 64u);
  CHECK_EQ(wide.entries, 5u);
  const RowLayout narrow(Dtype::kInt8, 1, update_of(UpdateKind::kSum), true);
  CHECK_EQ(narrow.touched_at, 4);
  CHECK_EQ(narrow.bytes, 8u);
}

TEST(rows_behave_like_a_map_in_every_layout) {
  uint64_t seed = 0;
  each_layout([&](const RowLayout& layout, const Update&) {
    ++seed;
    Pair pair(layout, {Initial::Kind::kConstant, 3, 0, 0}, 0);
    if (layout.width > 100)
      churn(pair, 100, 60, seed);
    else
      churn(pair, 8'000, 1 + 3'000 * (seed % 3), seed);
  });
}

TEST(rows_behave_like_a_map_through_many_growths) {
  for (const uint32_t width : {1, 2, 4, 5, 16}) {
    for (const uint32_t slots : {1u, 2u, kSlots, 1u << 20}) {
      const Update update = update_of(width == 2 ? UpdateKind::kAdam : UpdateKind::kSum);
      Pair pair(RowLayout(Dtype::kFloat32, width, update, false), {}, 0, slots);
      churn(pair, 60'000, 40'000, width);
    }
  }
}

TEST(fresh_rows_are_initial_also_when_used_again) {
  for (const uint32_t width : {1, 3, 5, 16}) {
    const Initial initial{Initial::Kind::kNormal, 1, 2, 7};
    const RowLayout layout(Dtype::kFloat64, width, update_of(UpdateKind::kAdam), true);
    Pair pair(layout, initial, 0.25);
    for (uint64_t key = 0; key < 1000; ++key) {
      std::byte* const row = pair.rows.at_or_make(key, pair.rest(key), Rows::kAbsent);
      std::vector<std::byte> wanted(layout.bytes);
      auto* const elements = reinterpret_cast<double*>(wanted.data());
      initial_row(initial, layout.dtype, key, elements, width);
      std::fill(elements + width, elements + 3 * width, 0.25);
      CHECK_EQ(std::memcmp(row, wanted.data(), layout.bytes), 0);
      std::memset(row, 0xa5, layout.bytes);
      if (key % 3 != 0) CHECK(pair.rows.drop(key, pair.rest(key)));
    }
    CHECK_EQ(pair.rows.size(), 334u);
  }
}

TEST(every_uint64_is_a_key) {
  for (const uint32_t width : {1, 16}) {
    Pair pair(RowLayout(Dtype::kFloat32, width, update_of(UpdateKind::kSum), false), {}, 0, 1);
    const std::vector<uint64_t> keys = {0, 1, ~uint64_t{0}, key_of(0), key_of(~uint64_t{0})};
    for (const uint64_t key : keys) pair.check(key);
    for (const uint64_t key : keys) pair.write(key, 5);
    pair.check_all();
    for (uint64_t key = 2; key < 1000; ++key) pair.write(key, 1);
    pair.check_all();
    for (const uint64_t key : keys) pair.drop(key);
    for (const uint64_t key : keys) pair.check(key);
    pair.check_all();
  }
}

// All belong in one bucket, in the midst or at the very end, however large the table.
TEST(keys_that_were_chosen_to_collide_are_kept) {
  for (const uint32_t width : {2, 16}) {
    for (const uint64_t top : {uint64_t{0x123456789a} << 24, ~uint64_t{0} << 24}) {
      Pair pair(RowLayout(Dtype::kFloat32, width, update_of(UpdateKind::kSgd), false), {}, 0, 1);
      constexpr uint64_t kCount = 10'000;
      for (uint64_t i = 0; i < kCount; ++i) pair.write(key_of(top + i * 13), i);
      CHECK_EQ(pair.rows.size(), kCount);
      for (uint64_t i = 0; i < 3'000; ++i) pair.write(hash_of(i), i);  // ordinary ones in between
      pair.check_all();
      for (uint64_t i = 0; i < kCount; i += 1 + i % 3) pair.drop(key_of(top + i * 13));
      pair.check_all();
      for (uint64_t i = 0; i < kCount; ++i) pair.drop(key_of(top + i * 13));
      for (uint64_t i = 0; i < 3'000; ++i) pair.check(hash_of(i));
      pair.check_all();
    }
  }
}

TEST(places_stay_or_are_noticed) {
  for (const uint32_t width : {2, 16}) {
    Pair pair(RowLayout(Dtype::kFloat32, width, update_of(UpdateKind::kAdagrad), false));
    constexpr uint64_t kCount = 200;
    std::vector<Rows::Place> places;
    std::vector<std::byte*> rows;
    for (uint64_t key = 0; key < kCount; ++key) pair.write(key, key);
    for (uint64_t key = 0; key < kCount; ++key) {
      places.push_back(pair.find(key));
      rows.push_back(pair.rows.at(places.back(), key));
    }
    for (uint64_t key = kCount; key < 20'000; ++key) pair.write(key, key);
    size_t moved = 0;
    for (uint64_t key = 0; key < kCount; ++key) {
      std::byte* const row = pair.rows.at(places[key], key);
      moved += row == nullptr;
      if (width == 16) CHECK(row == rows[key]);
      if (row != nullptr) CHECK(row[1] == Pair::byte_of(key, key, 1));
      pair.write(key, key + 1, places[key]);
      std::vector<std::byte> value(pair.rows.layout().value_bytes);
      pair.rows.copy_value(key, pair.rest(key), places[key], value.data());
      CHECK(value[1] == Pair::byte_of(key, key + 1, 1));
    }
    CHECK(width == 16 ? moved == 0 : moved > kCount / 2);
    pair.check_all();
  }
}

// A key that was not there when it was looked up may have been made since.
TEST(an_absent_place_is_no_proof) {
  for (const uint32_t width : {1, 16}) {
    Pair pair(RowLayout(Dtype::kFloat32, width, update_of(UpdateKind::kSum), false));
    CHECK_EQ(pair.find(5), Rows::kAbsent);
    pair.write(5, 1);
    pair.write(5, 2, Rows::kAbsent);
    CHECK_EQ(pair.rows.size(), 1u);
    pair.check_all();
    CHECK(pair.rows.at(Rows::kAbsent, 5) == nullptr);
    CHECK(pair.rows.at(Rows::kUnknown, 5) == nullptr);
    pair.rows.prefetch_bucket(pair.rows.home_of(pair.rest(5)));
    pair.rows.prefetch_after(pair.rows.home_of(pair.rest(5)));
    pair.rows.prefetch_row(Rows::kAbsent, 64);
    pair.rows.prefetch_row(pair.find(5), 64);
  }
}

TEST(nothing_is_taken_before_the_first_row) {
  Pair pair(RowLayout(Dtype::kFloat32, 16, update_of(UpdateKind::kSum), false));
  pair.rows.prefetch_bucket(pair.rows.home_of(pair.rest(1)));
  pair.rows.prefetch_after(pair.rows.home_of(pair.rest(1)));
  pair.check(1);
  pair.drop(1);
  CHECK(pair.rows.keys().empty());
  CHECK_EQ(pair.rows.memory(), 0u);
  CHECK_EQ(pair.pages->bytes(), 0u);
  pair.write(1, 1);
  CHECK(pair.rows.memory() > 0 && pair.rows.memory() <= 12'288);
  CHECK_EQ(pair.rows.memory(), pair.pages->bytes());
}

TEST(memory_is_bounded_at_every_size) {
  const struct {
    uint32_t width;
    UpdateKind kind;
    double bound;  // bytes per row
  } cases[] = {{16, UpdateKind::kAdagrad, 1.3 * (8 + 64 + 64)},
               {1, UpdateKind::kFtrl, 2 * 20},
               {1, UpdateKind::kSum, 2 * 12},
               {2, UpdateKind::kAdam, 2 * 36},
               {4, UpdateKind::kAdagrad, 2 * 40}};
  for (const auto& [width, kind, bound] : cases) {
    Pair pair(RowLayout(Dtype::kFloat32, width, update_of(kind), false));
    for (uint64_t key = 0; key < 20'000; ++key) {
      pair.rows.at_or_make(key, pair.rest(key), Rows::kUnknown);
      if (pair.rows.size() >= 5'000)
        CHECK(double(pair.rows.memory()) <= bound * double(pair.rows.size()));
    }
  }
}

// Rows come and go, never many at once: neither memory nor look-ups get longer for it.
TEST(coming_and_going_takes_no_more_memory) {
  for (const uint32_t width : {1, 16}) {
    Pair pair(RowLayout(Dtype::kFloat32, width, update_of(UpdateKind::kSum), true));
    constexpr uint64_t kAlive = 2'000;
    size_t memory = 0;
    for (uint64_t key = 0; key < 100 * kAlive; ++key) {
      pair.rows.at_or_make(key, pair.rest(key), Rows::kUnknown);
      if (key >= kAlive) CHECK(pair.rows.drop(key - kAlive, pair.rest(key - kAlive)));
      if (key == 2 * kAlive) memory = pair.rows.memory();
    }
    CHECK_EQ(pair.rows.size(), kAlive);
    CHECK_EQ(pair.rows.memory(), memory);
    CHECK(RowsInvariants::hold(pair.rows));
  }
}

TEST(tables_give_their_memory_back) {
  const auto pages = std::make_shared<Pages>();
  const RowLayout layout(Dtype::kFloat32, 16, update_of(UpdateKind::kSum), false);
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<std::unique_ptr<Rows>> tables;
    for (int i = 0; i < 20; ++i)
      tables.push_back(std::make_unique<Rows>(layout, Initial{}, 0, kSlots, pages));
    size_t memory = 0;
    for (auto& rows : tables) {
      for (uint64_t key = 0; key < 1'000; ++key)
        std::memset(rows->at_or_make(key, rest_of(hash_of(key), kSlots), Rows::kUnknown), 0xff,
                    layout.bytes);
      memory += rows->memory();
    }
    CHECK_EQ(pages->bytes(), memory);
    tables.clear();
    CHECK_EQ(pages->bytes(), 0u);
  }
}

TEST(blocks_are_zeros_apart_and_aligned) {
  Pages pages;
  std::vector<std::pair<std::byte*, size_t>> blocks;
  Random random(3);
  for (int turn = 0; turn < 4'000; ++turn) {
    const size_t bytes =
        std::initializer_list<size_t>{100, 4096, 8192, 98'304}.begin()[random() % 4];
    std::byte* const block = pages.take(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block) % 64, 0u);
    CHECK(std::all_of(block, block + bytes, [](std::byte b) { return b == std::byte{0}; }));
    std::memset(block, 0xff, bytes);
    blocks.emplace_back(block, bytes);
    if (random() % 3 != 0) continue;
    std::swap(blocks[random() % blocks.size()], blocks.back());
    pages.give(blocks.back().first, blocks.back().second);
    blocks.pop_back();
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); ++i)
    CHECK(blocks[i - 1].first + blocks[i - 1].second <= blocks[i].first);
  std::byte* const large = pages.take(100 << 20);  // more than a region
  large[(100 << 20) - 1] = std::byte{1};
  bool refused = false;
  try {
    pages.take(size_t{1} << 60);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused);
}

template <class T>
std::vector<T> drawn(const Initial& initial, Dtype dtype, uint64_t first, size_t rows,
                     size_t width) {
  std::vector<T> all(rows * width);
  for (size_t i = 0; i < rows; ++i) initial_row(initial, dtype, first + i, &all[i * width], width);
  return all;
}

template <class T>
void check_moments(const std::vector<T>& all, double mean, double variance, double tolerance) {
  double sum = 0, squares = 0;
  for (const T x : all) sum += double(x);
  for (const T x : all)
    squares += (double(x) - sum / double(all.size())) * (double(x) - sum / double(all.size()));
  CHECK(std::abs(sum / double(all.size()) - mean) < tolerance * std::sqrt(variance));
  CHECK(std::abs(squares / double(all.size()) / variance - 1) < 2 * tolerance);
}

TEST(uniform_rows_are_in_range_and_even) {
  const Initial initial{Initial::Kind::kUniform, -1, 3, 11};
  const auto narrow = drawn<float>(initial, Dtype::kFloat32, 0, 20'000, 5);
  const auto wide = drawn<double>(initial, Dtype::kFloat64, 0, 20'000, 5);
  for (const float x : narrow) CHECK(x >= -1 && x < 3);
  for (const double x : wide) CHECK(x >= -1 && x < 3);
  check_moments(narrow, 1, 16.0 / 12, 0.01);
  check_moments(wide, 1, 16.0 / 12, 0.01);
  CHECK_EQ(float(wide[77]), narrow[77]);
  // Where rounding could reach the end.
  const Initial close{Initial::Kind::kUniform, 1, 1 + 0x1p-23, 1};
  for (const float x : drawn<float>(close, Dtype::kFloat32, 0, 1'000, 4)) CHECK_EQ(x, 1.0f);
}

TEST(normal_rows_have_mean_deviation_and_tails) {
  const Initial initial{Initial::Kind::kNormal, 2, 0.5, 11};
  const auto all = drawn<double>(initial, Dtype::kFloat64, 0, 20'000, 7);
  check_moments(all, 2, 0.25, 0.01);
  double beyond[4] = {}, fourth = 0;
  for (const double x : all) {
    const double z = (x - 2) / 0.5;
    fourth += z * z * z * z / double(all.size());
    for (int i = 1; i < 4; ++i) beyond[i] += (std::abs(z) > i) / double(all.size());
  }
  CHECK(std::abs(beyond[1] - 0.3173) < 0.006);
  CHECK(std::abs(beyond[2] - 0.0455) < 0.003);
  CHECK(std::abs(beyond[3] - 0.0027) < 0.0007);
  CHECK(std::abs(fourth - 3) < 0.1);
  // Neighbours, in a row and by key, have nothing to do with each other.
  double along = 0, across = 0;
  for (size_t i = 0; i + 7 < all.size(); ++i) {
    along += (all[i] - 2) * (all[i + 1] - 2) / 0.25 / double(all.size());
    across += (all[i] - 2) * (all[i + 7] - 2) / 0.25 / double(all.size());
  }
  CHECK(std::abs(along) < 0.012);
  CHECK(std::abs(across) < 0.012);
}

TEST(initial_rows_depend_on_seed_and_key_alone) {
  const Initial one{Initial::Kind::kNormal, 0, 1, 1}, two{Initial::Kind::kNormal, 0, 1, 2};
  const auto some = drawn<double>(one, Dtype::kFloat64, 9, 1, 8);
  CHECK(some == drawn<double>(one, Dtype::kFloat64, 9, 1, 8));
  CHECK(some != drawn<double>(two, Dtype::kFloat64, 9, 1, 8));
  CHECK(some != drawn<double>(one, Dtype::kFloat64, 10, 1, 8));
}

// These bits are in stores that were saved: they may not change.
TEST(initial_rows_are_these) {
  const auto row = [](Initial::Kind kind, uint64_t key) {
    return drawn<double>({kind, 0, 1, 42}, Dtype::kFloat64, key, 1, 3);
  };
  CHECK((row(Initial::Kind::kUniform, 0) ==
         std::vector{0x1.8b4afd02e5e15p-1, 0x1.86cf9453c00bep-2, 0x1.6964aabb8ff9ap-1}));
  CHECK((row(Initial::Kind::kUniform, 1) ==
         std::vector{0x1.b0a40f347e938p-3, 0x1.990fcfb6310fp-4, 0x1.61442895a185ap-1}));
  CHECK((row(Initial::Kind::kUniform, ~uint64_t{0}) ==
         std::vector{0x1.177b177012054p-3, 0x1.51cc3229f31dp-4, 0x1.48c72e4f9cb01p-1}));
  CHECK((row(Initial::Kind::kNormal, 0) ==
         std::vector{0x1.533156c19d82cp+0, -0x1.271baf6ee6ad2p-1, 0x1.950b60bc8eae5p+0}));
  CHECK((row(Initial::Kind::kNormal, 1) ==
         std::vector{-0x1.137c991a2cd6cp-3, -0x1.7dc0a62d5fbaap-3, 0x1.f6f9cb71c04e8p+0}));
  CHECK((row(Initial::Kind::kNormal, ~uint64_t{0}) ==
         std::vector{0x1.af48058737ad8p+0, -0x1.2e3c4e961f17fp+0, -0x1.630abdbc0aee9p-2}));
}

TEST(constants_are_rounded_to_nearest) {
  const auto bits = [](Dtype dtype, double value) {
    uint64_t element = 0;
    initial_row({Initial::Kind::kConstant, value, 0, 0}, dtype, 1, &element, 1);
    return element;
  };
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK_EQ(bits(Dtype::kFloat16, 0), 0u);
  CHECK_EQ(bits(Dtype::kFloat16, 1), 0x3c00u);
  CHECK_EQ(bits(Dtype::kFloat16, -2.5), 0xc100u);
  CHECK_EQ(bits(Dtype::kFloat16, 65504), 0x7bffu);
  CHECK_EQ(bits(Dtype::kFloat16, 65519.99), 0x7bffu);
  CHECK_EQ(bits(Dtype::kFloat16, 65520), 0x7c00u);
  CHECK_EQ(bits(Dtype::kFloat16, -1e300), 0xfc00u);
  CHECK_EQ(bits(Dtype::kFloat16, -infinity), 0xfc00u);
  CHECK_EQ(bits(Dtype::kFloat16, 0x1p-24), 0x0001u);
  CHECK_EQ(bits(Dtype::kFloat16, 0x1p-25), 0x0000u);
  CHECK_EQ(bits(Dtype::kFloat16, 0x1.8p-24), 0x0002u);
  CHECK_EQ(bits(Dtype::kFloat16, 0x1p-14 - 0x1p-26), 0x0400u);
  CHECK_EQ(bits(Dtype::kFloat16, -0.0), 0x8000u);
  CHECK_EQ(bits(Dtype::kFloat16, 1 + 0x1p-11), 0x3c00u);
  CHECK_EQ(bits(Dtype::kFloat16, 1 + 0x1p-11 + 0x1p-40), 0x3c01u);  // once, not by way of float32
  CHECK_EQ(bits(Dtype::kFloat16, std::nan("")), 0x7e00u);
  CHECK_EQ(bits(Dtype::kBfloat16, 0), 0u);
  CHECK_EQ(bits(Dtype::kBfloat16, 1), 0x3f80u);
  CHECK_EQ(bits(Dtype::kBfloat16, 1 + 0x1p-8), 0x3f80u);
  CHECK_EQ(bits(Dtype::kBfloat16, 1 + 0x1.8p-7), 0x3f82u);
  CHECK_EQ(bits(Dtype::kBfloat16, 3.4e38), 0x7f80u);
  CHECK_EQ(bits(Dtype::kBfloat16, std::nan("")), 0x7fc0u);
  CHECK_EQ(bits(Dtype::kFloat32, 0.1), std::bit_cast<uint32_t>(0.1f));
  CHECK_EQ(bits(Dtype::kFloat64, 0.1), std::bit_cast<uint64_t>(0.1));
  CHECK_EQ(bits(Dtype::kInt8, -3), 0xfdu);
  CHECK_EQ(bits(Dtype::kInt8, 1000), 0x7fu);
  CHECK_EQ(bits(Dtype::kUint16, -1), 0u);
  CHECK_EQ(bits(Dtype::kInt64, 9.3e18), uint64_t(std::numeric_limits<int64_t>::max()));
  CHECK_EQ(bits(Dtype::kInt64, -infinity), uint64_t(std::numeric_limits<int64_t>::min()));
  CHECK_EQ(bits(Dtype::kUint64, infinity), ~uint64_t{0});
  CHECK_EQ(bits(Dtype::kInt32, std::nan("")), 0u);
}

TEST(a_million_rows_in_one_table) {
  const RowLayout layout(Dtype::kFloat32, 1, update_of(UpdateKind::kSum), false);
  Rows rows(layout, {}, 0, 1, std::make_shared<Pages>());
  constexpr uint32_t kCount = 1'000'000;
  for (uint32_t key = 0; key < kCount; ++key)
    std::memcpy(rows.at_or_make(key, hash_of(key), Rows::kUnknown), &key, sizeof key);
  CHECK_EQ(rows.size(), kCount);
  uint32_t wrong = 0;
  for (uint32_t key = 0; key < kCount; ++key) {
    const std::byte* const row = rows.at(rows.find(key, hash_of(key)), key);
    wrong += row == nullptr || std::memcmp(row, &key, sizeof key) != 0;
  }
  CHECK_EQ(wrong, 0u);
  CHECK_EQ(rows.find(kCount, hash_of(kCount)), Rows::kAbsent);
}

}  // namespace
