// SPDX-License-Identifier: Apache-2.0
#include "store/rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

namespace commute {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kBlockBytes = 8192;  // of the arena, at most, unless a row is larger
// Entries of a bucket, if it can be, and of one that is a single cache line.
constexpr size_t kEntriesMin = 4, kEntriesOfLineMin = 3;
constexpr size_t kFtrlBytes = 12;  // of a row of one number, which is moved without a call

// How many entries may be used, and by how much the buckets grow then. Growing takes a good part of
// the time of making a row: rows of FTRL, with their key, take at most 1.9 times their bytes.
struct Share {
  uint32_t of, in;
};
constexpr Share kUsedMax{4, 5};
constexpr Share kGrowth{7, 5};
// Towards what is expected it grows by so much at a time: a wish that was wrong takes no more than
// that, and of rows that do come each is moved a few hundredths of a time more.
constexpr uint32_t kLeap = 16;

size_t rounded_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// So that nothing is lost between the taking of a block and its entry here.
void make_room(std::vector<std::byte*>& blocks) {
  if (blocks.size() == blocks.capacity()) blocks.reserve(blocks.size() + blocks.size() / 2 + 1);
}

// Random numbers that depend on a seed and a key (splitmix64).
class Stream {
 public:
  Stream(uint64_t seed, uint64_t key) : state_(hash_of(key ^ hash_of(seed + kStep))) {}

  // In [0, 1), a multiple of 2^-53.
  double next() { return static_cast<double>(hash_of(state_ += kStep) >> 11) * 0x1p-53; }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
  uint64_t state_;
};

// Of a positive number. The C library's is not the same on every machine.
double log_of(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.70710678118654752) {
    mantissa *= 2;
    --exponent;
  }
  // log m = 2 artanh t; |t| < 0.172, so the next term is below 2^-55.
  const double t = (mantissa - 1) / (mantissa + 1);
  const double square = t * t;
  double series = 0;
  for (int n = 21; n >= 1; n -= 2) series = series * square + 1.0 / n;
  return 2 * t * series + exponent * 0.69314718055994531;
}

template <class T>
void uniform(const Initial& initial, uint64_t key, T* row, size_t width) {
  Stream stream(initial.seed, key);
  for (size_t i = 0; i < width; ++i) {
    row[i] = static_cast<T>(initial.a + (initial.b - initial.a) * stream.next());
    if (!(row[i] < static_cast<T>(initial.b))) row[i] = static_cast<T>(initial.a);  // rounded up
  }
}

// Marsaglia's polar method: a point in the unit circle gives two elements.
template <class T>
void normal(const Initial& initial, uint64_t key, T* row, size_t width) {
  Stream stream(initial.seed, key);
  for (size_t i = 0; i < width; i += 2) {
    double u, v, square;
    do {
      u = 2 * stream.next() - 1;
      v = 2 * stream.next() - 1;
      square = u * u + v * v;
    } while (square >= 1 || square == 0);
    const double scale = initial.b * std::sqrt(-2 * log_of(square) / square);
    row[i] = static_cast<T>(initial.a + scale * u);
    if (i + 1 < width) row[i + 1] = static_cast<T>(initial.a + scale * v);
  }
}

template <class T>
void draw(const Initial& initial, uint64_t key, T* row, size_t width) {
  initial.kind == Initial::Kind::kUniform ? uniform(initial, key, row, width)
                                          : normal(initial, key, row, width);
}

// The bits of a float of 16 bits, rounded to nearest even straight from the double.
uint16_t rounded16(double value, int mantissa_bits, int exponent_min) {
  const auto infinity = static_cast<uint16_t>(0x7fff >> mantissa_bits << mantissa_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (mantissa_bits - 1));
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (value == 0) return static_cast<uint16_t>(sign);
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, exponent_min);  // denormal ones share the least
  const double steps = std::nearbyint(std::ldexp(std::abs(value), mantissa_bits - exponent));
  // A normal number's steps begin with the 1 that is not stored: it counts the exponent up.
  const double bits = std::ldexp(exponent - exponent_min, mantissa_bits) + steps;
  return static_cast<uint16_t>(sign | (bits < infinity ? static_cast<int>(bits) : infinity));
}

// What is too large for an integer becomes the largest.
template <class T>
T cast(double value) {
  if constexpr (std::is_integral_v<T>) {
    if (std::isnan(value)) return 0;
    if (value <= static_cast<double>(std::numeric_limits<T>::min()))
      return std::numeric_limits<T>::min();
    if (value >= static_cast<double>(std::numeric_limits<T>::max()))
      return std::numeric_limits<T>::max();
  }
  return static_cast<T>(value);
}

template <class T>
void repeat(T value, std::byte* row, size_t width) {
  for (size_t i = 0; i < width; ++i) std::memcpy(row + i * sizeof value, &value, sizeof value);
}

void repeat(Dtype dtype, double value, std::byte* row, size_t width) {
  switch (dtype) {
    case Dtype::kInt8:
      return repeat(cast<int8_t>(value), row, width);
    case Dtype::kUint8:
      return repeat(cast<uint8_t>(value), row, width);
    case Dtype::kInt16:
      return repeat(cast<int16_t>(value), row, width);
    case Dtype::kUint16:
      return repeat(cast<uint16_t>(value), row, width);
    case Dtype::kInt32:
      return repeat(cast<int32_t>(value), row, width);
    case Dtype::kUint32:
      return repeat(cast<uint32_t>(value), row, width);
    case Dtype::kInt64:
      return repeat(cast<int64_t>(value), row, width);
    case Dtype::kUint64:
      return repeat(cast<uint64_t>(value), row, width);
    case Dtype::kFloat16:
      return repeat(rounded16(value, 10, -14), row, width);
    case Dtype::kBfloat16:
      return repeat(rounded16(value, 7, -126), row, width);
    case Dtype::kFloat32:
      return repeat(cast<float>(value), row, width);
    case Dtype::kFloat64:
      return repeat(value, row, width);
    case Dtype::kBool:
    case Dtype::kComplex64:
    case Dtype::kComplex128:
      return;  // no table has them: see is_stored
  }
}

// Adagrad counts only for its decay.
bool counts_steps(const Update& update) {
  return update.kind == UpdateKind::kMomentum || update.kind == UpdateKind::kAdam ||
         (update.kind == UpdateKind::kAdagrad && update.lr_decay != 0);
}

}  // namespace

void initial_row(const Initial& initial, Dtype dtype, uint64_t key, void* row, size_t width) {
  if (initial.kind == Initial::Kind::kConstant)
    repeat(dtype, initial.a, static_cast<std::byte*>(row), width);
  else if (dtype == Dtype::kFloat64)
    draw(initial, key, static_cast<double*>(row), width);
  else
    draw(initial, key, static_cast<float*>(row), width);
}

RowLayout::RowLayout(Dtype dtype, uint32_t width, const Update& update, bool expires)
    : dtype(dtype),
      width(width),
      value_bytes(width * item_bytes(dtype)),
      states(update.states()),
      step_at(-1),
      touched_at(-1),
      bytes(value_bytes * (1 + states)),
      is_inline(width <= kInlineWidth) {
  const bool counts = counts_steps(update);
  size_t alignment = item_bytes(dtype);
  if (counts || expires) {
    alignment = std::max(alignment, sizeof(uint32_t));
    bytes = rounded_up(bytes, sizeof(uint32_t));
  }
  if (counts) step_at = static_cast<ptrdiff_t>(std::exchange(bytes, bytes + sizeof(uint32_t)));
  if (expires) touched_at = static_cast<ptrdiff_t>(std::exchange(bytes, bytes + sizeof(uint32_t)));
  bytes = rounded_up(bytes, alignment);

  // The smallest bucket that is used well; where none is, the best. One of few entries passes on
  // often, which costs more than a larger one, unless it is fetched as one line (rows of FTRL, a
  // batch of learning: 23 instead of 25 ns a pull, and less memory to move).
  const size_t entry = sizeof(uint64_t) + (is_inline ? bytes : sizeof(uint32_t));
  double best = 0;
  for (const size_t size : {64, 128, 256}) {
    const size_t fit = (size - sizeof(uint32_t)) / entry;
    const size_t enough = size == kCacheLineBytes ? kEntriesOfLineMin : kEntriesMin;
    const double share = static_cast<double>(fit * entry + sizeof(uint32_t)) / size;
    if (fit == 0 || (share <= best && entries >= kEntriesMin)) continue;
    best = share;
    bucket_bytes = size;
    entries = static_cast<uint32_t>(fit);
    if (share >= 0.85 && fit >= enough) break;
  }
}

Rows::Rows(const RowLayout& layout, const Initial& initial, double first_state, uint32_t slots,
           std::shared_ptr<Pages> pages)
    : shape_{static_cast<uint8_t>(std::countr_zero(layout.bucket_bytes)),
             static_cast<uint8_t>(std::countr_zero(kPageBytes / layout.bucket_bytes)),
             static_cast<uint16_t>(layout.entries * sizeof(uint64_t)),
             static_cast<uint16_t>(layout.is_inline ? layout.bytes : sizeof(uint32_t))},
      block_shift_(static_cast<uint8_t>(
          std::bit_width(std::max<size_t>(1, kBlockBytes / layout.bytes)) - 1)),
      inline_(layout.is_inline),
      row_bytes_(static_cast<uint32_t>(layout.bytes)),
      value_bytes_(static_cast<uint32_t>(layout.value_bytes)),
      zeros_(initial.kind == Initial::Kind::kConstant && std::bit_cast<uint64_t>(initial.a) == 0 &&
             std::bit_cast<uint64_t>(first_state) == 0),
      slots_(slots),
      layout_(layout),
      initial_(initial),
      first_state_(first_state),
      pages_(std::move(pages)) {}

Rows::~Rows() {
  for (std::byte* page : index_) pages_->give(page, kPageBytes);
  for (std::byte* block : blocks_) pages_->give(block, size_t{row_bytes_} << block_shift_);
}

size_t Rows::memory() const {
  return index_.size() * kPageBytes + blocks_.size() * (size_t{row_bytes_} << block_shift_);
}

std::byte* Rows::make(uint64_t key, uint64_t rest, uint32_t from, bool filled) {
  if (is_full()) {
    const auto pages = static_cast<uint32_t>(index_.size());
    const uint32_t leap = std::min(pages_for(expected_), std::max(pages, 1u) * kLeap);
    grow(std::max({pages + 1, pages * kGrowth.of / kGrowth.in, leap}));
    from = home_of(rest);
  }
  std::byte* made;
  if (inline_) {
    made = insert(key, from);
  } else {
    const uint32_t number = take_number();
    std::memcpy(insert(key, from), &number, sizeof number);
    made = numbered(number);
  }
  ++size_;
  if (filled) fill(key, made);
  return made;
}

void Rows::fill(uint64_t key, std::byte* row) const {
  if (zeros_ && inline_) {  // in words: a few, for which a call takes longer
    for (size_t at = 0; at + sizeof(uint32_t) <= row_bytes_; at += sizeof(uint32_t))
      std::memset(row + at, 0, sizeof(uint32_t));
    for (size_t at = row_bytes_ & ~size_t{3}; at < row_bytes_; ++at) row[at] = std::byte{0};
    return;
  }
  if (zeros_) {
    std::memset(row, 0, row_bytes_);
    return;
  }
  initial_row(initial_, layout_.dtype, key, row, layout_.width);
  std::byte* const states = row + value_bytes_;
  const size_t filled = layout_.states * value_bytes_;
  repeat(layout_.dtype, first_state_, states, layout_.states * layout_.width);
  std::memset(states + filled, 0, row_bytes_ - value_bytes_ - filled);
}

uint32_t Rows::take_number() {
  if (dropped_ != kNoRow) {
    const uint32_t number = dropped_;
    std::memcpy(&dropped_, numbered(number), sizeof dropped_);
    return number;
  }
  if (numbers_ == kUnknown) throw std::bad_alloc();
  if (numbers_ >> block_shift_ == blocks_.size()) {
    make_room(blocks_);
    blocks_.push_back(pages_->take(size_t{row_bytes_} << block_shift_));
  }
  return numbers_++;
}

std::byte* Rows::insert(uint64_t key, uint32_t number) {
  for (;; ++number) {
    std::byte* const here = bucket(number);
    const auto entry = static_cast<uint32_t>(std::countr_one(meta(here)));
    if (entry < layout_.entries) {
      meta(here) |= 1u << entry;
      Rows::key(here, entry) = key;
      return payload(here, entry);
    }
    if (number + 1 == buckets()) add_page();
    meta(here) |= kPassedOn;
  }
}

void Rows::add_page() {
  make_room(index_);
  index_.push_back(pages_->take(kPageBytes));
}

// Into new pages, in the order of hashes; the old ones go to whoever grows next, while they are
// still in the caches. If there is no memory nothing has changed.
void Rows::grow(uint32_t pages) {
  auto old = std::exchange(index_, {});
  const auto old_homes = std::exchange(homes_, (pages << shape_.page_shift) - kTail);
  try {
    index_.reserve(pages);
    while (index_.size() < pages) add_page();
    for (std::byte* const page : old)
      shape_.payload_bytes == kFtrlBytes
          ? move_in(page, std::integral_constant<size_t, kFtrlBytes>{})
          : move_in(page, shape_.payload_bytes);
  } catch (const std::bad_alloc&) {
    index_.swap(old);
    homes_ = old_homes;
    for (std::byte* const page : old) pages_->give(page, kPageBytes);
    throw;
  }
  limit_ = static_cast<uint32_t>(uint64_t{homes_} * layout_.entries * kUsedMax.of / kUsedMax.in);
  for (std::byte* const page : old) pages_->give(page, kPageBytes);
}

// The entries of another page.
template <class Bytes>
void Rows::move_in(std::byte* page, Bytes payload_bytes) {
  for (size_t at = 0; at < kPageBytes; at += shape_.bucket_bytes()) {
    std::byte* const from = page + at;
    for (uint32_t left = used(from); left != 0; left &= left - 1) {
      const auto entry = static_cast<uint32_t>(std::countr_zero(left));
      const uint64_t key = Rows::key(from, entry);
      std::byte* const to = insert(key, home_of(rest_of(hash_of(key), slots_)));
      std::memcpy(to, payload(from, entry), payload_bytes);
    }
  }
}

uint32_t Rows::pages_for(size_t rows) const {
  const size_t homes = rows * kUsedMax.in / kUsedMax.of / layout_.entries + 1;
  return static_cast<uint32_t>(((homes + kTail) >> shape_.page_shift) + 1);
}

void Rows::reserve(size_t rows) {
  rows = std::min<size_t>(rows, kUnknown);
  // No fewer pages than there are: places that were found stay within them.
  if (rows > limit_) grow(std::max(pages_for(rows), static_cast<uint32_t>(index_.size())));
}

void Rows::expect(size_t rows) {
  expected_ = static_cast<uint32_t>(std::min<size_t>(rows, kUnknown));
}

bool Rows::drop(uint64_t key, uint64_t rest) {
  Spot spot;
  if (!locate(key, rest, spot)) return false;
  std::byte* const here = bucket(spot.bucket);
  if (!inline_) {
    const uint32_t number = Rows::number(here, spot.entry);
    std::memcpy(numbered(number), &dropped_, sizeof dropped_);
    dropped_ = number;
  }
  meta(here) &= ~(1u << spot.entry);
  --size_;
  close_gap(home_of(rest), spot.bucket);
  return true;
}

// Entries after the gap that belong in it or before move up, each leaving the next gap; then the
// marks that only they and the dropped entry had caused go.
void Rows::close_gap(uint32_t home, uint32_t gap) {
  uint32_t last = gap;
  while (meta(bucket(last)) & kPassedOn) {
    ++last;
    if (move_back(last, gap)) gap = last;
  }
  for (uint32_t least = kNoRow; last > home; --last) {
    least = std::min(least, least_home(last));
    uint32_t& before = meta(bucket(last - 1));
    before = least < last ? before | kPassedOn : before & ~kPassedOn;
  }
}

bool Rows::move_back(uint32_t from, uint32_t gap) {
  std::byte* const source = bucket(from);
  for (uint32_t left = used(source); left != 0; left &= left - 1) {
    const auto entry = static_cast<uint32_t>(std::countr_zero(left));
    const uint64_t moved = key(source, entry);
    if (home_of(rest_of(hash_of(moved), slots_)) > gap) continue;
    std::byte* const target = bucket(gap);
    const auto free = static_cast<uint32_t>(std::countr_one(used(target)));
    key(target, free) = moved;
    std::memcpy(payload(target, free), payload(source, entry), shape_.payload_bytes);
    meta(target) |= 1u << free;
    meta(source) &= ~(1u << entry);
    return true;
  }
  return false;
}

uint32_t Rows::least_home(uint32_t number) const {
  std::byte* const here = bucket(number);
  uint32_t least = number;
  for (uint32_t left = used(here); left != 0; left &= left - 1) {
    const uint64_t key = Rows::key(here, static_cast<uint32_t>(std::countr_zero(left)));
    least = std::min(least, home_of(rest_of(hash_of(key), slots_)));
  }
  return least;
}

namespace {

// By their hashes; mostly a handful.
void sort_found(Rows::Found* begin, Rows::Found* end) {
  constexpr ptrdiff_t kFew = 16;
  const auto by_hash = [](const Rows::Found& a, const Rows::Found& b) { return a.hash < b.hash; };
  if (end - begin > kFew) return std::sort(begin, end, by_hash);
  for (Rows::Found* one = begin; one < end; ++one) {
    const Rows::Found moved = *one;
    Rows::Found* to = one;
    for (; to > begin && moved.hash < to[-1].hash; --to) *to = to[-1];
    *to = moved;
  }
}

}  // namespace

// Up to a bucket that has not passed on there are all entries that belong up to there, and no
// others: what follows has larger hashes.
void Rows::find_from(uint64_t from, size_t most, std::vector<Found>& found) const {
  if (homes_ == 0) return;
  const uint32_t buckets = this->buckets();
  const size_t enough = found.size() + most;
  size_t in_order = found.size();
  for (uint32_t i = home_of(rest_of(from, slots_)); i < buckets; ++i) {
    std::byte* const here = bucket(i);
    for (uint32_t left = used(here); left != 0; left &= left - 1) {
      const auto entry = static_cast<uint32_t>(std::countr_zero(left));
      const uint64_t hash = hash_of(key(here, entry));
      if (hash >= from) found.push_back({hash, key(here, entry), row(here, entry)});
    }
    if (meta(here) & kPassedOn) continue;
    sort_found(found.data() + in_order, found.data() + found.size());
    in_order = found.size();
    if (in_order >= enough) return;
  }
}

std::vector<uint64_t> Rows::keys() const {
  std::vector<std::pair<uint64_t, uint64_t>> hashed;
  hashed.reserve(size_);
  each([&](uint64_t key, const std::byte*) { hashed.emplace_back(hash_of(key), key); });
  std::sort(hashed.begin(), hashed.end());
  std::vector<uint64_t> keys(hashed.size());
  std::transform(hashed.begin(), hashed.end(), keys.begin(),
                 [](const auto& one) { return one.second; });
  return keys;
}

}  // namespace commute
