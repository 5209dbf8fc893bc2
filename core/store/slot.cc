// SPDX-License-Identifier: Apache-2.0
#include "store/slot.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels.h"

namespace commute {
namespace {

struct OpHeader {
  OpKind kind;
  uint8_t reserved[3];
  uint32_t table;
  uint64_t authors;
  uint64_t bytes;
};
static_assert(sizeof(OpHeader) == 24);
static_assert(sizeof(Author) == 24);

void put(std::vector<std::byte>& into, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const size_t at = into.size();
  into.resize(at + bytes);
  std::memcpy(into.data() + at, from, bytes);
}

template <class T>
void put(std::vector<std::byte>& into, const T& value) {
  put(into, &value, sizeof value);
}

template <class T>
T take(Bytes& from) {
  T value;
  if (from.size() < sizeof value) throw std::invalid_argument("an op ends too early");
  std::memcpy(&value, from.data(), sizeof value);
  from = from.subspan(sizeof value);
  return value;
}

struct EncodedSpec {
  Dtype dtype;
  uint8_t mean;
  uint8_t deterministic;
  uint8_t reserved;
  int32_t staleness;
  uint64_t count;
};
static_assert(sizeof(EncodedSpec) + Update::kEncodedBytes == TableSpec::kEncodedBytes);

void fill(std::vector<std::byte>& state, Dtype dtype, double value) {
  for (size_t at = 0; at < state.size(); at += item_bytes(dtype)) {
    const auto narrow = static_cast<float>(value);
    if (dtype == Dtype::kFloat64)
      std::memcpy(&state[at], &value, sizeof value);
    else
      std::memcpy(&state[at], &narrow, sizeof narrow);
  }
}

}  // namespace

std::string TableSpec::describe() const {
  std::string text = std::to_string(count) + " " + name(dtype) + " with " + update.describe();
  text += bounded() ? ", staleness " + std::to_string(staleness) : ", staleness None";
  if (mean) text += ", mean";
  return text + (deterministic ? ", deterministic" : "");
}

std::vector<std::byte> TableSpec::encode(Bytes first) const {
  std::vector<std::byte> bytes;
  bytes.reserve(kEncodedBytes + first.size());
  put(bytes, EncodedSpec{dtype, mean, deterministic, 0, staleness, count});
  const auto numbers = update.encode();
  put(bytes, numbers.data(), numbers.size());
  put(bytes, first.data(), first.size());
  return bytes;
}

TableSpec TableSpec::decode(Bytes& bytes) {
  const auto encoded = take<EncodedSpec>(bytes);
  if (bytes.size() < Update::kEncodedBytes) throw std::invalid_argument("a spec ends too early");
  TableSpec spec;
  spec.dtype = encoded.dtype;
  spec.mean = encoded.mean != 0;
  spec.deterministic = encoded.deterministic != 0;
  spec.staleness = encoded.staleness;
  spec.count = encoded.count;
  spec.update = Update::decode(bytes.first(Update::kEncodedBytes));
  bytes = bytes.subspan(Update::kEncodedBytes);
  if (static_cast<size_t>(spec.dtype) >= kDtypeCount || spec.staleness < -1)
    throw std::invalid_argument("a spec with an unknown dtype or staleness");
  if (!spec.update.takes(spec.dtype))
    throw std::invalid_argument(std::string(name(spec.update.kind)) +
                                " takes float32 and float64, got " + name(spec.dtype));
  if (spec.mean && kernels().divide_for(spec.dtype) == nullptr)
    throw std::invalid_argument("there is no mean of integers");
  if (spec.count > bytes.size() / item_bytes(spec.dtype) || spec.bytes() != bytes.size())
    throw std::invalid_argument("the first value of a part has another length");
  return spec;
}

std::vector<std::byte> SlotOp::encode() const {
  std::vector<std::byte> bytes;
  bytes.reserve(sizeof(OpHeader) + authors.size() * sizeof(Author) + payload.size());
  put(bytes, OpHeader{kind, {}, table, authors.size(), payload.size()});
  put(bytes, authors.data(), authors.size() * sizeof(Author));
  put(bytes, payload.data(), payload.size());
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
  if (header.bytes != bytes.size()) throw std::invalid_argument("an op has another length");
  op.payload = bytes;
  return op;
}

void Slot::apply(const SlotOp& op) {
  if (op.kind == OpKind::kCreate) {
    create(op);
  } else if (op.kind == OpKind::kContribute) {
    contribute(op);
  } else {
    parts_.at(op.table).spec.update = Update::decode(op.payload);
  }
  for (const Author& author : op.authors) {
    Last& last = last_[author.worker];
    if (author.incarnation > last.incarnation) last = {author.incarnation, 0};
    if (author.incarnation == last.incarnation) last.number = std::max(last.number, author.number);
  }
}

void Slot::create(const SlotOp& op) {
  Bytes payload = op.payload;
  Part part;
  part.spec = TableSpec::decode(payload);
  part.value.assign(payload.begin(), payload.end());
  part.states.assign(part.spec.update.states(), std::vector<std::byte>(part.value.size()));
  for (auto& state : part.states) fill(state, part.spec.dtype, initial_state(part.spec.update));
  parts_.emplace(op.table, std::move(part));
}

void Slot::contribute(const SlotOp& op) {
  Part& part = parts_.at(op.table);
  for (const Author& author : op.authors) {
    uint64_t& clock = part.clocks[author.worker];
    clock = std::max(clock, author.clock);
  }
  if (op.payload.empty()) return;
  std::vector<void*> states;
  for (auto& state : part.states) states.push_back(state.data());
  ++part.updates;
  apply_update(part.spec.update, part.spec.dtype, part.value.data(), states.data(),
               op.payload.data(), part.spec.count, part.updates);
}

const Slot::Part* Slot::part(uint32_t table) const {
  const auto found = parts_.find(table);
  return found == parts_.end() ? nullptr : &found->second;
}

uint64_t Slot::last(uint32_t worker, uint32_t incarnation) const {
  const auto found = last_.find(worker);
  return found == last_.end() || found->second.incarnation != incarnation ? 0
                                                                          : found->second.number;
}

std::vector<std::byte> Slot::image() const {
  std::vector<std::byte> bytes;
  for (const auto& [table, part] : parts_) {
    put(bytes, table);
    put(bytes, part.updates);
    put(bytes, part.spec.count);
    put(bytes, part.value.data(), part.value.size());
    for (const auto& state : part.states) put(bytes, state.data(), state.size());
    for (const auto& [worker, clock] : part.clocks) {
      put(bytes, worker);
      put(bytes, clock);
    }
  }
  for (const auto& [worker, last] : last_) {
    put(bytes, worker);
    put(bytes, last.incarnation);
    put(bytes, last.number);
  }
  return bytes;
}

}  // namespace commute
