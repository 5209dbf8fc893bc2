// SPDX-License-Identifier: Apache-2.0
#include "store/slot.h"

#include <algorithm>
#include <array>
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
  uint64_t bytes;
};
static_assert(sizeof(OpHeader) == 24);
static_assert(sizeof(Author) == 24);

struct EncodedSpec {
  Dtype dtype;
  uint8_t mean;
  uint8_t deterministic;
  uint8_t continues;
  int32_t staleness;
  uint64_t count;
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

}  // namespace

std::string TableSpec::describe() const {
  std::string text = std::string(name(dtype)) + " with " + update.describe();
  text += bounded() ? ", staleness " + std::to_string(staleness) : ", staleness None";
  if (mean) text += ", reduce mean";
  if (deterministic) text += ", deterministic";
  return text + (continues ? ", on_loss continue" : "");
}

std::vector<std::byte> TableSpec::encode() const {
  std::vector<std::byte> bytes;
  put(bytes, EncodedSpec{dtype, mean, deterministic, continues, staleness, count});
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
  spec.update = Update::decode(take_bytes(bytes, Update::kEncodedBytes));
  if (!is_dtype(index(spec.dtype)) || spec.staleness < -1)
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
  return spec;
}

std::vector<std::byte> SlotOp::encode() const {
  std::vector<std::byte> bytes;
  bytes.reserve(sizeof(OpHeader) + authors.size() * sizeof(Author) + payload.size());
  put(bytes, OpHeader{kind, {}, table, authors.size(), payload.size()});
  put_bytes(bytes, authors.data(), authors.size() * sizeof(Author));
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
  if (header.bytes != bytes.size()) throw std::invalid_argument("an op has another length");
  op.payload = bytes;
  return op;
}

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
  if (op.kind == OpKind::kContribute)
    contribute(op, *part);
  else
    part->spec.update = part->spec.update.changed_by(Update::decode(op.payload));
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
  std::array<void*, 2> states{};
  for (size_t i = 0; i < part.states.size(); ++i) states[i] = part.states[i].data();
  ++part.updates;
  apply_update(part.spec.update, part.spec.dtype, part.value.data(), states.data(),
               op.payload.data(), part.spec.count, part.updates);
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
