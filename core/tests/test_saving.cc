// SPDX-License-Identifier: Apache-2.0
// What is saved of rows: found in the order of their hashes, block by block; room made at once.
#include <algorithm>
#include <cstring>
#include <map>

#include "check.h"
#include "store/checksum.h"
#include "store/encoding.h"
#include "store/row_query.h"

namespace commute {
namespace {

constexpr uint32_t kSlotCount = 4;

TableSpec spec_of(uint32_t width) {
  TableSpec spec;
  spec.sparse = true;
  spec.count = width;
  spec.slots = kSlotCount;
  spec.update.kind = UpdateKind::kAdagrad;
  return spec;
}

Rows rows_of(const TableSpec& spec) {
  return {spec.layout(), spec.initial, 0, spec.slots, std::make_shared<Pages>()};
}

// Keys of one slot; `close` ones have their homes in a few buckets, and run over.
std::vector<uint64_t> keys_of(uint32_t slot, size_t count, bool close) {
  std::vector<uint64_t> keys;
  for (uint64_t key = 1; keys.size() < count; ++key) {
    const uint64_t hash = hash_of(key);
    if (slot_of(hash, kSlotCount) != slot) continue;
    if (close && rest_of(hash, kSlotCount) >> 58 != 5) continue;
    keys.push_back(key);
  }
  return keys;
}

void check_order(uint32_t width, size_t count, bool close, size_t reserved) {
  const TableSpec spec = spec_of(width);
  Rows rows = rows_of(spec);
  rows.reserve(reserved);
  std::vector<uint64_t> hashes;
  for (const uint64_t key : keys_of(2, count, close)) {
    rows.at_or_make(key, rest_of(hash_of(key), kSlotCount), Rows::kUnknown);
    hashes.push_back(hash_of(key));
  }
  std::sort(hashes.begin(), hashes.end());
  for (const size_t most : {size_t{1}, size_t{7}, count + 1}) {
    std::vector<uint64_t> seen;
    uint64_t from = 0;
    while (seen.size() < count) {
      std::vector<Rows::Found> found;
      rows.find_from(from, most, found);
      CHECK(found.size() >= std::min(most, count - seen.size()));
      found.resize(std::min(found.size(), most));
      for (const Rows::Found& one : found) {
        seen.push_back(one.hash);
        CHECK(hash_of(one.key) == one.hash);
        CHECK(rows.at(rows.find(one.key, rest_of(one.hash, kSlotCount)), one.key) == one.row);
      }
      from = seen.back() + 1;
    }
    CHECK(seen == hashes);
  }
  CHECK(rows.size() == count);
}

TEST(nothing_is_found_of_no_rows) {
  const TableSpec spec = spec_of(3);
  const Rows rows = rows_of(spec);
  std::vector<Rows::Found> found;
  rows.find_from(0, 10, found);
  CHECK(found.empty());
}

TEST(room_is_made_once) {
  const TableSpec spec = spec_of(16);
  Rows rows = rows_of(spec);
  const auto keys = keys_of(1, 5000, false);
  rows.reserve(keys.size());
  Rows grown = rows_of(spec);
  const size_t before = rows.memory();
  for (const uint64_t key : keys) {
    rows.at_or_make_empty(key, rest_of(hash_of(key), kSlotCount), Rows::kUnknown);
    grown.at_or_make(key, rest_of(hash_of(key), kSlotCount), Rows::kUnknown);
  }
  CHECK(before < rows.memory());  // the arena; the index was there
  CHECK(rows.memory() <= grown.memory() * 5 / 4);
  CHECK(rows.keys() == grown.keys());
  rows.reserve(10);
  CHECK(rows.size() == keys.size());
}

// All blocks of a shard that holds every second slot.
void check_blocks(uint32_t width, size_t count) {
  const TableSpec spec = spec_of(width);
  Slot slots[2];
  std::vector<std::byte> created = spec.encode();
  RowParts parts;
  std::map<uint64_t, float> expected;  // by hash
  for (uint32_t i = 0; i < 2; ++i) {
    slots[i].apply({OpKind::kCreate, 0, {}, {}, created});
    parts.push_back(slots[i].part(0));
    for (const uint64_t key : keys_of(1 + 2 * i, count, false)) {
      const auto number = static_cast<float>(key);
      std::byte* row =
          parts[i]->rows->at_or_make(key, rest_of(hash_of(key), kSlotCount), Rows::kUnknown);
      std::memcpy(row, &number, sizeof number);
      expected[hash_of(key)] = number;
    }
  }
  std::map<uint64_t, float> seen;
  uint64_t from = 0;
  do {
    const auto answer = items(parts, 1, 2, from);
    CHECK(answer.size() <= kPayloadMax);
    Bytes rest = answer;
    const auto head = take<ItemsHead>(rest);
    size_t in_runs = 0;
    for (uint32_t i = 0; i < head.runs; ++i) in_runs += take<ItemsRun>(rest).count;
    CHECK(in_runs == head.count);
    CHECK(rest.size() == head.count * (sizeof(uint64_t) + 2 * width * sizeof(float)));
    Bytes values = rest.subspan(head.count * sizeof(uint64_t));
    for (uint32_t i = 0; i < head.count; ++i) {
      const auto hash = hash_of(take<uint64_t>(rest));
      Bytes value = values.subspan(i * width * sizeof(float));
      CHECK(seen.emplace(hash, take<float>(value)).second);
    }
    CHECK(head.next == 0 || head.next > from);
    from = head.next;
  } while (from != 0);
  CHECK(seen == expected);
}

TEST(checksums_are_xxh64) {
  const char text[] = "Nobody inspects the spammish repetition";
  Checksum whole;
  whole.add(reinterpret_cast<const std::byte*>(text), sizeof text - 1);
  CHECK(whole.value() == 0xfbcea83c8a378bf1);
  Checksum pieces;
  for (size_t i = 0; i + 1 < sizeof text; ++i)
    pieces.add(reinterpret_cast<const std::byte*>(text + i), 1);
  CHECK(pieces.value() == whole.value());
  CHECK(Checksum().value() == 0xef46db3751d8e999);
}

TEST(rows_are_found_in_the_order_of_their_hashes) {
  for (const uint32_t width : {1, 2, 16})
    for (const size_t reserved : {0, 100, 3000}) {
      check_order(width, 700, false, reserved);
      check_order(width, 300, true, reserved);
    }
}

TEST(blocks_have_every_row_once) {
  check_blocks(1, 3000);
  check_blocks(64, 5000);
  check_blocks(4096, 90);
}

}  // namespace
}  // namespace commute
