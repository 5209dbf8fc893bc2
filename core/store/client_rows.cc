// SPDX-License-Identifier: Apache-2.0
// The client's calls about rows: keys in the order they travel, cut into messages.
//
// A call is cut the same way whatever it does, so that the lists of keys of a pull are those of the
// push that follows. Cuts are where a slot ends; a slot whose rows are more than a message can hold
// (1 MB) is sent in pieces, which its shard puts together; such a pull is not of one moment.
#include <algorithm>
#include <cstring>
#include <utility>

#include "store/client.h"
#include "store/encoding.h"
#include "store/row_desk.h"
#include "store/wire.h"

namespace commute {
namespace {

// Of keys and rows in one message: small enough that a call is many, which overlap.
constexpr size_t kMessageBytes = 64 << 10;
// Digests of lists that shards were asked to remember; beyond that all are forgotten.
constexpr size_t kKnownMax = 1 << 16;

// Rows of a message: as many as are quick; more only where they are of one slot.
struct Size {
  uint32_t usual = 1;
  uint32_t most = 1;
};

Size size_of(const TableSpec& spec, size_t given) {
  const size_t row = sizeof(uint64_t) + spec.bytes();
  const auto rows = [&](size_t bytes) {
    return static_cast<uint32_t>(std::max<size_t>(1, (given == 0 ? bytes : given) / row));
  };
  return {rows(kMessageBytes), rows(kPartBytesMax)};
}

// Bytes of payloads that are kept to be used again.
constexpr size_t kUsedMax = 4 << 20;

struct Cut {
  uint32_t end = 0;
  bool within = false;  // a slot
};

// Where the message that begins at `first` ends, of keys up to `end`. What is read or written of a
// slot by one message is read or written at once.
Cut cut(const KeyOrder& order, const TableSpec& spec, Size size, uint32_t first, uint32_t end) {
  if (end - first <= size.usual) return {end, false};
  const auto splits = [&](uint32_t at) {
    return slot_of(hash_of(order.keys[at]), spec.slots) ==
           slot_of(hash_of(order.keys[at - 1]), spec.slots);
  };
  uint32_t at = first + size.usual;
  while (at > first && splits(at)) --at;
  if (at > first) return {at, false};
  at = first + size.usual;
  while (at < end && at - first < size.most && splits(at)) ++at;
  return {at, at < end && splits(at)};
}

// Rows with their state, as bytes.
TableSpec saved(const TableSpec& spec) {
  TableSpec bytes = spec;
  bytes.dtype = bytes.wire = Dtype::kUint8;
  bytes.count = spec.layout().bytes;
  bytes.update = {};
  bytes.update.kind = UpdateKind::kAssign;
  return bytes;
}

}  // namespace

Client::Order Client::order_of(std::span<const uint64_t> keys) const {
  return std::make_shared<const RowOrder>(
      RowOrder{KeyOrder::of(keys, settings_.slots, settings_.shards), false, {}});
}

Client::Order Client::distinct_of(std::span<const uint64_t> keys, uint32_t* index,
                                  bool come_again) const {
  return std::make_shared<const RowOrder>(RowOrder{
      KeyOrder::distinct(keys, settings_.slots, settings_.shards, index), !come_again, {}});
}

uint64_t Client::push_rows(uint32_t id, const RowCall& call, const std::function<void()>& move) {
  Table& table = tables_.at(id);
  StoreHeader header;
  header.clock = table.clock + 1;
  header.flags = static_cast<uint8_t>((call.piece ? kStorePiece : 0) |
                                      (call.out != nullptr ? kStoreWants : 0));
  if (!call.piece) ++table.clock;
  table.pushed |= !call.piece;
  table.building = call.piece;
  return send_rows(id, header, call, move);
}

uint64_t Client::pull_rows(uint32_t id, const RowCall& call, const std::function<void()>& move) {
  StoreHeader header;
  header.kind = StoreKind::kPull;
  header.clock = tables_.at(id).clock;
  return send_rows(id, header, call, move);
}

uint64_t Client::drop_rows(uint32_t id, const RowCall& call) {
  StoreHeader header;
  header.kind = StoreKind::kDrop;
  header.clock = tables_.at(id).clock;
  return send_rows(id, header, call, [] {});
}

uint64_t Client::reserve(uint32_t id, uint64_t rows) {
  StoreHeader header;
  header.kind = StoreKind::kReserve;
  header.version = rows;
  header.clock = tables_.at(id).clock;
  const uint64_t call = begin(tables_.at(id).parts.size());
  send_parts(call, id, header, {}, nullptr);
  return call;
}

uint64_t Client::load_rows(uint32_t id, const RowCall& call, uint64_t expected) {
  StoreHeader header;
  header.version = expected;
  header.kind = StoreKind::kLoad;
  header.clock = tables_.at(id).clock;
  return send_rows(id, header, call, [] {});
}

uint64_t Client::items(uint32_t id, uint32_t index, uint64_t from, std::byte* out) {
  Table& table = tables_.at(id);
  Part& part = table.parts.at(index);
  StoreHeader header;
  header.kind = StoreKind::kPull;
  header.flags = kStoreItems;
  header.table = id;
  header.slot = part.slot;
  header.version = from;
  header.clock = table.clock;
  put_number(header, 0, part);
  const uint64_t call = begin(1, out);
  send(part.shard, {header, {}, nullptr, call, index});
  return call;
}

uint64_t Client::send_rows(uint32_t id, StoreHeader header, const RowCall& call,
                           const std::function<void()>& move) {
  Table& table = tables_.at(id);
  const KeyOrder& order = *call.order;
  const TableSpec spec = header.kind == StoreKind::kLoad ? saved(table.spec) : table.spec;
  const bool changes = header.kind != StoreKind::kPull;
  const Size size = size_of(spec, settings_.message_bytes);
  size_t messages = 0;
  for (size_t i = 0; i < table.parts.size(); ++i) {
    uint32_t at = order.begins[i];
    // A push reaches every shard: where it has no rows it counts all the same.
    if (at == order.begins[i + 1]) messages += header.kind == StoreKind::kPush;
    for (; at < order.begins[i + 1]; ++messages)
      at = cut(order, spec, size, at, order.begins[i + 1]).end;
  }
  header.table = id;
  const uint64_t number = begin(messages, call.out, call.asked_about);
  if (messages == 0) {  // nothing to ask for
    calls_.erase(number);
    return 0;
  }
  const uint8_t flags = header.flags;
  for (uint32_t i = 0; i < table.parts.size(); ++i) {
    const uint32_t end = order.begins[i + 1];
    uint32_t first = order.begins[i];
    if (first == end && header.kind != StoreKind::kPush) continue;
    do {
      const Cut to = cut(order, spec, size, first, end);
      Part& part = table.parts[i];
      header.slot = part.slot;
      header.flags = flags;
      if (changes && to.end < end) header.flags |= to.within ? kStorePiece : kStoreFollowed;
      put_number(header, changes ? ++last_number_ : 0, part);
      Payload payload = row_payload(part, spec, call, first, to.end - first);
      send(part.shard, {header, payload.bytes, std::move(payload.owner), number, i, State::kWaiting,
                        false, call.order, first, to.end - first});
      first = to.end;
      move();
    } while (first < end);
  }
  return number;
}

Client::Payload Client::row_payload(Part& part, const TableSpec& spec, const RowCall& call,
                                    uint32_t first, uint32_t rows) {
  const auto keys = std::span(call.order->keys).subspan(first, rows);
  KeysHead head{rows, KeysForm::kKeys, {}};
  if (call.remember != Remember::kNo && rows > 0) {
    const auto [named, is_first] = call.order->names.try_emplace({first, rows});
    if (is_first) named->second = name_of(*call.order, keys);
    head.digest = named->second;
    head.form = form_of(part, head.digest, call.remember);
  }
  const size_t key_bytes = is_known(head.form) ? 0 : keys.size_bytes();
  const size_t row_bytes = call.given != nullptr ? rows * spec.bytes() : 0;
  const size_t all = sizeof head + key_bytes + row_bytes;
  const auto buffer = buffer_of(all);
  std::byte* to = buffer->data();
  std::memcpy(to, &head, sizeof head);
  if (key_bytes > 0) std::memcpy(to + sizeof head, keys.data(), key_bytes);
  if (row_bytes == 0) return {buffer, {to, all}};
  gather_rows(*call.order, spec, first, rows, call.given, to + sizeof head + key_bytes);
  if (spec.wire == spec.dtype) return {buffer, {to, all}};
  const auto narrow = narrowed(spec.wire, {to + sizeof head + key_bytes, row_bytes});
  std::memcpy(to + sizeof head + key_bytes, narrow.data(), narrow.size());
  return {buffer, {to, sizeof head + key_bytes + narrow.size()}};
}

// A shard knows lists by worker, and may still know those of an earlier life of this one.
Digest Client::name_of(const RowOrder& order, std::span<const uint64_t> keys) {
  if (!order.is_own) return digest_of(keys);
  return {++last_list_, hash_of(settings_.incarnation)};
}

KeysForm Client::form_of(Part& part, const Digest& digest, Remember remember) {
  if (remember == Remember::kLast)
    return part.known.erase(digest) > 0 ? KeysForm::kLast : KeysForm::kKeys;
  if (part.known.size() >= kKnownMax) part.known.clear();
  return part.known.insert(digest).second ? KeysForm::kRemember : KeysForm::kKnown;
}

// At least so many bytes.
std::shared_ptr<std::vector<std::byte>> Client::buffer_of(size_t bytes) const {
  auto& used = *used_;
  auto buffer = std::make_unique<std::vector<std::byte>>();
  if (!used.buffers.empty()) {
    buffer = std::move(used.buffers.back());
    used.buffers.pop_back();
    used.bytes -= buffer->size();
  }
  if (buffer->size() < bytes) buffer->resize(bytes);
  return {buffer.release(), [back = used_](std::vector<std::byte>* done) {
            std::unique_ptr<std::vector<std::byte>> owner(done);
            if (back->bytes + done->size() > kUsedMax) return;
            back->bytes += done->size();
            back->buffers.push_back(std::move(owner));
          }};
}

// The shard has forgotten the list.
void Client::send_keys(Line& line, size_t at) {
  Kept& kept = line.kept[at];
  Bytes rows = kept.payload;
  auto head = take<KeysHead>(rows);
  head.form = head.form == KeysForm::kLast ? KeysForm::kKeys : KeysForm::kRemember;
  std::vector<std::byte> payload;
  put(payload, head);
  put_bytes(payload, kept.order->keys.data() + kept.first, kept.rows * sizeof(uint64_t));
  put_bytes(payload, rows.data(), rows.size());
  kept_bytes_ += payload.size() - kept.payload.size();
  kept.owner = std::make_shared<const std::vector<std::byte>>(std::move(payload));
  kept.payload = Bytes(*kept.owner);
  kept.header.bytes = kept.payload.size();
  kept.state = State::kWaiting;
  line.looked = std::min(line.looked, at);
}

}  // namespace commute
