// SPDX-License-Identifier: Apache-2.0
#include "store/row_desk.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "store/encoding.h"
#include "store/wire.h"

namespace commute {
namespace {

// How far ahead of its use a bucket, and then a row, is fetched from memory.
constexpr size_t kRowAhead = 16;
constexpr size_t kBucketAhead = 2 * kRowAhead;

}  // namespace

RowDesk::RowDesk(std::vector<Slot*> slots, uint32_t first, uint32_t stride, uint32_t table)
    : slots_(std::move(slots)), first_(first), stride_(stride) {
  for (Slot* slot : slots_) parts_.push_back(slot->part(table));
}

std::shared_ptr<KeyList> RowDesk::keys_of(uint32_t worker, Bytes& payload) {
  const auto head = take<KeysHead>(payload);
  if (head.form == KeysForm::kKnown) {
    const auto known = known_.find(worker);
    if (known == known_.end()) return nullptr;
    const auto found = known->second.lists.find(head.digest);
    return found == known->second.lists.end() ? nullptr : found->second;
  }
  const Bytes keys = take_bytes(payload, head.count * sizeof(uint64_t));
  auto list = std::make_shared<KeyList>();
  list->keys.resize(head.count);
  if (!keys.empty()) std::memcpy(list->keys.data(), keys.data(), keys.size());
  const uint32_t slots = spec().slots;
  for (size_t i = 0; i < list->keys.size(); ++i) {
    const uint64_t hash = hash_of(list->keys[i]);
    if (slot_of(hash, slots) % stride_ != first_ || (i > 0 && hash <= hash_of(list->keys[i - 1])))
      throw std::invalid_argument("keys of other slots, or out of order");
  }
  if (head.form == KeysForm::kRemember) remember(worker, head.digest, list);
  return list;
}

void RowDesk::remember(uint32_t worker, const Digest& digest, std::shared_ptr<KeyList> list) {
  constexpr size_t kPerKey = sizeof(uint64_t) + sizeof(Rows::Place);
  Known& known = known_[worker];
  const size_t bytes = list->keys.size() * kPerKey;
  if (bytes > kRememberedMax || !known.lists.emplace(digest, std::move(list)).second) return;
  known.order.push_back(digest);
  known.bytes += bytes;
  while (known.bytes > kRememberedMax) {
    const auto oldest = known.lists.find(known.order.front());
    known.bytes -= oldest->second->keys.size() * kPerKey;
    known.lists.erase(oldest);
    known.order.pop_front();
  }
}

void RowDesk::find(std::span<const uint64_t> keys, size_t i, Rows::Place* places) const {
  const uint64_t hash = hash_of(keys[i]);
  const Rows& rows = *part_of(hash).rows;
  places[i] = rows.find(keys[i], rest_of(hash, spec().slots));
  rows.prefetch_row(places[i]);
}

const Rows::Place* RowDesk::places_of(const KeyList& list) const {
  return list.places.empty() || list.epoch != epoch_ ? nullptr : list.places.data();
}

std::vector<std::byte> RowDesk::values(KeyList& list) {
  const std::vector<uint64_t>& keys = list.keys;
  const size_t count = keys.size(), row_bytes = spec().bytes();
  const uint32_t slots = spec().slots;
  const bool known = places_of(list) != nullptr;
  list.places.resize(count);
  list.epoch = epoch_;
  std::vector<std::byte> values(count * row_bytes);
  for (size_t i = 0; i < count + kBucketAhead; ++i) {
    if (i < count && !known) {
      const uint64_t hash = hash_of(keys[i]);
      part_of(hash).rows->prefetch(rest_of(hash, slots));
    }
    if (const size_t at = i - kRowAhead; i >= kRowAhead && at < count) {
      if (known)
        part_of(hash_of(keys[at])).rows->prefetch_row(list.places[at]);
      else
        find(keys, at, list.places.data());
    }
    if (i < kBucketAhead) continue;
    const size_t at = i - kBucketAhead;
    const uint64_t hash = hash_of(keys[at]);
    part_of(hash).rows->copy_value(keys[at], rest_of(hash, slots), list.places[at],
                                   values.data() + at * row_bytes);
  }
  return spec().wire == spec().dtype ? values : narrowed(spec().wire, values);
}

// Keys are in the order of their hashes, so those of a slot are together.
void RowDesk::apply(SlotOp op, const Record& record) {
  const std::span<const uint64_t> keys = op.keys;
  const Bytes payload = op.payload;
  const size_t row_bytes = keys.empty() ? 0 : payload.size() / keys.size();
  const uint32_t slots = spec().slots;
  const Rows::Place* const known = op.places;
  std::vector<Rows::Place> found(known != nullptr ? 0 : keys.size());
  if (op.kind == OpKind::kDrop) ++epoch_;
  size_t fetched = 0, looked = 0;
  for (size_t begin = 0; begin < keys.size();) {
    const uint32_t slot = slot_of(hash_of(keys[begin]), slots);
    size_t end = begin + 1;
    while (end < keys.size() && slot_of(hash_of(keys[end]), slots) == slot) ++end;
    for (; fetched < std::min(keys.size(), end + kBucketAhead) && known == nullptr; ++fetched) {
      const uint64_t hash = hash_of(keys[fetched]);
      part_of(hash).rows->prefetch(rest_of(hash, slots));
    }
    for (; looked < std::min(keys.size(), end + kRowAhead); ++looked) {
      if (known != nullptr)
        part_of(hash_of(keys[looked])).rows->prefetch_row(known[looked]);
      else
        find(keys, looked, found.data());
    }
    op.keys = keys.subspan(begin, end - begin);
    op.payload = payload.subspan(begin * row_bytes, (end - begin) * row_bytes);
    op.places = (known != nullptr ? known : found.data()) + begin;
    if (record) record(slot, op);
    slots_[slot / stride_]->apply(op, parts_[slot / stride_]);
    begin = end;
  }
}

void RowDesk::apply_everywhere(const SlotOp& op, const Record& record) {
  ++epoch_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (record) record(first_ + uint32_t(i) * stride_, op);
    slots_[i]->apply(op, parts_[i]);
  }
}

// Every slot comes up a few times before a row can be as old as it may get.
void RowDesk::expire(uint32_t table, uint64_t now, const Record& record) {
  if (std::exchange(expired_, now) == now) return;
  std::vector<std::byte> clock;
  put(clock, now);
  const SlotOp op{OpKind::kExpire, table, {}, {}, clock};
  for (size_t some = 4 * slots_.size() / spec().expire_after + 1; some > 0; --some) {
    const size_t i = next_expiry_++ % slots_.size();
    const size_t before = parts_[i]->rows->size();
    if (before == 0) continue;
    if (record) record(first_ + uint32_t(i) * stride_, op);
    slots_[i]->apply(op, parts_[i]);
    epoch_ += parts_[i]->rows->size() != before;
  }
}

}  // namespace commute
