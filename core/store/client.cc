// SPDX-License-Identifier: Apache-2.0
#include "store/client.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace commute {
namespace {

bool changes_something(StoreKind kind) {
  return kind == StoreKind::kPush || kind == StoreKind::kTick || kind == StoreKind::kSet ||
         kind == StoreKind::kLeave;
}

std::shared_ptr<const std::vector<std::byte>> copied(Bytes bytes) {
  return std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
}

}  // namespace

Client::Client(uint32_t worker, uint32_t incarnation, int shards, Send send, Planted planted)
    : worker_(worker),
      incarnation_(incarnation),
      send_(std::move(send)),
      planted_(planted),
      up_(size_t(shards), true),
      kept_(size_t(shards)) {}

// --- calls ---

uint64_t Client::declare(uint32_t id, const TableSpec& spec, std::vector<PartPlace> places,
                         Bytes first) {
  Table& table = tables_[id];
  table.spec = spec;
  table.places = std::move(places);
  table.guaranteed.assign(table.places.size(), 0);
  table.found.assign(table.places.size(), 0);
  const uint64_t call = begin(table.places.size());
  const size_t item = item_bytes(spec.dtype);
  for (const PartPlace& place : table.places) {
    TableSpec part = spec;
    part.count = place.count;
    auto payload = std::make_shared<const std::vector<std::byte>>(
        part.encode(first.subspan(place.first * item, place.count * item)));
    StoreHeader header;
    header.kind = StoreKind::kDeclare;
    header.table = id;
    header.slot = place.slot;
    header.call = call;
    send(place.shard, {header, Bytes(*payload), payload});
  }
  return call;
}

uint64_t Client::push(uint32_t id, Bytes gradient, bool piece) {
  Table& table = tables_.at(id);
  const uint64_t call = begin(table.places.size());
  StoreHeader header;
  header.kind = StoreKind::kPush;
  header.flags = piece ? kStorePiece : 0;
  header.number = ++last_number_;
  header.clock = piece ? table.clock : ++table.clock;
  table.pushed |= !piece;
  const Owner owner = copied(gradient);
  send_parts(call, id, header, Bytes(*owner), owner);
  return call;
}

uint64_t Client::push_pull(uint32_t id, Bytes gradient, std::byte* out) {
  Table& table = tables_.at(id);
  const uint64_t call = begin(table.places.size(), out);
  StoreHeader header;
  header.kind = StoreKind::kPush;
  header.flags = kStoreWants;
  header.number = ++last_number_;
  header.clock = ++table.clock;
  table.pushed = true;
  send_parts(call, id, header, gradient, nullptr);
  return call;
}

uint64_t Client::pull(uint32_t id, std::byte* out, bool fresh) {
  const Table& table = tables_.at(id);
  if (!fresh && cached(table)) {
    ++cache_hits_;
    if (!table.cache.empty()) std::memcpy(out, table.cache.data(), table.cache.size());
    return 0;
  }
  const uint64_t call = begin(table.places.size(), out);
  StoreHeader header;
  header.kind = StoreKind::kPull;
  header.clock = table.clock;
  send_parts(call, id, header, {}, nullptr);
  return call;
}

uint64_t Client::set(uint32_t id, const Update& update) {
  Table& table = tables_.at(id);
  table.spec.update = update;
  const uint64_t call = begin(table.places.size());
  StoreHeader header;
  header.kind = StoreKind::kSet;
  header.number = ++last_number_;
  header.clock = table.clock;
  const auto numbers = std::make_shared<const std::vector<std::byte>>(update.encode());
  for (const PartPlace& place : table.places) {
    header.table = id;
    header.slot = place.slot;
    header.call = call;
    send(place.shard, {header, Bytes(*numbers), numbers});
  }
  return call;
}

void Client::tick() {
  for (auto& [id, table] : tables_) {
    if (std::exchange(table.pushed, false)) continue;
    StoreHeader header;
    header.kind = StoreKind::kTick;
    header.number = ++last_number_;
    header.clock = ++table.clock;
    send_parts(begin(table.places.size()), id, header, {}, nullptr);
  }
}

void Client::catch_up(uint32_t id, uint64_t clock) {
  Table& table = tables_.at(id);
  table.clock = std::max(table.clock, clock);
  StoreHeader header;
  header.kind = StoreKind::kTick;
  header.number = ++last_number_;
  header.clock = table.clock;
  send_parts(begin(table.places.size()), id, header, {}, nullptr);
}

uint64_t Client::leave() {
  size_t parts = 0;
  for (const auto& [id, table] : tables_) parts += table.places.size();
  const uint64_t call = begin(parts);
  for (const auto& [id, table] : tables_) {
    StoreHeader header;
    header.kind = StoreKind::kLeave;
    header.clock = table.clock;
    send_parts(call, id, header, {}, nullptr);
  }
  return call;
}

std::string Client::refusal(uint64_t call) const {
  const auto found = refused_.find(call);
  return found == refused_.end() ? "" : found->second;
}

// --- answers ---

void Client::on_message(int shard, const StoreHeader& answer, Bytes payload) {
  if (!release(shard, answer)) return;  // it was answered on an earlier link
  const auto found = calls_.find(answer.call);
  if (found == calls_.end()) return;
  if (answer.kind == StoreKind::kValue) take_value(answer, payload, found->second.out);
  if (answer.kind == StoreKind::kDeclared) take_declared(answer);
  if (answer.kind == StoreKind::kRefused)
    refused_[answer.call].assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  if (--found->second.left == 0) calls_.erase(found);
}

void Client::on_link(int shard, bool up) {
  up_[size_t(shard)] = up;
  if (!up) return;
  for (const Kept& kept : kept_[size_t(shard)]) send_(shard, kept.header, kept.payload);
}

void Client::take_value(const StoreHeader& answer, Bytes payload, std::byte* out) {
  Table& table = tables_.at(answer.table);
  const size_t part = part_of(table, answer.slot);
  const size_t at = table.places[part].first * item_bytes(table.spec.dtype);
  if (payload.empty()) return;
  std::memcpy(out + at, payload.data(), payload.size());
  if (!table.spec.bounded()) return;
  table.cache.resize(table.spec.bytes());
  std::memcpy(table.cache.data() + at, payload.data(), payload.size());
  table.guaranteed[part] = std::max(table.guaranteed[part], answer.slowest);
}

// A worker that comes back goes on from where its last life ended. Where that life's last push had
// not reached every part, the others count an empty contribution.
void Client::take_declared(const StoreHeader& answer) {
  Table& table = tables_.at(answer.table);
  table.found[part_of(table, answer.slot)] = answer.clock;
  if (calls_.at(answer.call).left > 1) return;
  table.clock = std::max(table.clock, *std::max_element(table.found.begin(), table.found.end()));
  const bool behind = std::any_of(table.found.begin(), table.found.end(),
                                  [&](uint64_t clock) { return clock < table.clock; });
  if (behind) catch_up(answer.table, table.clock);
}

bool Client::cached(const Table& table) const {
  if (!table.spec.bounded() || table.cache.size() != table.spec.bytes()) return false;
  if (planted_ == Planted::kStaleCache) return true;
  return std::all_of(table.guaranteed.begin(), table.guaranteed.end(), [&](uint64_t clock) {
    return clock + uint64_t(table.spec.staleness) >= table.clock;
  });
}

// --- messages ---

uint64_t Client::begin(size_t answers, std::byte* out) {
  const uint64_t call = ++last_call_;
  if (answers > 0) calls_[call] = {answers, out};
  return call;
}

void Client::send_parts(uint64_t call, uint32_t id, StoreHeader header, Bytes payload,
                        Owner owner) {
  const Table& table = tables_.at(id);
  const size_t item = item_bytes(table.spec.dtype);
  header.table = id;
  header.call = call;
  for (const PartPlace& place : table.places) {
    header.slot = place.slot;
    const Bytes part =
        payload.empty() ? payload : payload.subspan(place.first * item, place.count * item);
    send(place.shard, {header, part, owner});
  }
}

void Client::send(int shard, Kept kept) {
  kept.header.worker = worker_;
  kept.header.incarnation = incarnation_;
  kept.header.bytes = kept.payload.size();
  kept_bytes_ += kept.payload.size();
  kept_pushes_ += changes_something(kept.header.kind);
  auto& queue = kept_[size_t(shard)];
  queue.push_back(std::move(kept));
  if (!up_[size_t(shard)]) return;
  const Kept sent = queue.back();  // an answer may come at once, and take it off the queue
  send_(shard, sent.header, sent.payload);
}

// Takes the message that this answers off the queue; false when it is not there any more.
bool Client::release(int shard, const StoreHeader& answer) {
  auto& queue = kept_[size_t(shard)];
  const auto found = std::find_if(queue.begin(), queue.end(), [&](const Kept& kept) {
    return kept.header.call == answer.call && kept.header.slot == answer.slot &&
           kept.header.table == answer.table;
  });
  if (found == queue.end()) return false;
  kept_bytes_ -= found->payload.size();
  kept_pushes_ -= changes_something(found->header.kind);
  queue.erase(found);
  return true;
}

size_t Client::part_of(const Table& table, uint32_t slot) const {
  const auto found = std::find_if(table.places.begin(), table.places.end(),
                                  [&](const PartPlace& place) { return place.slot == slot; });
  return size_t(found - table.places.begin());
}

}  // namespace commute
