// SPDX-License-Identifier: Apache-2.0
#include "store/client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "copy.h"
#include "store/encoding.h"
#include "store/query.h"
#include "store/wire.h"

namespace commute {
namespace {

constexpr uint32_t kNoPart = ~uint32_t{0};
// From here on a value is written past the caches: its table does not fit into them.
constexpr size_t kStreamBytes = 4 << 20;

bool changes_something(StoreKind kind) {
  return kind == StoreKind::kPush || kind == StoreKind::kTick || kind == StoreKind::kSet ||
         kind == StoreKind::kLeave || kind == StoreKind::kDrop || kind == StoreKind::kReset ||
         kind == StoreKind::kLoad;
}

Client::Owner owned(std::vector<std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

}  // namespace

Client::Client(Settings settings) : settings_(settings), lines_(settings.shards) {}

// --- calls ---

uint64_t Client::declare_table(const std::string& name, const TableSpec& whole,
                               const std::string& declaration, int64_t instead_of) {
  std::vector<std::byte> bytes;
  put_text(bytes, name);
  const auto spec = whole.encode();
  put_bytes(bytes, spec.data(), spec.size());
  put_text(bytes, declaration);
  StoreHeader header;
  header.kind = StoreKind::kTable;
  header.flags = instead_of >= 0 ? kStoreMaker : 0;
  header.version = instead_of >= 0 ? uint64_t(instead_of) : 0;
  const uint64_t call = begin(1);
  const Owner payload = owned(std::move(bytes));
  send(0, {header, Bytes(*payload), payload, call, kNoPart});
  return call;
}

const TableEntry* Client::table_of(const std::string& name) const {
  const auto found = directory_.find(name);
  return found == directory_.end() ? nullptr : &found->second;
}

uint64_t Client::declare(const std::string& name, const TableSpec& whole, Bytes first) {
  const TableEntry& entry = directory_.at(name);
  Table& table = tables_[entry.table];
  table.spec = whole;
  if (whole.sparse) table.spec.slots = settings_.slots;
  table.parts.clear();
  for (uint32_t shard = 0; whole.sparse && shard < settings_.shards; ++shard) {
    table.parts.emplace_back();
    table.parts.back().slot = kEverySlot;
    table.parts.back().shard = int(shard);
  }
  for (uint64_t i = 0; i < entry.slots.size(); ++i) {
    Part part;
    part.slot = entry.slots[i];
    part.shard = int(part.slot % settings_.shards);
    part.first = i * entry.chunk_bytes;
    part.bytes = std::min(entry.chunk_bytes, entry.bytes - std::min(entry.bytes, part.first));
    table.parts.push_back(part);
  }
  const uint64_t call = begin(table.parts.size());
  const size_t item = item_bytes(whole.dtype);
  const bool maker = entry.maker == settings_.worker;
  StoreHeader header;
  header.kind = StoreKind::kDeclare;
  header.flags = maker ? kStoreMaker : 0;
  header.table = entry.table;
  header.version = entry.maker;
  header.number = store_of(name);
  for (uint32_t i = 0; i < table.parts.size(); ++i) {
    const Part& part = table.parts[i];
    TableSpec spec = whole;
    if (!whole.sparse) spec.count = part.bytes / item;
    spec.slots = whole.sparse ? settings_.slots : 0;
    std::vector<std::byte> bytes = spec.encode();
    const Bytes value = first.size() > item ? first.subspan(part.first, part.bytes) : first;
    if (maker) put_bytes(bytes, value.data(), value.size());
    const Owner payload = owned(std::move(bytes));
    header.slot = part.slot;
    send(part.shard, {header, Bytes(*payload), payload, call, i});
  }
  return call;
}

uint64_t Client::push(uint32_t id, Bytes gradient, Owner owner, bool piece, bool asked_about) {
  Table& table = tables_.at(id);
  StoreHeader header;
  header.flags = piece ? kStorePiece : 0;
  header.clock = table.clock + 1;
  if (!piece) ++table.clock;
  table.pushed |= !piece;
  table.building = piece;
  const uint64_t call = begin(table.parts.size(), nullptr, asked_about);
  send_parts(call, id, header, gradient, std::move(owner));
  return call;
}

uint64_t Client::push_pull(uint32_t id, Bytes gradient, Owner owner, std::byte* out) {
  Table& table = tables_.at(id);
  StoreHeader header;
  header.flags = kStoreWants;
  header.clock = ++table.clock;
  table.pushed = true;
  table.building = false;
  const uint64_t call = begin(table.parts.size(), out);
  send_parts(call, id, header, gradient, std::move(owner));
  return call;
}

uint64_t Client::pull(uint32_t id, std::byte* out, bool fresh) {
  Table& table = tables_.at(id);
  if (!fresh && cached(table)) {
    ++table.cache_hits;
    copy_bytes(out, table.cache.data(), table.cache.size());
    return 0;
  }
  const uint64_t call = begin(table.parts.size(), out);
  StoreHeader header;
  header.kind = StoreKind::kPull;
  header.clock = table.clock;
  send_parts(call, id, header, {}, nullptr);
  return call;
}

uint64_t Client::ask(uint32_t id, uint8_t flags, uint64_t k) {
  const Table& table = tables_.at(id);
  const uint64_t call = begin(table.parts.size());
  StoreHeader header;
  header.kind = StoreKind::kPull;
  header.flags = flags;
  header.version = k;
  header.clock = table.clock;
  send_parts(call, id, header, {}, nullptr);
  return call;
}

uint64_t Client::set(uint32_t id, const Update& update) {
  const Table& table = tables_.at(id);
  StoreHeader header;
  header.kind = StoreKind::kSet;
  header.clock = table.clock;
  const uint64_t call = begin(table.parts.size());
  const Owner numbers = owned(update.encode());
  send_parts(call, id, header, Bytes(*numbers), numbers, true);
  return call;
}

uint64_t Client::reset(uint32_t id, uint64_t clock) {
  Table& table = tables_.at(id);
  StoreHeader header;
  header.kind = StoreKind::kReset;
  header.clock = table.clock;
  std::vector<std::byte> bytes;
  put(bytes, clock);
  const Owner payload = owned(std::move(bytes));
  const uint64_t call = begin(table.parts.size());
  send_parts(call, id, header, Bytes(*payload), payload, true);
  return call;
}

void Client::begin_at(uint32_t id, uint64_t clock) {
  Table& table = tables_.at(id);
  table.clock = clock;
  table.pushed = table.building = false;
  table.cache.clear();
  for (Part& part : table.parts) part.slowest = part.guaranteed = clock;
}

uint64_t Client::load(uint32_t id, uint32_t index, std::vector<std::byte> saved) {
  Table& table = tables_.at(id);
  Part& part = table.parts.at(index);
  StoreHeader header;
  header.kind = StoreKind::kLoad;
  header.table = id;
  header.slot = part.slot;
  header.clock = table.clock;
  put_number(header, ++last_number_, part);
  const Owner payload = owned(std::move(saved));
  const uint64_t call = begin(1);
  send(part.shard, {header, Bytes(*payload), payload, call, index});
  return call;
}

uint64_t Client::who(uint32_t id) {
  const Table& table = tables_.at(id);
  // One part that is known to be behind is enough.
  const auto part =
      std::min_element(table.parts.begin(), table.parts.end(),
                       [](const Part& a, const Part& b) { return a.slowest < b.slowest; });
  StoreHeader header;
  header.kind = StoreKind::kWho;
  header.table = id;
  header.slot = part->slot;
  const uint64_t call = begin(1);
  send(part->shard, {header, {}, nullptr, call, uint32_t(part - table.parts.begin())});
  return call;
}

uint64_t Client::leave(const std::string& store) {
  StoreHeader header;
  header.kind = StoreKind::kLeave;
  header.number = store_of(store);
  const uint64_t call = begin(lines_.size());
  for (size_t shard = 0; shard < lines_.size(); ++shard)
    send(int(shard), {header, {}, nullptr, call, kNoPart});
  return call;
}

void Client::tick(uint32_t id) {
  Table& table = tables_.at(id);
  const bool pushed = std::exchange(table.pushed, false);
  if (std::exchange(table.building, false) || !pushed) catch_up(id, table.clock + 1);
}

void Client::catch_up(uint32_t id, uint64_t clock) {
  Table& table = tables_.at(id);
  table.clock = std::max(table.clock, clock);
  StoreHeader header;
  header.kind = StoreKind::kTick;
  header.clock = table.clock;
  send_parts(begin(table.parts.size(), nullptr, false), id, header, {}, nullptr);
}

// --- questions ---

Client::Outcome Client::outcome(uint64_t call) {
  const auto found = outcomes_.extract(call);
  return found ? std::move(found.mapped()) : Outcome{};
}

Client::Outcome Client::trouble(uint32_t table) {
  return std::exchange(tables_.at(table).trouble, {});
}

bool Client::ahead(uint32_t id) const {
  const Table& table = tables_.at(id);
  if (!table.spec.bounded()) return false;
  return std::any_of(table.parts.begin(), table.parts.end(), [&](const Part& part) {
    return table.clock > part.slowest + uint64_t(table.spec.staleness) + 1;
  });
}

std::vector<int> Client::shards_of(uint32_t id) const {
  std::vector<int> shards;
  for (const Part& part : tables_.at(id).parts) shards.push_back(part.shard);
  return shards;
}

std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> Client::parts_of(uint32_t id) const {
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> parts;
  for (const Part& part : tables_.at(id).parts)
    parts.emplace_back(part.slot, part.first, part.bytes);
  return parts;
}

bool Client::idle() const {
  return std::all_of(lines_.begin(), lines_.end(), [](const Line& line) {
    return std::all_of(line.kept.begin(), line.kept.end(),
                       [](const Kept& kept) { return kept.state != State::kWaiting; });
  });
}

bool Client::cached(const Table& table) const {
  if (table.spec.sparse || table.spec.staleness <= 0) return false;
  if (table.cache.size() != table.spec.bytes()) return false;
  if (settings_.planted == Planted::kStaleCache) return true;
  return std::all_of(table.parts.begin(), table.parts.end(), [&](const Part& part) {
    return part.guaranteed + uint64_t(table.spec.staleness) >= table.clock;
  });
}

// --- answers ---

void Client::on_message(int shard, const StoreHeader& answer, Bytes payload) {
  Line& line = lines_.at(size_t(shard));
  if (answer.kind == StoreKind::kGo) return go(answer);
  const uint64_t at = answer.call - line.base;
  if (at >= line.kept.size() || line.kept[at].state == State::kDone) return;  // answered before
  Kept& kept = line.kept[at];
  if (kept.part != kNoPart && answer.kind != StoreKind::kRefused) {
    Part& part = tables_.at(kept.header.table).parts[kept.part];
    part.slowest = std::max(part.slowest, answer.slowest);
  }
  if (answer.kind == StoreKind::kLater) return put_off(line, at);
  if (answer.kind == StoreKind::kUnknown) return send_keys(line, at);
  if (answer.kind == StoreKind::kCommitted && (kept.header.flags & kStoreWants)) {
    changes_ -= !std::exchange(kept.committed, true);
    return;
  }
  Call& call = calls_.at(kept.call);
  if (answer.kind == StoreKind::kValue) take_value(kept, answer, payload, call);
  if (answer.kind == StoreKind::kBehind)
    call.outcome.answers.assign(payload.begin(), payload.end());
  if (answer.kind == StoreKind::kRefused) take_refusal(kept, answer, payload, call);
  if (answer.kind == StoreKind::kPlaced) {
    TableEntry entry = TableEntry::decode(payload);
    directory_.insert_or_assign(entry.name, std::move(entry));
  }
  if (answer.kind == StoreKind::kDeclared) {
    Table& table = tables_.at(kept.header.table);
    table.parts[kept.part].found = answer.clock;
    if (call.left == 1) take_declared(kept.header.table, table);
  }
  finish(line, kept);
}

void Client::finish(Line& line, Kept& kept) {
  kept_bytes_ -= kept.payload.size();
  changes_ -= changes_something(kept.header.kind) && !kept.committed;
  kept.state = State::kDone;
  kept.owner.reset();
  const auto found = calls_.find(kept.call);
  if (--found->second.left == 0) {
    Outcome& outcome = found->second.outcome;
    const bool worth_keeping = outcome.code != Refused{} || !outcome.answers.empty();
    if (worth_keeping && found->second.asked_about)
      outcomes_.emplace(kept.call, std::move(outcome));
    calls_.erase(found);
  }
  while (!line.kept.empty() && line.kept.front().state == State::kDone) {
    line.kept.pop_front();
    ++line.base;
    line.looked -= line.looked > 0;
  }
}

void Client::take_value(const Kept& kept, const StoreHeader& answer, Bytes payload, Call& call) {
  Table& table = tables_.at(kept.header.table);
  Part& part = table.parts[kept.part];
  if (kept.order) {
    take_rows(kept, table.spec, payload, call.out);
  } else if (kept.header.kind == StoreKind::kPull && (kept.header.flags & kStoreItems)) {
    copy_bytes(call.out, payload.data(), payload.size());
  } else if (kept.header.kind == StoreKind::kPull && (kept.header.flags & kStoreSummary)) {
    put_bytes(call.outcome.answers, payload.data(), payload.size());
  } else if (kept.header.kind == StoreKind::kPull && (kept.header.flags & kStoreTop)) {
    // Of rows it is the key.
    const uint64_t first = table.spec.sparse ? 0 : part.first / item_bytes(table.spec.dtype);
    while (!payload.empty()) {
      auto ranked = take<Ranked>(payload);
      ranked.index += first;
      put(call.outcome.answers, ranked);
    }
  } else if (!payload.empty() && payload.size() == part.bytes) {
    if (table.spec.bytes() >= kStreamBytes)
      copy_past_caches(call.out + part.first, nullptr, payload.data(), payload.size());
    else
      copy_bytes(call.out + part.first, payload.data(), payload.size());
    end_of_streaming();  // another thread may wait for the call
    if (table.spec.staleness <= 0) return;
    table.cache.resize(table.spec.bytes());
    copy_bytes(table.cache.data() + part.first, payload.data(), payload.size());
    part.guaranteed = std::max(part.guaranteed, answer.slowest);
  }
}

void Client::take_rows(const Kept& kept, const TableSpec& spec, Bytes payload, std::byte* out) {
  if (payload.size() != kept.rows * spec.wire_bytes()) return;
  std::vector<std::byte> wide;
  if (spec.wire != spec.dtype) {
    wide = widened(spec.wire, payload);
    payload = wide;
  }
  scatter_rows(*kept.order, spec.bytes(), kept.first, kept.rows, payload.data(), out);
}

// A worker that comes back goes on from where its last life ended. Where that life's last push had
// not reached every part, the others count an empty contribution.
void Client::take_declared(uint32_t id, Table& table) {
  for (const Part& part : table.parts) table.clock = std::max(table.clock, part.found);
  const bool behind = std::any_of(table.parts.begin(), table.parts.end(),
                                  [&](const Part& part) { return part.found < table.clock; });
  if (behind) catch_up(id, table.clock);
}

void Client::take_refusal(const Kept& kept, const StoreHeader& answer, Bytes payload, Call& call) {
  Outcome& outcome = call.outcome;
  if (outcome.code != Refused{}) return;
  outcome.code = answer.code;
  outcome.about = answer.version;
  outcome.why.assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  if (!call.asked_about && kept.part != kNoPart) {
    Outcome& trouble = tables_.at(kept.header.table).trouble;
    if (trouble.code == Refused{}) trouble = outcome;
  }
}

// Nothing more about this part until "go"; what is on its way will be put off as well.
void Client::put_off(Line& line, size_t at) {
  Kept& kept = line.kept[at];
  kept.state = State::kWaiting;
  tables_.at(kept.header.table).parts[kept.part].held = true;
  line.looked = std::min(line.looked, at);
}

void Client::go(const StoreHeader& header) {
  const auto table = tables_.find(header.table);
  if (table == tables_.end()) return;
  for (Part& part : table->second.parts) {
    if (part.slot != header.slot) continue;
    part.held = false;
    part.slowest = std::max(part.slowest, header.slowest);
    lines_[size_t(part.shard)].looked = 0;
  }
}

void Client::on_link(int shard, bool up) {
  Line& line = lines_.at(size_t(shard));
  line.up = up;
  line.looked = 0;
  for (Kept& kept : line.kept)
    if (kept.state == State::kOut) kept.state = State::kWaiting;
  for (auto& [id, table] : tables_)
    for (Part& part : table.parts)
      if (part.shard == shard) part.held = false;
}

// --- messages ---

uint64_t Client::begin(size_t answers, std::byte* out, bool asked_about) {
  const uint64_t call = ++last_call_;
  calls_[call] = {answers, out, asked_about, {}};
  return call;
}

void Client::send_parts(uint64_t call, uint32_t id, StoreHeader header, Bytes payload, Owner owner,
                        bool same) {
  Table& table = tables_.at(id);
  header.table = id;
  const uint64_t number = changes_something(header.kind) ? ++last_number_ : 0;
  for (uint32_t i = 0; i < table.parts.size(); ++i) {
    Part& part = table.parts[i];
    header.slot = part.slot;
    put_number(header, number, part);
    const Bytes piece = payload.empty() || same ? payload : payload.subspan(part.first, part.bytes);
    send(part.shard, {header, piece, owner, call, i});
  }
}

void Client::put_number(StoreHeader& header, uint64_t number, Part& part) const {
  header.number = number;
  header.slowest = number == 0 ? part.number : std::exchange(part.number, number);
}

void Client::send(int shard, Kept kept) {
  Line& line = lines_[size_t(shard)];
  kept.header.worker = settings_.worker;
  kept.header.incarnation = settings_.incarnation;
  kept.header.bytes = kept.payload.size();
  kept.header.call = line.base + line.kept.size();
  kept_bytes_ += kept.payload.size();
  changes_ += changes_something(kept.header.kind);
  line.kept.push_back(std::move(kept));
}

bool Client::may_go(const Kept& kept) const {
  return kept.state == State::kWaiting &&
         (kept.part == kNoPart || kept.header.kind == StoreKind::kWho ||
          !tables_.at(kept.header.table).parts[kept.part].held);
}

const StoreMessage* Client::next(int shard) {
  Line& line = lines_.at(size_t(shard));
  if (!line.up) return nullptr;
  while (line.looked < line.kept.size() && !may_go(line.kept[line.looked])) ++line.looked;
  if (line.looked == line.kept.size()) return nullptr;
  line.chosen = line.looked;
  const Kept& kept = line.kept[line.chosen];
  next_ = {kept.header, kept.payload};
  if (line.kept.size() > 1) next_.header.flags |= kStoreOneOfMany;
  return &next_;
}

void Client::sent(int shard) {
  Line& line = lines_.at(size_t(shard));
  line.kept[line.chosen].state = State::kOut;
  sent_bytes_ += sizeof(StoreHeader) + line.kept[line.chosen].payload.size();
  line.looked = line.chosen + 1;
}

}  // namespace commute
