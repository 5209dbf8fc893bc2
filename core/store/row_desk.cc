// SPDX-License-Identifier: Apache-2.0
#include "store/row_desk.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "copy.h"
#include "store/encoding.h"
#include "store/row_bytes.h"
#include "store/wire.h"

namespace commute {
namespace {

// A row that may have to be made.
bool is_absent(Rows::Place place) {
  return place >= Rows::kUnknown;
}

}  // namespace

// Rows that are needed are fetched from memory well ahead of their use, several together, so that
// fetching takes its time beside other work. Left to themselves the tables are as slow as the rows:
// there are a thousand slots, and a call touches all of them for a few rows each.
//
// Several pass a step together: a fetch retires when its address is translated, which takes long
// for a page that was not used lately, so fetches should follow each other closely (one by one:
// 1.04 instead of 0.94 ms for 10,000 rows; of narrow ones in a loop that does nothing else: 6%
// less). What a loop needs is given to it by value: rows that are written may lie anywhere, so
// members would be read again for each.

// Narrow rows lie in their buckets, most of which are one cache line.
//
//   locate    the bucket of the row, or where it would be, is fetched
//   look      into the bucket, which tells for most rows; for others the next one is fetched
//   use
//
// The slots' own tables are not fetched ahead: they are few, and the processor sees through the
// loop (another step for each of them: 22 instead of 14 ns a pull from caches).
class RowDesk::NarrowFetcher {
 public:
  struct Row {
    Rows* rows;
    std::byte* bucket;  // nullptr: the slot has no row
    uint32_t number;    // of the bucket
    uint32_t slot;
  };

  // `places`: where rows are, so far as that is known.
  NarrowFetcher(const RowDesk& desk, std::span<const uint64_t> keys, const Rows::Place* places)
      : desk_(desk), keys_(keys), places_(places) {}

  // Calls look(i, row) and later use(i, row), for each row in turn.
  template <class Look, class Use>
  void each(Look look, Use use) {
    const size_t count = keys_.size();
    size_t looked = 0;
    for (size_t i = 0; i < count;) {
      const size_t end = std::min(i + kTogether, count);
      locate(std::min(end + kLocateAhead, count));
      for (const size_t to = std::min(end + kLookAhead, count); looked < to; ++looked)
        look(looked, ring_[looked % kRing]);
      for (; i < end; ++i) use(i, ring_[i % kRing]);
    }
  }

 private:
  static constexpr size_t kTogether = 16;
  static constexpr size_t kLookAhead = 16;
  static constexpr size_t kLocateAhead = 48;
  static constexpr size_t kRing = 128;

  void locate(size_t end) {
    const uint64_t* const keys = keys_.data();
    const Rows::Place* const places = places_;
    Rows* const* const rows_of = desk_.rows_.data();
    const auto slots = static_cast<uint32_t>(desk_.rows_.size());
    const Rows::Shape shape = desk_.parts_.front()->rows->shape();
    Row* const ring = ring_;
    for (size_t i = located_; i < end; ++i) {
      const uint64_t hash = hash_of(keys[i]);
      const uint32_t slot = slot_of(hash, slots);
      Rows* const rows = rows_of[slot];
      const uint32_t home = rows->home_of(rest_of(hash, slots));
      const uint32_t number = is_absent(places[i]) ? home : Rows::bucket_of(places[i]);
      ring[i % kRing] = {rows, rows->bucket_at(number, shape), number, slot};
    }
    for (size_t i = located_; i < end; ++i) {
      const std::byte* const bucket = ring[i % kRing].bucket;
      if (bucket == nullptr) [[unlikely]]
        continue;
      for (size_t at = 0; at < shape.bucket_bytes(); at += kCacheLineBytes) prefetch(bucket + at);
    }
    located_ = end;
  }

  const RowDesk& desk_;
  const std::span<const uint64_t> keys_;
  const Rows::Place* const places_;
  size_t located_ = 0;
  Row ring_[kRing];
};

// Wide rows go through stations, each of which reads what an earlier one has fetched:
//
//   slot      the slot's Rows          page      its table of pages of buckets
//   bucket    of the key               find      in the bucket; the table of the arena's blocks
//   row       itself                   then it is used
//
// `advance` brings rows through the stations, each well ahead of the next.
class RowDesk::WideFetcher {
 public:
  struct Row {
    Rows* rows;
    uint64_t rest;
    uint32_t slot;
    uint32_t home;  // its bucket's number
  };

  // `places` are filled in, or with `known` taken as they are. `bytes` of each row will be used.
  WideFetcher(const RowDesk& desk, std::span<const uint64_t> keys, Rows::Place* places, bool known,
              size_t bytes)
      : desk_(desk), keys_(keys), places_(places), known_(known), bytes_(bytes) {}

  // Calls use(i, row) for each row in turn, when it is there.
  template <class Use>
  void each(Use use) {
    for (size_t i = 0; i < keys_.size();) {
      const size_t end = std::min(i + kTogether, keys_.size());
      advance(end);
      for (; i < end; ++i) use(i, ring_[i % kRing]);
    }
  }

 private:
  static constexpr size_t kTogether = 16;
  static constexpr size_t kRowAhead = 12;
  static constexpr size_t kFindAhead = 20;
  static constexpr size_t kBucketAhead = 36;
  static constexpr size_t kPageAhead = 44;
  static constexpr size_t kSlotAhead = 56;
  static constexpr size_t kRing = 128;

  // Rows up to `end` are about to be used.
  void advance(size_t end) {
    const uint64_t* const keys = keys_.data();
    Rows::Place* const places = places_;
    Rows* const* const rows_of = desk_.rows_.data();
    const auto slots = static_cast<uint32_t>(desk_.rows_.size());
    const bool known = known_;
    const size_t bytes = bytes_;
    to(end + kSlotAhead, slots_, [=](size_t i, Row& row) {
      const uint64_t hash = hash_of(keys[i]);
      row.slot = slot_of(hash, slots);
      row.rest = rest_of(hash, slots);
      row.rows = rows_of[row.slot];
      row.rows->prefetch();
    });
    to(end + kPageAhead, pages_, [](size_t, Row& row) {
      row.home = row.rows->home_of(row.rest);
      row.rows->prefetch_page(row.home);
    });
    to(end + kBucketAhead, buckets_, [=](size_t i, const Row& row) {
      if (!known || is_absent(places[i])) row.rows->prefetch_bucket(row.home);
    });
    to(end + kFindAhead, found_, [=](size_t i, const Row& row) {
      if (!known) places[i] = row.rows->find(keys[i], row.rest);
      row.rows->prefetch_block(places[i]);
    });
    to(end + kRowAhead, rows_,
       [=](size_t i, const Row& row) { row.rows->prefetch_row(places[i], bytes); });
  }

  template <class F>
  void to(size_t end, size_t& passed, F station) {
    Row* const ring = ring_;
    size_t i = passed;
    for (end = std::min(end, keys_.size()); i < end; ++i) station(i, ring[i % kRing]);
    passed = i;
  }

  const RowDesk& desk_;
  const std::span<const uint64_t> keys_;
  Rows::Place* const places_;
  const bool known_;
  const size_t bytes_;
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
  if (is_known(head.form)) {
    Known& known = known_[worker];
    const auto found = known.lists.find(head.digest);
    if (found == known.lists.end()) return nullptr;
    if (found->second->keys.size() != head.count)
      throw std::invalid_argument("the list of this digest has another length");
    return head.form == KeysForm::kLast ? known.forget(head.digest) : found->second;
  }
  if (head.form != KeysForm::kKeys && head.form != KeysForm::kRemember)
    throw std::invalid_argument("there is no such form of keys");
  const Bytes keys = take_bytes(payload, head.count * sizeof(uint64_t));
  auto list = std::make_shared<KeyList>();
  list->keys.resize(head.count);
  copy_bytes(list->keys.data(), keys.data(), keys.size());
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

namespace {

constexpr size_t kForgottenMax = 64;  // digests of lists that are not there any more

// Of a list itself about as much as of twenty keys: its entries in the map and the queue.
size_t bytes_of(const KeyList& list) {
  return 256 + list.keys.size() * (sizeof(uint64_t) + sizeof(Rows::Place));
}

}  // namespace

void RowDesk::remember(uint32_t worker, const Digest& digest, std::shared_ptr<KeyList> list) {
  Known& known = known_[worker];
  const size_t bytes = bytes_of(*list);
  if (bytes > remembered_max_ || !known.lists.emplace(digest, std::move(list)).second) return;
  known.order.push_back(digest);
  known.bytes += bytes;
  while (known.bytes > remembered_max_) known.forget_oldest();
}

// The list, which may be in use.
std::shared_ptr<KeyList> RowDesk::Known::forget(const Digest& digest) {
  const auto list = lists.extract(digest).mapped();
  bytes -= bytes_of(*list);
  // A list that stays may be in front of any number of others.
  if (order.size() > 2 * lists.size() + kForgottenMax)
    std::erase_if(order, [this](const Digest& one) { return !lists.contains(one); });
  return list;
}

void RowDesk::Known::forget_oldest() {
  const Digest oldest = order.front();
  order.pop_front();
  if (lists.contains(oldest)) forget(oldest);
}

const Rows::Place* RowDesk::places_of(const KeyList& list) const {
  return list.places.empty() || list.epoch != epoch_ ? nullptr : list.places.data();
}

std::vector<std::byte> RowDesk::values(KeyList& list) {
  const size_t row_bytes = spec().bytes();
  const bool is_inline = spec().layout().is_inline;
  // What is inline is found as quickly as it is seen that it has not moved.
  const bool known = !is_inline && places_of(list) != nullptr;
  if (!known) list.places.assign(list.keys.size(), Rows::kUnknown);
  list.epoch = epoch_;
  std::vector<std::byte> values(list.keys.size() * row_bytes);
  if (is_inline)
    with_row_bytes(row_bytes, [&](auto bytes) { copy_narrow(list, values.data(), bytes); });
  else
    copy_wide(list, known, values.data());
  return spec().wire == spec().dtype ? values : narrowed(spec().wire, values);
}

template <class Bytes>
void RowDesk::copy_narrow(KeyList& list, std::byte* values, Bytes bytes) const {
  const uint64_t* const keys = list.keys.data();
  Rows::Place* const places = list.places.data();
  const uint32_t slots = spec().slots;
  const Rows::Shape shape = parts_.front()->rows->shape();
  NarrowFetcher(*this, list.keys, places)
      .each(
          [=](size_t i, const NarrowFetcher::Row& row) {
            places[i] = row.rows->copy_at(row.bucket, row.number, keys[i], values + i * bytes,
                                          shape, bytes);
          },
          [=](size_t i, const NarrowFetcher::Row& row) {
            if (places[i] != Rows::kUnknown) return;
            const uint64_t rest = rest_of(hash_of(keys[i]), slots);
            places[i] = row.rows->find(keys[i], rest);
            row.rows->copy_value(keys[i], rest, places[i], values + i * bytes);
          });
}

void RowDesk::copy_wide(KeyList& list, bool known, std::byte* values) const {
  const size_t bytes = spec().bytes();
  WideFetcher(*this, list.keys, list.places.data(), known, bytes)
      .each([&](size_t i, const WideFetcher::Row& row) {
        std::byte* const to = values + i * bytes;
        if (!known && list.places[i] == Rows::kAbsent)  // a moment ago
          row.rows->copy_initial(list.keys[i], to);
        else
          row.rows->copy_value(list.keys[i], row.rest, list.places[i], to);
      });
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
  size_t begin = 0;
  uint32_t slot = 0;
  const auto apply_to_slot = [&](size_t end) {
    op.keys = keys.subspan(begin, end - begin);
    op.payload = payload.subspan(begin * row_bytes, (end - begin) * row_bytes);
    op.places = places.data() + begin;
    if (record) record(slot, op);
    slots_[slot / stride_]->apply(op, parts_[slot / stride_]);
    begin = end;
  };
  const auto use = [&](size_t i, const auto& row) {
    if (i > begin && row.slot != slot) apply_to_slot(i);
    slot = row.slot;
  };
  if (spec().layout().is_inline)
    NarrowFetcher(*this, keys, places.data())
        .each(
            [places = places.data()](size_t i, const NarrowFetcher::Row& row) {
              if (is_absent(places[i])) row.rows->prefetch_after(row.number);
            },
            use);
  else
    WideFetcher(*this, keys, places.data(), known, spec().layout().bytes).each(use);
  if (!keys.empty()) apply_to_slot(keys.size());
}

void RowDesk::apply_everywhere(const SlotOp& op, const Record& record) {
  ++epoch_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (record) record(first_ + uint32_t(i) * stride_, op);
    slots_[i]->apply(op, parts_[i]);
  }
  find_rows();
}

namespace {

// Slots do not get equally many: few get more than three deviations above the mean.
size_t most_of_slot(uint64_t rows, uint32_t slots) {
  const double mean = static_cast<double>(rows) / slots;
  return static_cast<size_t>(mean + 3 * std::sqrt(mean)) + 1;
}

}  // namespace

uint64_t RowDesk::free_memory() {
  return static_cast<uint64_t>(::sysconf(_SC_AVPHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

void RowDesk::reserve(uint64_t rows, uint64_t memory) const {
  const uint64_t each = 2 * (sizeof(uint64_t) + spec().layout().bytes);  // at most, in a bucket
  const uint64_t share = memory / 2 / each * spec().slots / parts_.size();
  const size_t most = most_of_slot(std::min(rows, share), spec().slots);
  for (Slot::Part* const part : parts_) part->rows->expect(most);
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
