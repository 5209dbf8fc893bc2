// SPDX-License-Identifier: Apache-2.0
#include "store/slot.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "store/encoding.h"

namespace commute {
namespace {

struct OpHeader {
  OpKind kind;
  uint8_t reserved[3];
  uint32_t table;
  uint64_t authors;
  uint64_t keys;
  uint64_t bytes;
};
static_assert(sizeof(OpHeader) == 32);
static_assert(sizeof(Author) == 24);

struct EncodedSpec {
  Dtype dtype;
  uint8_t mean;
  uint8_t deterministic;
  uint8_t continues;
  int32_t staleness;
  uint64_t count;
  uint8_t sparse;
  Dtype wire;
  Initial::Kind initial;
  uint8_t slot_bits;
  uint32_t admit;
  uint64_t expire_after;
  double a, b;
  uint64_t seed;
};
static_assert(sizeof(EncodedSpec) + Update::kEncodedBytes == TableSpec::kEncodedBytes);

// The same element over and over.
void fill(std::vector<std::byte>& array, Bytes element) {
  for (size_t at = 0; at < array.size(); at += element.size())
    std::memcpy(&array[at], element.data(), element.size());
}

void fill(std::vector<std::byte>& state, Dtype dtype, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == Dtype::kFloat64) return fill(state, std::as_bytes(std::span(&value, 1)));
  if (dtype == Dtype::kFloat32) return fill(state, std::as_bytes(std::span(&narrow, 1)));
}

std::vector<std::byte> first_value(const TableSpec& spec, Bytes given) {
  if (given.size() == spec.bytes()) return {given.begin(), given.end()};
  if (!given.empty() && given.size() != item_bytes(spec.dtype))
    throw std::invalid_argument("the first value of a part has another length");
  std::vector<std::byte> value(spec.bytes());
  if (!given.empty()) fill(value, given);
  return value;
}

std::string describe_rows(const TableSpec& spec) {
  static constexpr const char* kNames[] = {"constant", "uniform", "normal"};
  const Initial& initial = spec.initial;
  std::string text;
  const auto add = [&text](const char* what, const std::string& which) {
    text.append(what).append(which);
  };
  add(", init ", kNames[static_cast<int>(initial.kind)]);
  add(" ", shortest(initial.a));
  if (initial.kind != Initial::Kind::kConstant) {
    add(" ", shortest(initial.b));
    add(" seed ", std::to_string(initial.seed));
  }
  if (spec.wire != spec.dtype) add(", wire ", name(spec.wire));
  if (spec.admit > 1) add(", admit ", std::to_string(spec.admit));
  if (spec.expire_after > 0) add(", expire_after ", std::to_string(spec.expire_after));
  return text;
}

// Raises std::invalid_argument.
void check_rows(const TableSpec& spec) {
  if (spec.count < 1 || spec.count > kWidthMax || spec.admit < 1 || spec.slots == 0)
    throw std::invalid_argument("there are no such rows");
  if (!is_stored(spec.wire) || spec.initial.kind > Initial::Kind::kNormal)
    throw std::invalid_argument("there are no such first rows, or no such dtype on the wire");
  if (spec.wire != spec.dtype && (spec.dtype != Dtype::kFloat32 ||
                                  (spec.wire != Dtype::kFloat16 && spec.wire != Dtype::kBfloat16)))
    throw std::invalid_argument("rows of float32 can travel as float16 or bfloat16");
}

}  // namespace

std::string TableSpec::describe() const {
  std::string text = name(dtype);
  text.append(" with ").append(update.describe());
  text.append(", staleness ").append(bounded() ? std::to_string(staleness) : "None");
  if (mean) text += ", reduce mean";
  if (deterministic) text += ", deterministic";
  if (sparse) text += describe_rows(*this);
  return text + (continues ? ", on_loss continue" : "");
}

std::vector<std::byte> TableSpec::encode() const {
  std::vector<std::byte> bytes;
  put(bytes, EncodedSpec{dtype, mean, deterministic, continues, staleness, count, sparse, wire,
                         initial.kind, static_cast<uint8_t>(std::bit_width(slots) - (slots > 0)),
                         admit, expire_after, initial.a, initial.b, initial.seed});
  const auto numbers = update.encode();
  put_bytes(bytes, numbers.data(), numbers.size());
  return bytes;
}

TableSpec TableSpec::decode(Bytes& bytes) {
  const auto encoded = take<EncodedSpec>(bytes);
  TableSpec spec;
  spec.dtype = encoded.dtype;
  spec.mean = encoded.mean != 0;
  spec.deterministic = encoded.deterministic != 0;
  spec.continues = encoded.continues != 0;
  spec.staleness = encoded.staleness;
  spec.count = encoded.count;
  spec.sparse = encoded.sparse != 0;
  spec.wire = encoded.wire;
  spec.initial = {encoded.initial, encoded.a, encoded.b, encoded.seed};
  spec.slots = spec.sparse && encoded.slot_bits < 32 ? 1u << encoded.slot_bits : 0;
  spec.admit = encoded.admit;
  spec.expire_after = encoded.expire_after;
  spec.update = Update::decode(take_bytes(bytes, Update::kEncodedBytes));
  if (!is_stored(spec.dtype) || spec.staleness < -1)
    throw std::invalid_argument("there is no such dtype or staleness");
  if (!spec.update.takes(spec.dtype))
    throw std::invalid_argument(std::string(name(spec.update.kind)) +
                                " takes float32 and float64, got " + name(spec.dtype));
  if (spec.mean && kernels().divide_for(spec.dtype) == nullptr)
    throw std::invalid_argument("there is no mean of integers");
  if (spec.mean && !spec.update.optimizes() && spec.update.kind != UpdateKind::kSum)
    throw std::invalid_argument(std::string("there is no mean of contributions to ") +
                                name(spec.update.kind));
  if ((spec.mean || spec.deterministic) && !spec.in_step())
    throw std::invalid_argument("mean and deterministic need rounds, that is staleness 0");
  if (spec.sparse) check_rows(spec);
  return spec;
}

std::vector<std::byte> SlotOp::encode() const {
  std::vector<std::byte> bytes;
  bytes.reserve(sizeof(OpHeader) + authors.size() * sizeof(Author) + keys.size_bytes() +
                payload.size());
  put(bytes, OpHeader{kind, {}, table, authors.size(), keys.size(), payload.size()});
  put_bytes(bytes, authors.data(), authors.size() * sizeof(Author));
  put_bytes(bytes, keys.data(), keys.size_bytes());
  put_bytes(bytes, payload.data(), payload.size());
  return bytes;
}

SlotOp SlotOp::decode(Bytes bytes) {
  SlotOp op;
  const auto header = take<OpHeader>(bytes);
  op.kind = header.kind;
  op.table = header.table;
  if (header.authors > bytes.size() / sizeof(Author))
    throw std::invalid_argument("an op names more authors than it has");
  for (uint64_t i = 0; i < header.authors; ++i) op.authors.push_back(take<Author>(bytes));
  if (header.keys > bytes.size() / sizeof(uint64_t))
    throw std::invalid_argument("an op names more keys than it has");
  // Everything before them is of 8 bytes.
  op.keys = {reinterpret_cast<const uint64_t*>(bytes.data()), header.keys};
  bytes = bytes.subspan(op.keys.size_bytes());
  if (header.bytes != bytes.size()) throw std::invalid_argument("an op has another length");
  op.payload = bytes;
  return op;
}

namespace {

// In the order of their hashes: how they came to be is no matter.
void put_rows(std::vector<std::byte>& bytes, const Slot::Part& part) {
  const Rows& rows = *part.rows;
  put_all(bytes, part.sightings.entries());
  for (const uint64_t key : rows.keys()) {
    const Rows::Place place = rows.find(key, rest_of(hash_of(key), part.spec.slots));
    put(bytes, key);
    put_bytes(bytes, rows.at(place, key), rows.layout().bytes);
  }
}

std::unique_ptr<Rows> new_rows(const TableSpec& spec, const std::shared_ptr<Pages>& pages) {
  return std::make_unique<Rows>(spec.layout(), spec.initial, initial_state(spec.update), spec.slots,
                                pages);
}

// Rows that are updated as one array, for one of few elements does not fill a vector. Those that
// are wide, or count their steps, are updated at once. What was added may not move before `apply`.
class RowsTogether {
 public:
  RowsTogether(const TableSpec& spec, const RowLayout& layout)
      : spec_(spec), layout_(layout), gathers_(layout.is_inline && layout.step_at < 0) {}

  void add(std::byte* row, const std::byte* gradient) {
    if (!gathers_) return update(row, gradient);
    rows_[count_] = row;
    given_[count_] = gradient;
    if (++count_ == kRows) apply();
  }

  void apply() {
    if (count_ == 0) return;
    if (layout_.value_bytes == sizeof(float))  // plain moves
      apply_rows(std::integral_constant<size_t, sizeof(float)>{});
    else
      apply_rows(layout_.value_bytes);
    count_ = 0;
  }

 private:
  static constexpr size_t kRows = 32;
  using Array = std::array<std::byte, kRows * kInlineWidth * sizeof(double)>;

  template <class Bytes>
  void apply_rows(Bytes bytes) {
    switch (layout_.states) {
      case 0:
        return apply_rows(bytes, std::integral_constant<size_t, 1>{});
      case 1:
        return apply_rows(bytes, std::integral_constant<size_t, 2>{});
      default:
        return apply_rows(bytes, std::integral_constant<size_t, 3>{});
    }
  }

  template <class Bytes, class Arrays>
  void apply_rows(Bytes bytes, Arrays arrays) {
    const size_t count = count_;
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(gradients_.data() + i * bytes, given_[i], bytes);
      const std::byte* const row = rows_[i];
      for (size_t array = 0; array < arrays; ++array)
        std::memcpy(arrays_[array].data() + i * bytes, row + array * bytes, bytes);
    }
    const std::array<void*, 2> states{arrays_[1].data(), arrays_[2].data()};
    apply_update(spec_.update, spec_.dtype, arrays_[0].data(), states.data(), gradients_.data(),
                 count * layout_.width, 1);
    for (size_t i = 0; i < count; ++i) {
      std::byte* const row = rows_[i];
      for (size_t array = 0; array < arrays; ++array)
        std::memcpy(row + array * bytes, arrays_[array].data() + i * bytes, bytes);
    }
  }

  void update(std::byte* row, const std::byte* gradient) const {
    const size_t bytes = layout_.value_bytes;
    const std::array<void*, 2> states{row + bytes, row + 2 * bytes};
    uint64_t step = 1;
    if (layout_.step_at >= 0) step = ++*reinterpret_cast<uint32_t*>(row + layout_.step_at);
    apply_update(spec_.update, spec_.dtype, row, states.data(), gradient, layout_.width, step);
  }

  const TableSpec& spec_;
  const RowLayout& layout_;
  const bool gathers_;
  size_t count_ = 0;
  std::array<std::byte*, kRows> rows_;
  std::array<const std::byte*, kRows> given_;  // their gradients
  alignas(64) std::array<Array, 3> arrays_;    // value and states
  alignas(64) Array gradients_;
};

// Whether the key has a row, or has been seen often enough to get one.
bool admitted(Slot::Part& part, uint64_t key, uint64_t rest) {
  if (part.rows->find(key, rest) != Rows::kAbsent) return true;
  return part.sightings.see(rest) >= part.spec.admit;
}

}  // namespace

void Slot::apply(const SlotOp& op, Part* part) {
  if (op.kind == OpKind::kTable) {
    TableEntry entry = TableEntry::decode(op.payload);
    directory_.insert_or_assign(entry.name, std::move(entry));
    return;
  }
  if (op.kind == OpKind::kCreate) return create(op);
  if (part == nullptr) part = &parts_.at(op.table);
  if (op.kind == OpKind::kForget) {
    for (const Author& author : op.authors) {
      part->clocks.erase(author.worker);
      part->last.erase(author.worker);
    }
    return;
  }
  switch (op.kind) {
    case OpKind::kContribute:
      contribute(op, *part);
      break;
    case OpKind::kDrop:
      for (const uint64_t key : op.keys)
        part->rows->drop(key, rest_of(hash_of(key), part->spec.slots));
      break;
    case OpKind::kExpire:
      expire(op, *part);
      break;
    case OpKind::kReset:
      reset(op, *part);
      break;
    case OpKind::kLoad:
      load(op, *part);
      break;
    default:
      part->spec.update = part->spec.update.changed_by(Update::decode(op.payload));
  }
  for (const Author& author : op.authors) {
    Last& last = part->last[author.worker];
    if (author.incarnation > last.incarnation) last = {author.incarnation, 0};
    if (author.incarnation == last.incarnation) last.number = std::max(last.number, author.number);
  }
}

void Slot::create(const SlotOp& op) {
  Bytes payload = op.payload;
  Part part;
  part.spec = TableSpec::decode(payload);
  if (part.spec.sparse) {
    part.rows = new_rows(part.spec, pages_);
    parts_.emplace(op.table, std::move(part));
    return;
  }
  part.value = first_value(part.spec, payload);
  part.states.assign(part.spec.update.states(), std::vector<std::byte>(part.value.size()));
  for (auto& state : part.states) fill(state, part.spec.dtype, initial_state(part.spec.update));
  parts_.emplace(op.table, std::move(part));
}

void Slot::contribute(const SlotOp& op, Part& part) {
  for (const Author& author : op.authors) {
    uint64_t& clock = part.clocks[author.worker];
    clock = std::max(clock, author.clock);
  }
  if (op.payload.empty()) return;
  if (part.rows) return contribute_rows(op, part);
  std::array<void*, 2> states{};
  for (size_t i = 0; i < part.states.size(); ++i) states[i] = part.states[i].data();
  ++part.updates;
  apply_update(part.spec.update, part.spec.dtype, part.value.data(), states.data(),
               op.payload.data(), part.spec.count, part.updates);
}

// Each row is updated as a dense table of its own would be, by the contributions that name it.
void Slot::contribute_rows(const SlotOp& op, Part& part) {
  Rows& rows = *part.rows;
  const RowLayout& layout = rows.layout();
  const TableSpec& spec = part.spec;
  uint64_t now = 0;
  for (const Author& author : op.authors) now = std::max(now, author.clock);
  ++part.updates;
  RowsTogether together(spec, layout);
  const std::byte* gradient = op.payload.data();
  for (size_t i = 0; i < op.keys.size(); ++i, gradient += layout.value_bytes) {
    const uint64_t key = op.keys[i];
    const Rows::Place hint = op.places != nullptr ? op.places[i] : Rows::kUnknown;
    std::byte* row = rows.at(hint, key);
    if (row == nullptr) {
      const uint64_t rest = rest_of(hash_of(key), spec.slots);
      if (spec.admit > 1 && !admitted(part, key, rest)) continue;
      if (rows.is_full()) together.apply();
      row = rows.at_or_make(key, rest, Rows::kAbsent);
    }
    if (layout.touched_at >= 0)
      *reinterpret_cast<uint32_t*>(row + layout.touched_at) = static_cast<uint32_t>(now);
    together.add(row, gradient);
  }
  together.apply();
}

void Slot::expire(const SlotOp& op, Part& part) {
  Bytes payload = op.payload;
  const auto now = static_cast<uint32_t>(take<uint64_t>(payload));
  Rows& rows = *part.rows;
  const RowLayout& layout = rows.layout();
  std::vector<uint64_t> old;
  rows.each([&](uint64_t key, const std::byte* row) {
    // Clocks wrap: what matters is the distance. A row may also be newer than `now`.
    const auto age =
        static_cast<int32_t>(now - *reinterpret_cast<const uint32_t*>(row + layout.touched_at));
    if (age > 0 && static_cast<uint64_t>(age) >= part.spec.expire_after) old.push_back(key);
  });
  for (const uint64_t key : old) rows.drop(key, rest_of(hash_of(key), part.spec.slots));
}

void Slot::reset(const SlotOp& op, Part& part) const {
  Bytes payload = op.payload;
  const auto clock = take<uint64_t>(payload);
  for (auto& [worker, known] : part.clocks) known = clock;
  if (!part.rows) return;
  part.rows = new_rows(part.spec, pages_);
  part.sightings = {};
}

void Slot::load(const SlotOp& op, Part& part) {
  if (part.rows) {
    const size_t bytes = part.rows->layout().bytes;
    for (size_t i = 0; i < op.keys.size(); ++i) {
      const uint64_t rest = rest_of(hash_of(op.keys[i]), part.spec.slots);
      const Rows::Place hint = op.places != nullptr ? op.places[i] : Rows::kUnknown;
      std::memcpy(part.rows->at_or_make_empty(op.keys[i], rest, hint),
                  op.payload.data() + i * bytes, bytes);
    }
    return;
  }
  Bytes payload = op.payload;
  const auto saved = take<SavedArray>(payload);
  if (saved.which > part.states.size() || payload.size() != part.value.size())
    throw std::invalid_argument("a saved array has another length, or is of another update");
  auto& array = saved.which == 0 ? part.value : part.states[saved.which - 1];
  array.assign(payload.begin(), payload.end());
  part.updates = saved.updates;
}

const Slot::Part* Slot::part(uint32_t table) const {
  const auto found = parts_.find(table);
  return found == parts_.end() ? nullptr : &found->second;
}

std::vector<std::byte> Slot::image() const {
  std::vector<std::byte> bytes;
  for (const auto& [table, part] : parts_) {
    put(bytes, table);
    const auto spec = part.spec.encode();
    put_bytes(bytes, spec.data(), spec.size());
    put(bytes, part.updates);
    put_bytes(bytes, part.value.data(), part.value.size());
    for (const auto& state : part.states) put_bytes(bytes, state.data(), state.size());
    if (part.rows) put_rows(bytes, part);
    for (const auto& [worker, clock] : part.clocks) {
      put(bytes, worker);
      put(bytes, clock);
    }
    for (const auto& [worker, last] : part.last) {
      put(bytes, worker);
      put(bytes, last.incarnation);
      put(bytes, last.number);
    }
  }
  for (const auto& [name, entry] : directory_) {
    const auto encoded = entry.encode();
    put_bytes(bytes, encoded.data(), encoded.size());
  }
  return bytes;
}

}  // namespace commute
