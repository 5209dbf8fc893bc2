// SPDX-License-Identifier: Apache-2.0
#include "store/row_desk.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "store/encoding.h"
#include "store/wire.h"

namespace commute {

// A row that is needed goes through stations, each of which reads what an earlier one has fetched
// from memory:
//
//   slot      the slot's Rows          page      its table of pages of buckets
//   bucket    of the key               find      in the bucket; the table of the arena's blocks
//   row       itself                   then it is used
//
// `advance` brings rows through the stations, each well ahead of the next, so that fetching takes
// its time beside other work. Left to themselves the tables are as slow as the rows: there are a
// thousand slots, and a call touches all of them for a few rows each. Several rows pass a station
// together: a fetch retires when its address is translated, which takes long for a page that was
// not used lately, so fetches should follow each other closely (one by one: 1.04 instead of 0.94 ms
// for 10,000 rows).
class RowDesk::Fetcher {
 public:
  static constexpr size_t kTogether = 16;
  static constexpr size_t kRowAhead = 12;
  static constexpr size_t kFindAhead = 20;
  static constexpr size_t kBucketAhead = 36;
  static constexpr size_t kPageAhead = 44;
  static constexpr size_t kSlotAhead = 56;

  // `places` are filled in, or with `known` taken as they are. `bytes` of each row will be used. To
  // `values`, if there are any, inline rows are copied as soon as they are found; one whose place
  // is left at kUnknown was not.
  Fetcher(const RowDesk& desk, std::span<const uint64_t> keys, Rows::Place* places, bool known,
          size_t bytes, std::byte* values = nullptr)
      : desk_(desk),
        keys_(keys),
        places_(places),
        known_(known),
        inline_(desk.spec().layout().is_inline),
        bytes_(bytes),
        values_(values) {}

  struct Row {
    Rows* rows;
    uint64_t rest;
    uint32_t slot;
  };

  // Row `i` is about to be used.
  void advance(size_t i) {
    if (i < ready_) return;
    const size_t end = ready_ = i + kTogether;
    const auto slots = static_cast<uint32_t>(desk_.rows_.size());
    to(end + kSlotAhead, slots_, [&](size_t i) {
      const uint64_t hash = hash_of(keys_[i]);
      const uint32_t slot = slot_of(hash, slots);
      Row& row = ring_[i % kRing];
      row = {desk_.rows_[slot], rest_of(hash, slots), slot};
      row.rows->prefetch();
    });
    to(end + kPageAhead, pages_, [&](size_t i) {
      if (is_looked_up(i)) at(i).rows->prefetch_page(at(i).rest);
    });
    to(end + kBucketAhead, buckets_, [&](size_t i) {
      if (is_looked_up(i)) at(i).rows->prefetch_bucket(at(i).rest);
    });
    if (values_ != nullptr || !inline_) to(end + kFindAhead, found_, [&](size_t i) { find(i); });
    // A row in its bucket was fetched with it.
    if (known_ || !inline_)
      to(end + kRowAhead, rows_, [&](size_t i) { at(i).rows->prefetch_row(places_[i], bytes_); });
  }
  // Of one that was advanced to; not of one long ago.
  const Row& at(size_t i) const { return ring_[i % kRing]; }

 private:
  static constexpr size_t kRing = 256;
  // A row that was not there may have to be made.
  bool is_looked_up(size_t i) const { return !known_ || places_[i] == Rows::kAbsent; }

  void find(size_t i) {
    const auto& [rows, rest, slot] = at(i);
    if (inline_) {
      places_[i] = rows->copy_at_home(keys_[i], rest, values_ + i * bytes_);
      return;
    }
    if (!known_) places_[i] = rows->find(keys_[i], rest);
    rows->prefetch_block(places_[i]);
  }

  template <class F>
  void to(size_t end, size_t& passed, F station) const {
    for (end = std::min(end, keys_.size()); passed < end; ++passed) station(passed);
  }

  const RowDesk& desk_;
  std::span<const uint64_t> keys_;
  Rows::Place* places_;
  const bool known_;
  const bool inline_;
  const size_t bytes_;
  std::byte* const values_;
  size_t ready_ = 0;
  // How many have passed each station.
  size_t slots_ = 0;
  size_t pages_ = 0;
  size_t buckets_ = 0;
  size_t found_ = 0;
  size_t rows_ = 0;
  Row ring_[kRing];
};

RowDesk::RowDesk(std::vector<Slot*> slots, uint32_t first, uint32_t stride, uint32_t table,
                 size_t remembered_max)
    : slots_(std::move(slots)), first_(first), stride_(stride), remembered_max_(remembered_max) {
  for (Slot* slot : slots_) parts_.push_back(slot->part(table));
  rows_.resize(spec().slots);
  find_rows();
}

// They are new after a reset.
void RowDesk::find_rows() {
  for (size_t i = 0; i < parts_.size(); ++i) rows_[first_ + i * stride_] = parts_[i]->rows.get();
}

std::shared_ptr<KeyList> RowDesk::keys_of(uint32_t worker, Bytes& payload) {
  const auto head = take<KeysHead>(payload);
  if (head.form == KeysForm::kKnown) {
    const auto known = known_.find(worker);
    if (known == known_.end()) return nullptr;
    const auto found = known->second.lists.find(head.digest);
    if (found == known->second.lists.end()) return nullptr;
    if (found->second->keys.size() != head.count)
      throw std::invalid_argument("the list of this digest has another length");
    return found->second;
  }
  if (head.form != KeysForm::kKeys && head.form != KeysForm::kRemember)
    throw std::invalid_argument("there is no such form of keys");
  const Bytes keys = take_bytes(payload, head.count * sizeof(uint64_t));
  auto list = std::make_shared<KeyList>();
  list->keys.resize(head.count);
  if (!keys.empty()) std::memcpy(list->keys.data(), keys.data(), keys.size());
  const uint32_t slots = spec().slots;
  uint64_t before = 0;
  for (size_t i = 0; i < list->keys.size(); ++i) {
    const uint64_t hash = hash_of(list->keys[i]);
    if (rows_[slot_of(hash, slots)] == nullptr || (i > 0 && hash <= before))
      throw std::invalid_argument("keys of other slots, or out of order");
    before = hash;
  }
  if (head.form == KeysForm::kRemember) remember(worker, head.digest, list);
  return list;
}

void RowDesk::remember(uint32_t worker, const Digest& digest, std::shared_ptr<KeyList> list) {
  // Of a list itself about as much as of twenty keys: its entries in the map and the queue.
  const auto bytes_of = [](const KeyList& one) {
    return 256 + one.keys.size() * (sizeof(uint64_t) + sizeof(Rows::Place));
  };
  Known& known = known_[worker];
  const size_t bytes = bytes_of(*list);
  if (bytes > remembered_max_ || !known.lists.emplace(digest, std::move(list)).second) return;
  known.order.push_back(digest);
  known.bytes += bytes;
  while (known.bytes > remembered_max_) {
    const auto oldest = known.lists.find(known.order.front());
    known.bytes -= bytes_of(*oldest->second);
    known.lists.erase(oldest);
    known.order.pop_front();
  }
}

const Rows::Place* RowDesk::places_of(const KeyList& list) const {
  return list.places.empty() || list.epoch != epoch_ ? nullptr : list.places.data();
}

std::vector<std::byte> RowDesk::values(KeyList& list) {
  const std::vector<uint64_t>& keys = list.keys;
  const size_t count = keys.size(), row_bytes = spec().bytes();
  const bool known = places_of(list) != nullptr;
  list.places.resize(count);
  list.epoch = epoch_;
  std::vector<std::byte> values(count * row_bytes);
  const bool early = !known && spec().layout().is_inline;
  Fetcher fetcher(*this, keys, list.places.data(), known, row_bytes,
                  early ? values.data() : nullptr);
  for (size_t i = 0; i < count; ++i) {
    fetcher.advance(i);
    if (early && list.places[i] != Rows::kUnknown) continue;
    const auto& [rows, rest, slot] = fetcher.at(i);
    std::byte* const to = values.data() + i * row_bytes;
    if (early) list.places[i] = rows->find(keys[i], rest);
    if (!known && list.places[i] == Rows::kAbsent)  // a moment ago
      rows->copy_initial(keys[i], to);
    else
      rows->copy_value(keys[i], rest, list.places[i], to);
  }
  return spec().wire == spec().dtype ? values : narrowed(spec().wire, values);
}

// Keys are in the order of their hashes, so those of a slot are together.
void RowDesk::apply(SlotOp op, const Record& record) {
  const std::span<const uint64_t> keys = op.keys;
  const Bytes payload = op.payload;
  const size_t row_bytes = keys.empty() ? 0 : payload.size() / keys.size();
  const bool known = op.places != nullptr;
  std::vector<Rows::Place> places(keys.size(), Rows::kUnknown);
  if (known) std::copy_n(op.places, keys.size(), places.begin());
  if (op.kind == OpKind::kDrop) ++epoch_;
  Fetcher fetcher(*this, keys, places.data(), known, spec().layout().bytes);
  const auto slot_at = [&](size_t i) {
    fetcher.advance(i);
    return fetcher.at(i).slot;
  };
  for (size_t begin = 0; begin < keys.size();) {
    const uint32_t slot = slot_at(begin);
    size_t end = begin + 1;
    while (end < keys.size() && slot_at(end) == slot) ++end;
    op.keys = keys.subspan(begin, end - begin);
    op.payload = payload.subspan(begin * row_bytes, (end - begin) * row_bytes);
    op.places = places.data() + begin;
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
  find_rows();
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
