// SPDX-License-Identifier: Apache-2.0
// The rows of a sparse table in one slot: a map from uint64 to value and state, by open addressing.
//
//   hash(key) = a bijective mix; its first bits name the slot, the others the place in the slot
//
//   bucket = keys | payloads | meta        one or a few cache lines; meta: which entries are used,
//                                          and whether one that belongs here is further on
//   payload = the row itself, if it is narrow (up to kInlineWidth); else its number in the arena
//   row = value | state | state | step?    `step` where the update counts
//         | touched?                       the clock of the last contribution, where rows expire
//
// An entry's home is hash * buckets / 2^64, so entries lie roughly in the order of their hashes; a
// full bucket passes on to the next. When 4 of 5 entries are used, they move into more pages, in
// the order of their hashes, and the pages they leave are for the next slot that grows: a table of
// millions is a thousand slots, so nobody waits for it to be copied.
//
// Every uint64 is a legal key. A row that nobody has pushed is not there; what it would hold is
// given by `initial_row`, from the table's seed and the key.
//
// Invariants: 1. An entry is in its home bucket, or in a later one, and then all from its home up
// to there are full. 2. A bucket is marked as passed on if, and only if, an entry that belongs in
// it or before it is after it: a drop fills its gap and takes marks away, so that a look-up stays
// short however many rows come and go. 3. Rows in the arena never move; the number of one that was
// dropped may be another's later.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "dtype.h"
#include "store/bucket.h"
#include "store/pages.h"
#include "store/update.h"

namespace commute {

constexpr uint32_t kInlineWidth = 4;
constexpr uint32_t kWidthMax = 4096;

// Bijective: equal hashes are equal keys.
inline uint64_t hash_of(uint64_t key) {
  key ^= key >> 30;
  key *= 0xbf58476d1ce4e5b9;
  key ^= key >> 27;
  key *= 0x94d049bb133111eb;
  return key ^ key >> 31;
}

__extension__ using Wide = unsigned __int128;

// `slots` is a power of two.
inline uint32_t slot_of(uint64_t hash, uint32_t slots) {
  return static_cast<uint32_t>(static_cast<Wide>(hash) * slots >> 64);
}
// What is left of a hash within its slot.
inline uint64_t rest_of(uint64_t hash, uint32_t slots) {
  return hash * slots;
}

// What a row that nobody has pushed holds.
struct Initial {
  enum class Kind : uint8_t { kConstant = 0, kUniform = 1, kNormal = 2 };
  Kind kind = Kind::kConstant;
  double a = 0;  // the constant, the lower end, the mean
  double b = 0;  // the upper end (not reached), the standard deviation
  uint64_t seed = 0;

  bool operator==(const Initial&) const = default;
};
// The same bits on every machine. Uniform and normal: float32 and float64.
void initial_row(const Initial& initial, Dtype dtype, uint64_t key, void* row, size_t width);

// Where things are in a row.
struct RowLayout {
  RowLayout(Dtype dtype, uint32_t width, const Update& update, bool expires);

  Dtype dtype;
  uint32_t width;
  size_t value_bytes;    // one array of the row
  size_t states;         // arrays after the value
  ptrdiff_t step_at;     // uint32; -1: none
  ptrdiff_t touched_at;  // uint32; -1: none
  size_t bytes;          // of the row
  bool is_inline;
  size_t bucket_bytes = 0;  // 64, 128 or 256
  uint32_t entries = 0;     // of a bucket
};

class Rows {
 public:
  // Where a row was found: its number in the arena, or inline its entry.
  using Place = uint32_t;
  static constexpr Place kAbsent = ~uint32_t{0};
  static constexpr Place kUnknown = kAbsent - 1;  // not looked up

  // The rows of one of `slots` slots.
  Rows(const RowLayout& layout, const Initial& initial, double first_state, uint32_t slots,
       std::shared_ptr<Pages> pages);
  ~Rows();
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  // A look-up in steps, so that many can be under way: each fetches what the next one reads.
  // `rest` is rest_of(hash_of(key)).
  void prefetch() const { commute::prefetch(this); }
  // The number of the bucket where a key is, or would be if there were room.
  uint32_t home_of(uint64_t rest) const {
    return static_cast<uint32_t>(static_cast<Wide>(rest) * homes_ >> 64);
  }
  // Of the bucket where an inline row was found.
  static uint32_t bucket_of(Place place) { return place >> kEntryBits; }
  void prefetch_page(uint32_t number) const {
    commute::prefetch(index_.data() + (number >> shape_.page_shift));
  }
  void prefetch_bucket(uint32_t number) const {
    if (homes_ != 0) prefetch_lines(bucket(number), shape_.bucket_bytes());
  }
  // The bucket that follows this one, if it has passed on.
  void prefetch_after(uint32_t number) const {
    if (homes_ != 0 && (meta(bucket(number)) & kPassedOn) != 0) prefetch_bucket(number + 1);
  }
  Place find(uint64_t key, uint64_t rest) const;

  // What is the same in all slots of a table. A loop over rows of many slots has it at hand.
  struct Shape {
    uint8_t bucket_shift;
    uint8_t page_shift;
    uint16_t payloads_at;
    uint16_t payload_bytes;

    size_t bucket_bytes() const { return size_t{1} << bucket_shift; }
    uint32_t page_of(uint32_t bucket) const { return bucket >> page_shift; }
    size_t place_in_page(uint32_t bucket) const {
      return static_cast<size_t>(bucket & ((1u << page_shift) - 1)) << bucket_shift;
    }
  };
  Shape shape() const { return shape_; }
  // nullptr where there is no row at all.
  std::byte* bucket_at(uint32_t number, Shape shape) const {
    if (homes_ == 0) [[unlikely]]
      return nullptr;
    return index_[shape.page_of(number)] + shape.place_in_page(number);
  }
  // As `find` and `copy_value`, of an inline row with a value of `bytes`, if its home tells, which
  // is `bucket` and has this number; else kUnknown, and what comes after it is fetched.
  template <class Bytes>
  Place copy_at(const std::byte* bucket, uint32_t number, uint64_t key, std::byte* to, Shape shape,
                Bytes bytes) const;
  // Any place: fetching from nowhere does nothing, and asking first costs more.
  void prefetch_block(Place place) const {
    const auto table = reinterpret_cast<uintptr_t>(blocks_.data());
    commute::prefetch(reinterpret_cast<const void*>(table + (size_t{place} >> block_shift_) *
                                                                sizeof blocks_.front()));
  }
  // `bytes` of it: the value, or all.
  void prefetch_row(Place place, size_t bytes) const;

  // In what follows a place is as `find` gave it, and no row was dropped since. Rows may have been
  // made, and inline ones may have moved: that is noticed by their key.
  //
  // The row of a place; nullptr when it is not there any more, or kAbsent.
  std::byte* at(Place place, uint64_t key) const;
  // Makes the initial row where there is none. `hint` may be kAbsent (perhaps it was made since)
  // or kUnknown.
  std::byte* at_or_make(uint64_t key, uint64_t rest, Place hint) {
    return at_or_make(key, rest, hint, true);
  }
  // As that, where the caller fills what was made.
  std::byte* at_or_make_empty(uint64_t key, uint64_t rest, Place hint) {
    return at_or_make(key, rest, hint, false);
  }
  // Whether making another row would move those that are inline.
  bool is_full() const { return size_ >= limit_; }
  // What a pull gets: the value of the row, or the initial one.
  void copy_value(uint64_t key, uint64_t rest, Place hint, std::byte* to) const;
  void copy_initial(uint64_t key, std::byte* to) const {
    if (zeros_)
      std::memset(to, 0, value_bytes_);
    else
      initial_row(initial_, layout_.dtype, key, to, layout_.width);
  }
  bool drop(uint64_t key, uint64_t rest);
  // There will be so many rows: makes room for all of them at once.
  void reserve(size_t rows);
  // The same, but the next times it is full, and by leaps. So a table of many slots does not stop
  // for all of them, and takes little memory for what does not come.
  void expect(size_t rows);

  size_t size() const { return size_; }
  size_t memory() const;  // bytes in pages
  const RowLayout& layout() const { return layout_; }
  // Calls f(key, row) for every row, in no order; f may not change the table.
  template <class F>
  void each(F f) const;
  struct Found {
    uint64_t hash;
    uint64_t key;
    const std::byte* row;
  };
  // Appends the rows with a hash of at least `from`, which is of this slot (or 0: all), in the
  // order of their hashes; it may end when these are `most`.
  void find_from(uint64_t from, size_t most, std::vector<Found>& found) const;
  // The keys in the order of their hashes.
  std::vector<uint64_t> keys() const;

 private:
  friend struct RowsInvariants;  // the test's

  static constexpr uint32_t kTail = 4;             // buckets at the end that are nobody's home
  static constexpr uint32_t kEntryBits = 3;        // of an inline place, below the bucket's number
  static constexpr uint32_t kPassedOn = 1u << 31;  // in a meta, above the bits of used entries
  static constexpr uint32_t kNoRow = kAbsent;
  static constexpr uint32_t kEachAhead = 8;  // buckets

  struct Spot {
    uint32_t bucket;
    uint32_t entry;
  };

  std::byte* bucket(uint32_t number) const {
    return index_[shape_.page_of(number)] + shape_.place_in_page(number);
  }
  uint32_t buckets() const { return static_cast<uint32_t>(index_.size()) << shape_.page_shift; }
  uint32_t& meta(std::byte* bucket) const {
    return *reinterpret_cast<uint32_t*>(bucket + shape_.bucket_bytes() - sizeof(uint32_t));
  }
  uint32_t used(std::byte* bucket) const { return meta(bucket) & ~kPassedOn; }
  static uint64_t& key(std::byte* bucket, uint32_t entry) {
    return reinterpret_cast<uint64_t*>(bucket)[entry];
  }
  std::byte* payload(std::byte* bucket, uint32_t entry) const {
    return bucket + shape_.payloads_at + entry * shape_.payload_bytes;
  }
  // Of wide rows.
  uint32_t& number(std::byte* bucket, uint32_t entry) const {
    return reinterpret_cast<uint32_t*>(bucket + shape_.payloads_at)[entry];
  }
  std::byte* numbered(uint32_t number) const {
    return blocks_[number >> block_shift_] + (number & ((1u << block_shift_) - 1)) * row_bytes_;
  }
  std::byte* row(std::byte* bucket, uint32_t entry) const {
    return inline_ ? payload(bucket, entry) : numbered(number(bucket, entry));
  }

  // A value; the usual one is a plain move.
  void copy(const std::byte* from, std::byte* to) const {
    if (value_bytes_ == sizeof(float))
      std::memcpy(to, from, sizeof(float));
    else
      std::memcpy(to, from, value_bytes_);
  }
  // Where a key is; if it is not there, the bucket where the search ended.
  bool locate(uint64_t key, uint64_t rest, Spot& spot) const;
  std::byte* at_or_make(uint64_t key, uint64_t rest, Place hint, bool filled);
  // Of a key that is not there; `from` is a bucket from its home on, and those before it are full.
  std::byte* make(uint64_t key, uint64_t rest, uint32_t from, bool filled);
  uint32_t take_number();
  // A free entry for a key that is not there, in this bucket or after it; what goes into its
  // payload is up to the caller.
  std::byte* insert(uint64_t key, uint32_t number);
  uint32_t pages_for(size_t rows) const;
  void grow(uint32_t pages);
  template <class Bytes>
  void move_in(std::byte* page, Bytes payload_bytes);
  void add_page();
  void close_gap(uint32_t home, uint32_t gap);
  bool move_back(uint32_t from, uint32_t gap);
  uint32_t least_home(uint32_t number) const;
  void fill(uint64_t key, std::byte* row) const;

  // First what every look-up reads.
  std::vector<std::byte*> index_;  // pages of buckets
  uint32_t homes_ = 0;
  uint32_t size_ = 0;
  Shape shape_;
  uint8_t block_shift_;
  bool inline_;
  std::vector<std::byte*> blocks_;  // of the arena
  uint32_t row_bytes_;
  uint32_t value_bytes_;
  bool zeros_;  // what a new row holds

  uint32_t limit_ = 0;         // rows, before it grows
  uint32_t expected_ = 0;      // rows, for which it grows then
  uint32_t numbers_ = 0;       // rows of the arena that were ever made
  uint32_t dropped_ = kNoRow;  // the first of them to use again; each holds the next one's number
  uint32_t slots_;
  RowLayout layout_;
  Initial initial_;
  double first_state_;
  std::shared_ptr<Pages> pages_;
};

// What every row of every call goes through is here, so that it becomes part of its loops.

inline bool Rows::locate(uint64_t key, uint64_t rest, Spot& spot) const {
  spot.bucket = home_of(rest);
  if (homes_ == 0) return false;
  for (;; ++spot.bucket) {
    std::byte* const here = bucket(spot.bucket);
    const uint32_t state = meta(here);
    const uint32_t found = equal_keys(here, key) & state;
    if (found != 0) {
      spot.entry = static_cast<uint32_t>(std::countr_zero(found));
      return true;
    }
    if ((state & kPassedOn) == 0) return false;
  }
}

inline std::byte* Rows::at_or_make(uint64_t key, uint64_t rest, Place hint, bool filled) {
  if (std::byte* const row = at(hint, key)) return row;
  Spot spot;
  if (locate(key, rest, spot)) return row(bucket(spot.bucket), spot.entry);
  return make(key, rest, spot.bucket, filled);
}

inline Rows::Place Rows::find(uint64_t key, uint64_t rest) const {
  Spot spot;
  if (!locate(key, rest, spot)) return kAbsent;
  return inline_ ? spot.bucket << kEntryBits | spot.entry : number(bucket(spot.bucket), spot.entry);
}

template <class Bytes>
Rows::Place Rows::copy_at(const std::byte* bucket, uint32_t number, uint64_t key, std::byte* to,
                          Shape shape, Bytes bytes) const {
  uint32_t state = 0;
  if (bucket != nullptr) {
    std::memcpy(&state, bucket + shape.bucket_bytes() - sizeof state, sizeof state);
    if (const uint32_t found = equal_keys(bucket, key) & state; found != 0) {
      const auto entry = static_cast<uint32_t>(std::countr_zero(found));
      std::memcpy(to, bucket + shape.payloads_at + entry * shape.payload_bytes, bytes);
      return number << kEntryBits | entry;
    }
  }
  if ((state & kPassedOn) == 0) {
    copy_initial(key, to);
    return kAbsent;
  }
  prefetch_bucket(number + 1);
  return kUnknown;
}

inline void Rows::prefetch_row(Place place, size_t bytes) const {
  if (place >= kUnknown) return;
  if (inline_) return prefetch_lines(bucket(place >> kEntryBits), shape_.bucket_bytes());
  prefetch_lines(numbered(place), bytes);
}

inline std::byte* Rows::at(Place place, uint64_t key) const {
  if (place >= kUnknown) return nullptr;
  if (!inline_) return numbered(place);
  std::byte* const here = bucket(place >> kEntryBits);
  const uint32_t entry = place & ((1u << kEntryBits) - 1);
  const bool is_there = Rows::key(here, entry) == key && (used(here) >> entry & 1) != 0;
  return is_there ? payload(here, entry) : nullptr;
}

inline void Rows::copy_value(uint64_t key, uint64_t rest, Place hint, std::byte* to) const {
  const std::byte* from = at(hint, key);
  if (Spot spot; from == nullptr && locate(key, rest, spot))
    from = row(bucket(spot.bucket), spot.entry);
  if (from == nullptr)
    copy_initial(key, to);
  else
    copy(from, to);
}

template <class F>
void Rows::each(F f) const {
  const uint32_t buckets = this->buckets();
  for (uint32_t i = 0; i < buckets; ++i) {
    if (!inline_ && i + kEachAhead < buckets) {
      std::byte* const later = bucket(i + kEachAhead);
      for (uint32_t left = used(later); left != 0; left &= left - 1)
        commute::prefetch(row(later, static_cast<uint32_t>(std::countr_zero(left))));
    }
    std::byte* const here = bucket(i);
    for (uint32_t left = used(here); left != 0; left &= left - 1) {
      const auto entry = static_cast<uint32_t>(std::countr_zero(left));
      f(key(here, entry), row(here, entry));
    }
  }
}

}  // namespace commute
