// SPDX-License-Identifier: Apache-2.0
#include "store/shard.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels.h"

namespace commute {
namespace {

// Whether contributions must be combined in rank order.
bool in_order(const TableSpec& spec) {
  return spec.deterministic || spec.update.kind == UpdateKind::kAssign;
}

void add(const TableSpec& spec, std::vector<std::byte>& sum, std::vector<std::byte>&& data) {
  if (sum.empty()) {
    sum = std::move(data);  // the first to arrive is the accumulator
  } else if (spec.update.kind == UpdateKind::kAssign) {
    sum = std::move(data);
  } else {
    kernels().reduce_for(spec.dtype, spec.update.combines_by())(sum.data(), sum.data(), data.data(),
                                                                spec.count);
  }
}

}  // namespace

Shard::Shard(uint32_t workers, Send send, Record record, Planted planted)
    : workers_(workers), send_(std::move(send)), record_(std::move(record)), planted_(planted) {}

void Shard::on_message(int link, const StoreHeader& header, Bytes payload) {
  const Key key{header.slot, header.table};
  if (header.worker >= workers_) return refuse(link, header, "there is no such worker");
  if (header.incarnation < incarnations_[header.worker])
    return refuse(link, header, "a newer incarnation of this worker has come");
  incarnations_[header.worker] = header.incarnation;
  if (header.kind == StoreKind::kDeclare) return declare(link, header, payload);
  if (!desks_.contains(key)) return refuse(link, header, "the table is not declared");
  switch (header.kind) {
    case StoreKind::kPush:
      return push(link, header, payload);
    case StoreKind::kTick:
      return tick(link, header);
    case StoreKind::kPull:
      desks_[key].pulls.push_back({link, header});
      return answer_pulls(key, desks_[key]);
    case StoreKind::kSet:
      return set(link, header, payload);
    case StoreKind::kLeave:
      return leave(link, header);
    default:
      return refuse(link, header, "clients do not send that");
  }
}

void Shard::on_link_down(int link) {
  for (auto& [key, desk] : desks_)
    desk.pulls.remove_if([link](const Waiting& pull) { return pull.link == link; });
}

void Shard::on_lost(uint32_t worker) {
  for (auto& [key, desk] : desks_) {
    desk.building.erase(worker);
    desk.left.emplace(worker, desk.clocks[worker]);
    progress(key, desk);
  }
}

// --- messages ---

void Shard::declare(int link, const StoreHeader& header, Bytes payload) {
  const Key key{header.slot, header.table};
  TableSpec spec;
  try {
    Bytes rest = payload;
    spec = TableSpec::decode(rest);
  } catch (const std::invalid_argument& error) {
    return refuse(link, header, error.what());
  }
  const auto found = desks_.find(key);
  if (found == desks_.end()) {
    apply(header.slot, {OpKind::kCreate, header.table, {}, payload});
    desks_.emplace(key, Desk{});
  } else if (spec_of(key) != spec) {
    return refuse(link, header,
                  "declared as " + spec_of(key).describe() + ", and as " + spec.describe());
  }
  // What an earlier incarnation had begun to build will not be completed.
  Desk& desk = desks_[key];
  const auto building = desk.building.find(header.worker);
  if (building != desk.building.end() && building->second.author.incarnation < header.incarnation)
    desk.building.erase(building);
  desk.left.erase(header.worker);
  reply(link, header, StoreKind::kDeclared, key);
}

void Shard::push(int link, const StoreHeader& header, Bytes payload) {
  const Key key{header.slot, header.table};
  Desk& desk = desks_[key];
  const TableSpec& spec = spec_of(key);
  if (payload.size() != spec.bytes())
    return refuse(link, header,
                  "expected " + std::to_string(spec.bytes()) + " bytes, got " +
                      std::to_string(payload.size()));
  if (is_news(header)) {
    build(desk, spec, header, payload);
    if (!(header.flags & kStorePiece)) {
      Contribution whole = std::move(desk.building[header.worker]);
      desk.building.erase(header.worker);
      whole.author = {header.worker, header.incarnation, header.number, header.clock};
      complete(key, desk, std::move(whole));
    }
  }
  if (header.flags & kStoreWants) {
    desk.pulls.push_back({link, header});
    answer_pulls(key, desk);
  } else {
    reply(link, header, StoreKind::kCommitted, key);
  }
}

// Counts empty contributions up to the clock it names; what is being built becomes the first.
void Shard::tick(int link, const StoreHeader& header) {
  const Key key{header.slot, header.table};
  Desk& desk = desks_[key];
  if (is_news(header) && planted_ != Planted::kLostTick) {
    while (desk.clocks[header.worker] < header.clock) {
      Contribution next;
      if (auto pieces = desk.building.extract(header.worker)) next = std::move(pieces.mapped());
      next.author = {header.worker, header.incarnation, header.number,
                     desk.clocks[header.worker] + 1};
      complete(key, desk, std::move(next));
    }
  }
  reply(link, header, StoreKind::kCommitted, key);
}

void Shard::set(int link, const StoreHeader& header, Bytes payload) {
  const Key key{header.slot, header.table};
  Desk& desk = desks_[key];
  if (is_news(header)) {
    const Author author{header.worker, header.incarnation, header.number, 0};
    desk.settings.push_back({header.clock, author, {payload.begin(), payload.end()}});
    progress(key, desk);
  }
  reply(link, header, StoreKind::kCommitted, key);
}

void Shard::leave(int link, const StoreHeader& header) {
  const Key key{header.slot, header.table};
  Desk& desk = desks_[key];
  desk.left.emplace(header.worker, header.clock);
  reply(link, header, StoreKind::kCommitted, key);
  progress(key, desk);
}

// Whether this push has not been received before; from now on it has.
bool Shard::is_news(const StoreHeader& header) {
  Seen& seen = seen_[{header.slot, header.worker}];
  if (header.incarnation > seen.incarnation) seen = {header.incarnation, 0};
  if (header.number <= seen.number && planted_ != Planted::kNoDeduplication) return false;
  seen.number = header.number;
  return true;
}

// --- contributions ---

void Shard::build(Desk& desk, const TableSpec& spec, const StoreHeader& header, Bytes payload) {
  Contribution& building = desk.building[header.worker];
  building.author = {header.worker, header.incarnation, header.number, 0};
  building.empty = false;
  add(spec, building.data, {payload.begin(), payload.end()});
}

void Shard::complete(const Key& key, Desk& desk, Contribution contribution) {
  const uint32_t worker = contribution.author.worker;
  desk.clocks[worker] = std::max(desk.clocks[worker], contribution.author.clock);
  held_bytes_ += contribution.data.size();
  desk.ahead[worker].push_back(std::move(contribution));
  progress(key, desk);
}

bool Shard::may_take(const Desk& desk, const TableSpec& spec, uint64_t clock) const {
  return !spec.bounded() || clock <= slowest(desk) + uint64_t(spec.staleness) + 1;
}

void Shard::take(const Key& key, Desk& desk, Contribution contribution) {
  held_bytes_ -= contribution.data.size();
  const TableSpec& spec = spec_of(key);
  if (spec.in_step()) return join_round(desk, spec, std::move(contribution));
  const Bytes payload(contribution.data);
  apply(key.first, {OpKind::kContribute, key.second, {contribution.author}, payload});
}

void Shard::join_round(Desk& desk, const TableSpec& spec, Contribution contribution) {
  if (!contribution.empty && !in_order(spec)) {
    add(spec, desk.sum, std::move(contribution.data));
    contribution.data.clear();
  }
  desk.round.emplace(contribution.author.worker, std::move(contribution));
}

void Shard::progress(const Key& key, Desk& desk) {
  const TableSpec& spec = spec_of(key);
  for (bool moved = true; moved;) {
    moved = change_settings(key, desk);
    for (auto& [worker, waiting] : desk.ahead) {
      // Of a round only one contribution of each.
      while (!waiting.empty() && may_take(desk, spec, waiting.front().author.clock) &&
             !desk.round.contains(worker)) {
        Contribution next = std::move(waiting.front());
        waiting.pop_front();
        take(key, desk, std::move(next));
        moved = true;
      }
    }
    if (spec.in_step() && close_round(key, desk)) moved = true;
  }
  answer_pulls(key, desk);
}

// Whether this worker must take part in this round.
bool Shard::counts(const Desk& desk, uint32_t worker, uint64_t round) const {
  const auto gone = desk.left.find(worker);
  return gone == desk.left.end() || gone->second >= round;
}

bool Shard::close_round(const Key& key, Desk& desk) {
  if (desk.round.empty()) return false;
  for (uint32_t worker = 0; worker < workers_ && planted_ != Planted::kEarlyClose; ++worker)
    if (counts(desk, worker, desk.closed + 1) && !desk.round.contains(worker)) return false;
  std::vector<std::byte> sum = combined(desk, spec_of(key));
  if (planted_ == Planted::kHalfSlot)
    std::fill(sum.begin() + long(sum.size() / 2), sum.end(), std::byte{0});
  SlotOp op{OpKind::kContribute, key.second, {}, sum};
  for (const auto& [worker, contribution] : desk.round) op.authors.push_back(contribution.author);
  apply(key.first, op);
  desk.round.clear();
  ++desk.closed;
  return true;
}

// The round's contributions as one; nothing when all were empty.
std::vector<std::byte> Shard::combined(Desk& desk, const TableSpec& spec) const {
  std::vector<std::byte> sum = std::exchange(desk.sum, {});
  uint64_t pushed = 0;
  for (auto& [worker, contribution] : desk.round) {
    if (contribution.empty) continue;
    ++pushed;
    if (in_order(spec)) add(spec, sum, std::move(contribution.data));
  }
  if (spec.mean && pushed > 1) kernels().divide_for(spec.dtype)(sum.data(), spec.count, pushed);
  return sum;
}

bool Shard::change_settings(const Key& key, Desk& desk) {
  bool changed = false;
  while (!desk.settings.empty() &&
         (!spec_of(key).in_step() || desk.settings.front().after <= desk.closed)) {
    const Setting setting = std::move(desk.settings.front());
    desk.settings.pop_front();
    apply(key.first, {OpKind::kSet, key.second, {setting.author}, setting.numbers});
    changed = true;
  }
  return changed;
}

void Shard::answer_pulls(const Key& key, Desk& desk) {
  const TableSpec& spec = spec_of(key);
  const uint64_t now = slowest(desk);
  for (auto pull = desk.pulls.begin(); pull != desk.pulls.end();) {
    if (spec.bounded() && pull->header.clock > now + uint64_t(spec.staleness)) {
      ++pull;
      continue;
    }
    const Waiting due = *pull;
    pull = desk.pulls.erase(pull);
    reply(due.link, due.header, StoreKind::kValue, key, slots_[key.first].part(key.second)->value);
  }
}

void Shard::apply(uint32_t slot, const SlotOp& op) {
  if (record_) record_(slot, op);
  slots_[slot].apply(op);
}

// --- what is known ---

uint64_t Shard::slowest(const Desk& desk) const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  uint64_t most = 0;
  for (uint32_t worker = 0; worker < workers_; ++worker) {
    const auto found = desk.clocks.find(worker);
    const uint64_t clock = found == desk.clocks.end() ? 0 : found->second;
    most = std::max(most, clock);
    if (!desk.left.contains(worker)) least = std::min(least, clock);
  }
  if (planted_ == Planted::kWrongMinimum) return most;
  return std::min(least, most);  // all have left: nobody holds anybody up
}

const TableSpec& Shard::spec_of(const Key& key) const {
  return slots_.at(key.first).part(key.second)->spec;
}

void Shard::reply(int link, const StoreHeader& to, StoreKind kind, const Key& key, Bytes payload) {
  const Desk& desk = desks_[key];
  StoreHeader header = to;
  header.kind = kind;
  header.slowest = slowest(desk);
  header.version = slots_[key.first].part(key.second)->updates;
  const auto clock = desk.clocks.find(to.worker);
  if (kind == StoreKind::kDeclared) header.clock = clock == desk.clocks.end() ? 0 : clock->second;
  header.bytes = payload.size();
  send_(link, header, payload);
}

void Shard::refuse(int link, const StoreHeader& to, const std::string& why) {
  StoreHeader header = to;
  header.kind = StoreKind::kRefused;
  header.bytes = why.size();
  send_(link, header, std::as_bytes(std::span(why)));
}

}  // namespace commute
