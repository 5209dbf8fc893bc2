// SPDX-License-Identifier: Apache-2.0
// The second half of a shard: contributions become rounds and values, and answers go out.
#include <algorithm>
#include <limits>
#include <utility>

#include "kernels.h"
#include "store/encoding.h"
#include "store/query.h"
#include "store/row_query.h"
#include "store/shard.h"

namespace commute {
namespace {

// Whether contributions must be combined in rank order.
bool in_order(const TableSpec& spec) {
  return spec.deterministic || spec.update.kind == UpdateKind::kAssign;
}

}  // namespace

// --- contributions ---

void Shard::contribute(const Author& author, const Contribution& given, bool counts, Desk& desk) {
  const TableSpec& spec = desk.spec();
  Standing& standing = desk.of(author.worker);
  if (counts) standing.clock = std::max(standing.clock, author.clock);
  // Rows of the only member need not wait for the rest of their contribution: nobody else can see
  // a part of it.
  const bool alone = desk.rows && settings_.workers == 1 && given.pushed;
  if (!spec.in_step() || alone) {
    apply(desk,
          {OpKind::kContribute, desk.table, {author}, given.keys, given.payload, given.places});
  } else if (given.pushed) {
    standing.in_round = true;
    if (in_order(spec))
      standing.data.add(spec, given);
    else if (desk.sum.empty() && slowest(desk) > desk.closed)
      desk.only = given;  // the round is complete: nobody has to keep it
    else
      desk.sum.add(spec, given);
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
  SlotOp op{OpKind::kContribute, desk.table, {}, {}, {}};
  for (uint32_t worker = 0; worker < settings_.workers; ++worker) {
    const Standing& standing = desk.workers[worker];
    if (standing.clock >= round)
      op.authors.push_back({worker, standing.incarnation, standing.number, round});
    else if (!standing.gone && !early)
      return false;
  }
  if (op.authors.empty()) return false;
  const Contribution all = combined(desk);
  op.keys = all.keys;
  op.payload = all.payload;
  op.places = all.places;
  apply(desk, op);
  for (Standing& standing : desk.workers) standing.in_round = false;
  desk.sum.clear();
  desk.only = {};
  desk.closed = round;
  return true;
}

// The round's contributions as one; nothing when all were empty.
Contribution Shard::combined(Desk& desk) const {
  const TableSpec& spec = desk.spec();
  uint64_t pushed = 0;
  for (Standing& standing : desk.workers) {
    if (!standing.in_round) continue;
    ++pushed;
    if (!in_order(spec)) continue;
    desk.sum.add(spec, standing.data.all(spec));
    standing.data.clear();
  }
  if (pushed == 0) return {};
  if (desk.only.pushed) return desk.only;
  Contribution all = desk.sum.all(spec);
  std::vector<std::byte>& bytes = desk.sum.bytes();
  if (spec.mean && pushed > 1)
    kernels().divide_for(spec.dtype)(bytes.data(), bytes.size() / item_bytes(spec.dtype), pushed);
  if (settings_.planted == Planted::kHalfSlot)
    std::fill(bytes.begin() + long(bytes.size() / 2), bytes.end(), std::byte{0});
  return all;
}

bool Shard::change_settings(Desk& desk) {
  if (desk.settings.empty()) return false;
  if (desk.spec().in_step() && desk.settings.front().after > desk.closed) return false;
  const Setting setting = std::move(desk.settings.front());
  desk.settings.pop_front();
  SlotOp op{setting.kind, desk.table, {setting.author}, {}, setting.with.bytes};
  if (setting.with.list) op.keys = setting.with.list->keys;
  apply(desk, op);
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
    // The answer to a push holds all of it.
    const bool whole =
        pull.header.kind != StoreKind::kPush || desk.of(pull.header.worker).pieces.empty();
    // What the caller has changed before, by a drop, comes first.
    const bool changed =
        std::none_of(desk.settings.begin(), desk.settings.end(), [&](const Setting& setting) {
          return setting.author.worker == pull.header.worker &&
                 setting.author.number <= pull.header.slowest;
        });
    if (!due || !whole || !changed) {
      waiting.push_back(pull);
      continue;
    }
    owes(pull.link, pull.list, false);
    const StoreHeader header = answer(pull.header, StoreKind::kValue, desk);
    const bool asks = pull.header.kind == StoreKind::kPull && (pull.header.flags & kStoreAsks);
    if (asks || desk.rows)
      queue(pull.link, header, told(pull, desk));
    else
      queue(pull.link, header, {}, &desk);
  }
  desk.pulls = std::move(waiting);
}

// What a pull gets that is not a part's value as it is.
std::vector<std::byte> Shard::told(const Waiting& pull, const Desk& desk) const {
  if (pull.list) return desk.rows->values(*pull.list);
  const size_t most = std::min<size_t>(pull.header.version, kPartBytesMax / sizeof(Ranked));
  const TableSpec& spec = desk.spec();
  const void* const value = desk.part->value.data();
  std::vector<std::byte> bytes;
  if (desk.rows) {
    if (pull.header.flags & kStoreSummary) {
      const bool sizes_only = pull.header.version == kStoreSizes;
      put(bytes, summarize_rows(desk.rows->parts(), sizes_only));
    }
    if (pull.header.flags & kStoreTop) put_all(bytes, top_rows(desk.rows->parts(), most));
    if (pull.header.flags & kStoreItems)
      bytes = items(desk.rows->parts(), settings_.index, settings_.shards, pull.header.version);
  } else if (pull.header.flags & kStoreItems) {
    const Slot::Part& part = *desk.part;
    if (pull.header.version > part.states.size()) return bytes;
    put(bytes, SavedArray{part.updates, pull.header.version});
    const size_t which = pull.header.version;
    put_all(bytes, which == 0 ? part.value : part.states[which - 1]);
  } else if (pull.header.flags & kStoreSummary) {
    put(bytes, summarize(spec.dtype, value, spec.count));
  } else {
    put_all(bytes, top(spec.dtype, value, spec.count, most));
  }
  return bytes;
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
  if (desk.rows) return apply_rows(desk, op);
  if (record_) record_(desk.slot, op);
  slots_.at(desk.slot).apply(op, desk.part);
}

// What names no keys, a setting, concerns every slot; an empty contribution none: that its author
// made it is known here.
void Shard::apply_rows(Desk& desk, const SlotOp& op) {
  if (op.kind == OpKind::kSet || op.kind == OpKind::kReset)
    desk.rows->apply_everywhere(op, record_);
  else
    desk.rows->apply(op, record_);
  if (op.kind != OpKind::kContribute || desk.spec().expire_after == 0) return;
  // In step it is the round that is being closed, however far ahead some have ticked: every shard
  // drops what it drops in the same round.
  desk.rows->expire(desk.table, desk.spec().in_step() ? desk.closed + 1 : slowest(desk), record_);
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

// Keys of pulls that wait are held for their client, as answers are.
void Shard::owes(int link, const std::shared_ptr<KeyList>& list, bool more) {
  if (!list) return;
  const size_t bytes = list->keys.size() * sizeof(uint64_t);
  Queue& queue = queues_[link];
  queue.bytes = more ? queue.bytes + bytes : queue.bytes - std::min(queue.bytes, bytes);
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
