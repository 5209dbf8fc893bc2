// SPDX-License-Identifier: Apache-2.0
#include "store/shard.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels.h"
#include "store/encoding.h"
#include "store/query.h"

namespace commute {
namespace {

// Whether contributions must be combined in rank order.
bool in_order(const TableSpec& spec) {
  return spec.deterministic || spec.update.kind == UpdateKind::kAssign;
}

// Adds to `sum`, of which the first is a copy.
void add(const TableSpec& spec, std::vector<std::byte>& sum, bool first, Bytes more) {
  if (first || spec.update.kind == UpdateKind::kAssign)
    sum.assign(more.begin(), more.end());
  else
    kernels().reduce_for(spec.dtype, spec.update.combines_by())(sum.data(), sum.data(), more.data(),
                                                                spec.count);
}

bool is_known(StoreKind kind) {
  return kind <= StoreKind::kWho;
}

}  // namespace

Shard::Shard(Settings settings, Record record) : settings_(settings), record_(std::move(record)) {}

void Shard::on_message(int link, const StoreHeader& header, Bytes payload) {
  const bool observer = observes(header.worker);
  if ((observer && !present_.contains(header.worker)) || !is_known(header.kind))
    return refuse(link, header, Refused::kProtocol, "no correct client sends this");
  uint32_t& newest = incarnations_[header.worker];
  if (header.incarnation < newest)
    return refuse(link, header, Refused::kReplaced, "a newer incarnation of this worker has come");
  newest = header.incarnation;
  try {
    if (header.kind == StoreKind::kTable) return declare_table(link, header, payload);
    if (header.kind == StoreKind::kDeclare) return declare(link, header, payload);
    if (header.kind == StoreKind::kLeave) return leave(link, header);
  } catch (const std::invalid_argument& error) {
    return refuse(link, header, Refused::kInvalid, error.what());
  }
  const auto found = desks_.find(key_of(header));
  if (found == desks_.end())
    return refuse(link, header, Refused::kProtocol, "the table is not declared");
  Desk& desk = found->second;
  if (desk.of(header.worker).incarnation != header.incarnation)
    return refuse(link, header, Refused::kProtocol, "this worker has not declared the table");
  if (header.kind == StoreKind::kWho) return who(link, header, desk);
  if (observer && header.kind == StoreKind::kPull) return pull(link, header, desk);
  if (observer && desk.spec().bounded())
    return refuse(link, header, Refused::kInvalid,
                  "an observer has no clock, and may change tables at staleness None only; this "
                  "one has staleness " +
                      std::to_string(desk.spec().staleness));
  if (desk.of(header.worker).gone)
    return refuse(link, header, Refused::kLost,
                  "rank " + std::to_string(header.worker) +
                      " itself has left, or was taken for lost, and the others went on without it",
                  header.worker);
  if (desk.lost >= 0) return refuse_lost(link, header, desk);
  switch (header.kind) {
    case StoreKind::kPush:
      return push(link, header, payload, desk);
    case StoreKind::kTick:
      return tick(link, header, desk);
    case StoreKind::kPull:
      return pull(link, header, desk);
    default:
      return set(link, header, payload, desk);
  }
}

void Shard::on_link_down(int link) {
  if (const auto queue = queues_.find(link); queue != queues_.end()) {
    for (const Out& out : queue->second.out)
      if (out.part != nullptr) --desks_.at(key_of(out.header)).owed;
    queues_.erase(queue);
  }
  for (auto& [key, desk] : desks_) {
    std::erase_if(desk.pulls, [link](const Waiting& pull) { return pull.link == link; });
    for (Standing& standing : desk.workers)
      if (standing.eager == link) standing.eager = -1;
    for (auto& [worker, standing] : desk.observers)
      if (standing.eager == link) standing.eager = -1;
  }
  for (auto& [key, waiting] : not_yet_)
    std::erase_if(waiting, [link](const Waiting& one) { return one.link == link; });
}

void Shard::on_lost(uint32_t worker) {
  lost_[worker] = true;
  for (auto& [key, waiting] : not_yet_)
    for (const Waiting& one : std::exchange(waiting, {}))
      if (one.header.version == worker)
        refuse(one.link, one.header, Refused::kLost,
               "rank " + std::to_string(worker) + " was lost before it had made the table", worker);
      else
        waiting.push_back(one);
  for (auto& [key, desk] : desks_) {
    if (desk.workers[worker].gone) continue;  // it had left
    if (!desk.spec().continues) {
      desk.lost = int(worker);
      for (const Waiting& pull : std::exchange(desk.pulls, {}))
        refuse_lost(pull.link, pull.header, desk);
      for (Standing& standing : desk.workers)
        if (const int link = std::exchange(standing.eager, -1); link >= 0) {
          StoreHeader header;
          header.slot = desk.slot;
          header.table = desk.table;
          queue(link, answer(header, StoreKind::kGo, desk));
        }
      continue;
    }
    gone(desk, worker);
  }
}

void Shard::on_left(uint32_t worker) {
  lost_.emplace(worker, false);
  for (auto& [key, desk] : desks_) gone(desk, worker);
}

void Shard::gone(Desk& desk, uint32_t worker) {
  Standing& standing = desk.workers[worker];
  standing.gone = true;
  standing.building = false;
  progress(desk);
}

// --- messages ---

// payload = name | spec of the whole table | declaration as a sentence
void Shard::declare_table(int link, const StoreHeader& header, Bytes payload) {
  if (settings_.index != 0)
    return refuse(link, header, Refused::kProtocol, "the first shard keeps the directory");
  TableEntry entry = new_entry(header, payload);
  const auto& known = slots_[0].directory();
  const auto found = known.find(entry.name);
  if (found == known.end()) {
    const auto encoded = entry.encode();
    const SlotOp op{OpKind::kTable, 0, {}, encoded};
    if (record_) record_(0, op);
    slots_[0].apply(op);
  } else if (found->second.declaration != entry.declaration) {
    const std::string text = name_of(found->second.maker) + " declared " +
                             found->second.declaration + ", " + name_of(header.worker) + " " +
                             entry.declaration;
    return refuse(link, header, Refused::kMismatch, text);
  } else if ((header.flags & kStoreMaker) && found->second.maker == header.version) {
    // The maker is gone, or does not come to it: this worker makes what is missing.
    TableEntry taken = found->second;
    taken.maker = header.worker;
    const auto encoded = taken.encode();
    const SlotOp op{OpKind::kTable, 0, {}, encoded};
    if (record_) record_(0, op);
    slots_[0].apply(op);
  }
  StoreHeader placed = header;
  placed.kind = StoreKind::kPlaced;
  queue(link, placed, known.at(entry.name).encode());
}

TableEntry Shard::new_entry(const StoreHeader& header, Bytes payload) const {
  TableEntry entry;
  entry.name = take_text(payload);
  const TableSpec spec = TableSpec::decode(payload);
  entry.declaration = take_text(payload);
  if (spec.count > std::numeric_limits<uint64_t>::max() / 16)
    throw std::invalid_argument("the table is too large");
  entry.bytes = spec.bytes();
  entry.maker = header.worker;
  const auto found = slots_.find(0);
  static const std::map<std::string, TableEntry> kNone;
  const auto& known = found == slots_.end() ? kNone : found->second.directory();
  entry.table = static_cast<uint32_t>(known.size());
  entry.chunk_bytes = chunk_bytes_for(entry.bytes, settings_.slots);
  if (entry.chunk_bytes == 0) {
    const uint64_t most = uint64_t{settings_.slots} * kPartBytesMax;
    throw std::invalid_argument("it has " + std::to_string(entry.bytes) + " bytes, more than the " +
                                std::to_string(most) + " that " + std::to_string(settings_.slots) +
                                " slots can hold");
  }
  if (!known.contains(entry.name))
    entry.slots = place(known, entry.bytes, entry.chunk_bytes, settings_.slots, settings_.shards);
  return entry;
}

void Shard::declare(int link, const StoreHeader& header, Bytes payload) {
  const auto found = desks_.find(key_of(header));
  if (found != desks_.end()) return welcome(link, header, found->second);
  if (!(header.flags & kStoreMaker)) {
    if (const auto lost = lost_.find(uint32_t(header.version)); lost != lost_.end() && lost->second)
      return refuse(
          link, header, Refused::kLost,
          "rank " + std::to_string(header.version) + " was lost before it had made the table",
          header.version);
    if (observes(uint32_t(header.version)) && !present_.contains(uint32_t(header.version)))
      return refuse_unmade(link, header);
    not_yet_[key_of(header)].push_back({link, header});
    return;
  }
  create(header, payload);
  welcome(link, header, desks_.at(key_of(header)));
  if (const auto waiting = not_yet_.extract(key_of(header)))
    for (const Waiting& one : waiting.mapped())
      welcome(one.link, one.header, desks_.at(key_of(header)));
}

void Shard::create(const StoreHeader& header, Bytes payload) {
  if (header.slot >= settings_.slots || header.slot % settings_.shards != settings_.index)
    throw std::invalid_argument("this shard does not hold the slot");
  Bytes rest = payload;
  if (TableSpec::decode(rest).bytes() > kPartBytesMax)
    throw std::invalid_argument("the part is too large");
  const SlotOp op{OpKind::kCreate, header.table, {}, payload};
  slots_[header.slot].apply(op);
  if (record_) record_(header.slot, op);
  Desk desk;
  desk.store = header.number;
  desk.slot = header.slot;
  desk.table = header.table;
  desk.part = slots_[header.slot].part(header.table);
  desk.workers.resize(settings_.workers);
  for (const auto& [worker, loss] : lost_) {
    desk.workers[worker].gone = true;
    if (loss && !desk.spec().continues) desk.lost = int(worker);
  }
  for (uint32_t worker = 0; worker < settings_.workers; ++worker)
    if (left_.contains({desk.store, worker})) desk.workers[worker].gone = true;
  desks_.emplace(key_of(header), std::move(desk));
}

// A worker that comes back has a clock here; what its last life had begun to build is forgotten.
void Shard::welcome(int link, const StoreHeader& header, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (standing.incarnation < header.incarnation) {
    standing.incarnation = header.incarnation;
    standing.number = 0;
    standing.building = false;
    standing.gone = left_.contains({desk.store, header.worker});
  }
  standing.declared = true;
  StoreHeader reply = answer(header, StoreKind::kDeclared, desk);
  reply.clock = standing.clock;
  queue(link, reply);
}

void Shard::push(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  const TableSpec& spec = desk.spec();
  if (payload.size() != spec.bytes())
    return refuse(link, header, Refused::kProtocol,
                  "expected " + std::to_string(spec.bytes()) + " bytes, got " +
                      std::to_string(payload.size()));
  if (is_news(header, standing)) {
    if (!its_turn(header, standing) || header.clock > bound(desk))
      return put_off(link, header, desk);
    standing.number = header.number;
    ++pushes_;
    const bool piece = header.flags & kStorePiece;
    if (piece || standing.building) {
      add(spec, standing.pieces, !std::exchange(standing.building, true), payload);
      payload = standing.pieces;
    }
    if (!piece) {
      standing.building = false;
      contribute({header.worker, header.incarnation, header.number, header.clock}, payload, desk);
    }
  }
  if (header.flags & kStoreWants) {
    pull(link, header, desk);
    if (desk.pulls.empty() || desk.pulls.back().header.call != header.call) return;  // answered
  }
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

// Counts empty contributions up to the clock it names; what is being built becomes the first.
void Shard::tick(int link, const StoreHeader& header, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (is_news(header, standing)) {
    if (!its_turn(header, standing)) return put_off(link, header, desk);
    standing.number = header.number;
    while (standing.clock < header.clock && settings_.planted != Planted::kLostTick) {
      const Bytes pieces = standing.building ? Bytes(standing.pieces) : Bytes();
      standing.building = false;
      contribute({header.worker, header.incarnation, header.number, standing.clock + 1}, pieces,
                 desk);
    }
  }
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

void Shard::pull(int link, const StoreHeader& header, Desk& desk) {
  // Where what an observer changes is refused, nothing comes after anything.
  const bool at_once = observes(header.worker) && (desk.spec().bounded() || desk.lost >= 0);
  if (!at_once && !its_turn(header, desk.of(header.worker))) return put_off(link, header, desk);
  desk.pulls.push_back({link, header});
  answer_pulls(desk);
}

void Shard::set(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (payload.size() != Update::kEncodedBytes)
    return refuse(link, header, Refused::kProtocol, "an update has another length");
  if (is_news(header, standing)) {
    if (!its_turn(header, standing)) return put_off(link, header, desk);
    standing.number = header.number;
    const Author author{header.worker, header.incarnation, header.number, 0};
    desk.settings.push_back({header.clock, author, {payload.begin(), payload.end()}});
    progress(desk);
  }
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

// The worker has flushed before: nothing of it is on its way.
void Shard::leave(int link, const StoreHeader& header) {
  if (!observes(header.worker)) {
    left_.emplace(header.number, header.worker);
    for (auto& [key, desk] : desks_)
      if (desk.store == header.number && desk.lost < 0) gone(desk, header.worker);
  }
  StoreHeader reply = header;
  reply.kind = StoreKind::kCommitted;
  queue(link, reply);
}

void Shard::who(int link, const StoreHeader& header, const Desk& desk) {
  std::vector<std::byte> bytes;
  for (uint32_t worker = 0; worker < settings_.workers; ++worker) {
    const Standing& standing = desk.workers[worker];
    if (standing.gone) continue;
    put(bytes, worker);
    put(bytes, uint32_t{standing.declared});
    put(bytes, standing.clock);
  }
  queue(link, answer(header, StoreKind::kBehind, desk), std::move(bytes));
}

// Whether this has not been received before.
bool Shard::is_news(const StoreHeader& header, Standing& standing) const {
  return header.number > standing.number || settings_.planted == Planted::kNoDeduplication;
}

bool Shard::its_turn(const StoreHeader& header, const Standing& standing) const {
  return header.slowest <= standing.number;
}

// Not now: it comes after something that was put off, or is too far ahead.
void Shard::put_off(int link, const StoreHeader& header, Desk& desk) {
  desk.of(header.worker).eager = link;
  queue(link, answer(header, StoreKind::kLater, desk));
  say_go(desk);  // what it comes after may have been told to come already
}

// --- contributions ---

void Shard::contribute(const Author& author, Bytes payload, Desk& desk) {
  const TableSpec& spec = desk.spec();
  Standing& standing = desk.of(author.worker);
  standing.clock = std::max(standing.clock, author.clock);
  if (!spec.in_step()) {
    apply(desk, {OpKind::kContribute, desk.table, {author}, payload});
  } else if (!payload.empty()) {
    standing.in_round = true;
    if (in_order(spec))
      standing.data.assign(payload.begin(), payload.end());
    else if (!desk.has_sum && slowest(desk) > desk.closed)
      desk.only = payload;  // the round is complete: nobody has to keep it
    else
      add(spec, desk.sum, !std::exchange(desk.has_sum, true), payload);
  }
  progress(desk);
  desk.only = {};
}

void Shard::progress(Desk& desk) {
  answer_pulls(desk);
  while (change_settings(desk) || (desk.spec().in_step() && close_round(desk))) answer_pulls(desk);
  say_go(desk);
}

bool Shard::close_round(Desk& desk) {
  const uint64_t round = desk.closed + 1;
  const bool early = settings_.planted == Planted::kEarlyClose;
  SlotOp op{OpKind::kContribute, desk.table, {}, {}};
  for (uint32_t worker = 0; worker < settings_.workers; ++worker) {
    const Standing& standing = desk.workers[worker];
    if (standing.clock >= round)
      op.authors.push_back({worker, standing.incarnation, standing.number, round});
    else if (!standing.gone && !early)
      return false;
  }
  if (op.authors.empty()) return false;
  uint64_t pushed = 0;
  op.payload = combined(desk, pushed);
  apply(desk, op);
  for (Standing& standing : desk.workers) standing.in_round = false;
  desk.has_sum = false;
  desk.only = {};
  desk.closed = round;
  return true;
}

// The round's contributions as one; nothing when all were empty.
Bytes Shard::combined(Desk& desk, uint64_t& pushed) const {
  const TableSpec& spec = desk.spec();
  for (Standing& standing : desk.workers) {
    if (!standing.in_round) continue;
    if (in_order(spec)) add(spec, desk.sum, pushed == 0, standing.data);
    ++pushed;
  }
  if (pushed == 0) return {};
  if (spec.mean && pushed > 1)
    kernels().divide_for(spec.dtype)(desk.sum.data(), spec.count, pushed);
  if (settings_.planted == Planted::kHalfSlot && desk.only.empty())
    std::fill(desk.sum.begin() + long(desk.sum.size() / 2), desk.sum.end(), std::byte{0});
  return desk.only.empty() ? Bytes(desk.sum) : desk.only;
}

bool Shard::change_settings(Desk& desk) {
  if (desk.settings.empty()) return false;
  if (desk.spec().in_step() && desk.settings.front().after > desk.closed) return false;
  const Setting setting = std::move(desk.settings.front());
  desk.settings.pop_front();
  apply(desk, {OpKind::kSet, desk.table, {setting.author}, setting.numbers});
  return true;
}

void Shard::answer_pulls(Desk& desk) {
  if (desk.pulls.empty()) return;
  const TableSpec& spec = desk.spec();
  const uint64_t now = slowest(desk);
  std::deque<Waiting> waiting;
  for (const Waiting& pull : std::exchange(desk.pulls, {})) {
    // In step, the slowest may be ahead of the rounds that are closed for a moment.
    const bool due = !spec.bounded() || observes(pull.header.worker) ||
                     (pull.header.clock <= now + uint64_t(spec.staleness) &&
                      (!spec.in_step() || pull.header.clock <= desk.closed));
    if (!due) {
      waiting.push_back(pull);
      continue;
    }
    StoreHeader header = answer(pull.header, StoreKind::kValue, desk);
    const Slot::Part& part = *desk.part;
    std::vector<std::byte> bytes;
    if (pull.header.flags & kStoreSummary) {
      put(bytes, summarize(spec.dtype, part.value.data(), spec.count));
    } else if (pull.header.flags & kStoreTop) {
      const size_t most = std::min<size_t>(pull.header.version, kPartBytesMax / sizeof(Ranked));
      const auto ranked = top(spec.dtype, part.value.data(), spec.count, most);
      put_bytes(bytes, ranked.data(), ranked.size() * sizeof(Ranked));
    } else {
      queue(pull.link, header, {}, &desk);
      continue;
    }
    queue(pull.link, header, std::move(bytes));
  }
  desk.pulls = std::move(waiting);
}

// Who was put off may come again once that can succeed.
void Shard::say_go(Desk& desk) {
  const auto say = [&](Standing& standing) {
    if (standing.eager < 0 || standing.clock + 1 > bound(desk)) return;
    StoreHeader header;
    header.slot = desk.slot;
    header.table = desk.table;
    queue(std::exchange(standing.eager, -1), answer(header, StoreKind::kGo, desk));
  };
  for (Standing& standing : desk.workers) say(standing);
  for (auto& [worker, standing] : desk.observers) say(standing);
}

void Shard::apply(Desk& desk, const SlotOp& op) {
  if (desk.owed > 0 && desk.spec().in_step()) keep_owed(desk);
  if (record_) record_(desk.slot, op);
  slots_.at(desk.slot).apply(op, desk.part);
}

// What is still to be sent is the value before the change.
void Shard::keep_owed(Desk& desk) {
  for (auto& [link, queue] : queues_)
    for (Out& out : queue.out)
      if (out.part == desk.part) {
        out.bytes = desk.part->value;
        out.part = nullptr;
        --desk.owed;
      }
}

// --- what is known ---

uint64_t Shard::slowest(const Desk& desk) const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  uint64_t most = 0;
  for (const Standing& standing : desk.workers) {
    most = std::max(most, standing.clock);
    if (!standing.gone) least = std::min(least, standing.clock);
  }
  if (settings_.planted == Planted::kWrongMinimum) return most;
  return std::min(least, most);  // all have left: nobody holds anybody up
}

uint64_t Shard::bound(const Desk& desk) const {
  const TableSpec& spec = desk.spec();
  if (!spec.bounded()) return std::numeric_limits<uint64_t>::max();
  return slowest(desk) + uint64_t(spec.staleness) + 1;
}

// --- answers ---

const StoreMessage* Shard::next(int link) {
  const auto found = queues_.find(link);
  if (found == queues_.end() || found->second.out.empty()) return nullptr;
  const Out& out = found->second.out.front();
  next_.header = out.header;
  next_.payload = out.part != nullptr ? Bytes(out.part->value) : Bytes(out.bytes);
  return &next_;
}

void Shard::sent(int link) {
  Queue& queue = queues_.at(link);
  const Out& out = queue.out.front();
  queue.bytes -= out.header.bytes;
  if (out.part != nullptr) --desks_.at(key_of(out.header)).owed;
  queue.out.pop_front();
}

bool Shard::wants(int link) const {
  const auto found = queues_.find(link);
  return found == queues_.end() || found->second.bytes <= kOwedMax;
}

StoreHeader Shard::answer(const StoreHeader& to, StoreKind kind, const Desk& desk) const {
  StoreHeader header = to;
  header.kind = kind;
  header.slowest = slowest(desk);
  header.version = desk.part->updates;
  return header;
}

void Shard::queue(int link, StoreHeader header, std::vector<std::byte> bytes, Desk* value_of) {
  Queue& queue = queues_[link];
  header.bytes = value_of != nullptr ? value_of->part->value.size() : bytes.size();
  queue.bytes += header.bytes;
  if (value_of != nullptr) ++value_of->owed;
  queue.out.push_back({header, std::move(bytes), value_of != nullptr ? value_of->part : nullptr});
}

void Shard::refuse(int link, const StoreHeader& to, Refused code, const std::string& why,
                   uint64_t about) {
  StoreHeader header = to;
  header.kind = StoreKind::kRefused;
  header.code = code;
  header.version = about;
  const Bytes text = std::as_bytes(std::span(why));
  queue(link, header, {text.begin(), text.end()});
}

void Shard::refuse_lost(int link, const StoreHeader& to, const Desk& desk) {
  refuse(link, to, Refused::kLost, "rank " + std::to_string(desk.lost) + " was lost",
         uint64_t(desk.lost));
}

}  // namespace commute
