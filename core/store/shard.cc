// SPDX-License-Identifier: Apache-2.0
#include "store/shard.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "store/encoding.h"
#include "store/wire.h"

namespace commute {
namespace {

// Rows of a slot for which somebody may ask room at once.
constexpr uint64_t kRoomMax = 1 << 26;

bool is_known(StoreKind kind) {
  return kind <= StoreKind::kReserve;
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
  if (observer && header.kind != StoreKind::kPull && desk.spec().bounded())
    return refuse(link, header, Refused::kInvalid,
                  "an observer has no clock, and may change tables at staleness None only; this "
                  "one has staleness " +
                      std::to_string(desk.spec().staleness));
  if (desk.of(header.worker).gone)
    return refuse(link, header, Refused::kLost,
                  "rank " + std::to_string(header.worker) +
                      " itself has left, or was taken for lost, and the others went on without it",
                  header.worker);
  if (desk.lost >= 0 && !(observer && header.kind == StoreKind::kPull))
    return refuse_lost(link, header, desk);
  try {
    switch (header.kind) {
      case StoreKind::kPush:
        if (desk.rows) return push_rows(link, header, payload, desk);
        return push(link, header, {true, payload, {}, nullptr}, nullptr, desk);
      case StoreKind::kTick:
        return tick(link, header, desk);
      case StoreKind::kPull:
        if (desk.rows) return pull_rows(link, header, payload, desk);
        return pull(link, header, nullptr, desk);
      case StoreKind::kDrop:
        return drop(link, header, payload, desk);
      case StoreKind::kReset:
        return reset(link, header, payload, desk);
      case StoreKind::kLoad:
        return load(link, header, payload, desk);
      case StoreKind::kReserve:
        return reserve(link, header, desk);
      default:
        return set(link, header, payload, desk);
    }
  } catch (const std::invalid_argument& error) {
    return refuse_change(link, header, error.what(), desk);
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
      for (const Waiting& pull : std::exchange(desk.pulls, {})) {
        owes(pull.link, pull.list, false);
        refuse_lost(pull.link, pull.header, desk);
      }
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
  standing.pieces.clear();
  progress(desk);
}

// --- messages ---

// payload = name | spec of the whole table | declaration as a sentence
void Shard::declare_table(int link, const StoreHeader& header, Bytes payload) {
  if (settings_.index != 0)
    return refuse(link, header, Refused::kProtocol, "the first shard keeps the directory");
  TableEntry entry = new_entry(header, payload);
  const auto& known = slot(0).directory();
  const auto found = known.find(entry.name);
  if (found == known.end()) {
    const auto encoded = entry.encode();
    const SlotOp op{OpKind::kTable, 0, {}, {}, encoded};
    if (record_) record_(0, op);
    slot(0).apply(op);
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
    const SlotOp op{OpKind::kTable, 0, {}, {}, encoded};
    if (record_) record_(0, op);
    slot(0).apply(op);
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
  entry.bytes = spec.sparse ? 0 : spec.bytes();
  entry.maker = header.worker;
  const auto found = slots_.find(0);
  static const std::map<std::string, TableEntry> kNone;
  const auto& known = found == slots_.end() ? kNone : found->second.directory();
  entry.table = static_cast<uint32_t>(known.size());
  if (spec.sparse) return entry;  // it is in every slot
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
  Bytes rest = payload;
  const TableSpec spec = TableSpec::decode(rest);
  const SlotOp op{OpKind::kCreate, header.table, {}, {}, payload};
  Desk desk;
  desk.store = header.number;
  desk.slot = header.slot;
  desk.table = header.table;
  if (spec.sparse) {
    if (header.slot != kEverySlot || spec.slots != settings_.slots)
      throw std::invalid_argument("a sparse table is in every slot");
    std::vector<Slot*> slots;
    for (uint32_t at = settings_.index; at < settings_.slots; at += settings_.shards) {
      if (record_) record_(at, op);
      slots.push_back(&slot(at));
      slots.back()->apply(op);
    }
    desk.rows = std::make_unique<RowDesk>(std::move(slots), settings_.index, settings_.shards,
                                          header.table, settings_.remembered_max);
    desk.part = desk.rows->parts().front();
  } else {
    if (header.slot >= settings_.slots || header.slot % settings_.shards != settings_.index)
      throw std::invalid_argument("this shard does not hold the slot");
    if (spec.bytes() > kPartBytesMax) throw std::invalid_argument("the part is too large");
    slot(header.slot).apply(op);
    if (record_) record_(header.slot, op);
    desk.part = slot(header.slot).part(header.table);
  }
  desk.workers.resize(settings_.workers);
  for (const auto& [worker, loss] : lost_) {
    desk.workers[worker].gone = true;
    if (loss && !desk.spec().continues) desk.lost = int(worker);
  }
  for (uint32_t worker = 0; worker < settings_.workers; ++worker)
    if (left_.contains({desk.store, worker})) desk.workers[worker].gone = true;
  desks_.emplace(key_of(header), std::move(desk));
}

Slot& Shard::slot(uint32_t number) {
  return slots_.try_emplace(number, pages_).first->second;
}

// A worker that comes back has a clock here; what its last life had begun to build is forgotten.
void Shard::welcome(int link, const StoreHeader& header, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (standing.incarnation < header.incarnation) {
    standing.incarnation = header.incarnation;
    standing.number = 0;
    standing.pieces.clear();
    standing.gone = left_.contains({desk.store, header.worker});
  }
  standing.declared = true;
  StoreHeader reply = answer(header, StoreKind::kDeclared, desk);
  reply.clock = standing.clock;
  queue(link, reply);
}

void Shard::push(int link, const StoreHeader& header, const Contribution& given,
                 std::shared_ptr<KeyList> list, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  const TableSpec& spec = desk.spec();
  const size_t expected = spec.bytes() * (spec.sparse ? given.keys.size() : 1);
  if (given.payload.size() != expected)
    throw std::invalid_argument("expected " + std::to_string(expected) + " bytes, got " +
                                std::to_string(given.payload.size()));
  if (is_news(header, standing)) {
    if (!its_turn(header, standing) || header.clock > bound(desk))
      return put_off(link, header, desk);
    standing.number = header.number;
    ++pushes_;
    take(header, given, desk, standing);
  }
  if (header.flags & kStoreWants) {
    pull(link, header, std::move(list), desk);
    if (desk.pulls.empty() || desk.pulls.back().header.call != header.call) return;  // answered
  }
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

// Pieces wait until what they belong to is complete. A part that is followed by others, of other
// rows, does not wait: the atomic unit is the slot.
void Shard::take(const StoreHeader& header, const Contribution& given, Desk& desk,
                 Standing& standing) {
  const Author author{header.worker, header.incarnation, header.number, header.clock};
  const bool followed = header.flags & kStoreFollowed;
  if (!(header.flags & kStorePiece) && standing.pieces.empty())
    return contribute(author, given, !followed, desk);
  standing.pieces.add(desk.spec(), given);
  if (followed || (header.flags & kStorePiece)) return;
  complete(author, desk, standing);
}

void Shard::complete(const Author& author, Desk& desk, Standing& standing) {
  Pile pieces = std::exchange(standing.pieces, {});
  contribute(author, pieces.all(desk.spec()), true, desk);
}

void Shard::push_rows(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  const auto list = desk.rows->keys_of(header.worker, payload);
  if (!list) return queue(link, answer(header, StoreKind::kUnknown, desk));
  const TableSpec& spec = desk.spec();
  std::vector<std::byte> wide;
  if (spec.wire != spec.dtype) {
    wide = widened(spec.wire, payload);
    payload = wide;
  }
  push(link, header, {true, payload, list->keys, desk.rows->places_of(*list)}, list, desk);
}

// Counts empty contributions up to the clock it names; what is being built becomes the first.
void Shard::tick(int link, const StoreHeader& header, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (is_news(header, standing)) {
    if (!its_turn(header, standing)) return put_off(link, header, desk);
    standing.number = header.number;
    while (standing.clock < header.clock && settings_.planted != Planted::kLostTick) {
      const Author author{header.worker, header.incarnation, header.number, standing.clock + 1};
      if (standing.pieces.empty())
        contribute(author, {}, true, desk);
      else
        complete(author, desk, standing);
    }
  }
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

void Shard::pull(int link, const StoreHeader& header, std::shared_ptr<KeyList> list, Desk& desk) {
  // Where what an observer changes is refused, nothing comes after anything.
  const bool at_once = observes(header.worker) && (desk.spec().bounded() || desk.lost >= 0);
  if (!at_once && !its_turn(header, desk.of(header.worker))) return put_off(link, header, desk);
  owes(link, list, true);
  desk.pulls.push_back({link, header, std::move(list)});
  answer_pulls(desk);
}

void Shard::pull_rows(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  if (header.flags & (kStoreSummary | kStoreTop | kStoreItems))
    return pull(link, header, nullptr, desk);
  auto list = desk.rows->keys_of(header.worker, payload);
  if (!list) return queue(link, answer(header, StoreKind::kUnknown, desk));
  if (list->keys.size() * desk.spec().wire_bytes() > kPayloadMax)
    throw std::invalid_argument("more rows than an answer can hold");
  pull(link, header, std::move(list), desk);
}

void Shard::set(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  if (payload.size() != Update::kEncodedBytes)
    throw std::invalid_argument("an update has another length");
  Update::decode(payload);  // what cannot be is refused now, not in the round it is for
  change(link, header, OpKind::kSet, {{payload.begin(), payload.end()}, nullptr}, desk);
}

void Shard::drop(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  if (!desk.rows) throw std::invalid_argument("the table has no rows");
  auto list = desk.rows->keys_of(header.worker, payload);
  if (!list) return queue(link, answer(header, StoreKind::kUnknown, desk));
  change(link, header, OpKind::kDrop, {{}, std::move(list)}, desk);
}

// All members call it, at equal clocks and with nothing under way; one of them sends it.
void Shard::reset(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  Bytes rest = payload;
  const auto clock = commute::take<uint64_t>(rest);
  const bool news = is_news(header, desk.of(header.worker));
  change(link, header, OpKind::kReset, {{payload.begin(), payload.end()}, nullptr}, desk);
  if (!news || desk.of(header.worker).number != header.number) return;
  for (Standing& standing : desk.workers) standing.clock = clock;
  desk.closed = clock;
}

void Shard::load(int link, const StoreHeader& header, Bytes payload, Desk& desk) {
  Change with;
  if (desk.rows) {
    with.list = desk.rows->keys_of(header.worker, payload);
    if (!with.list) return queue(link, answer(header, StoreKind::kUnknown, desk));
    if (payload.size() != with.list->keys.size() * desk.spec().layout().bytes)
      throw std::invalid_argument("saved rows have another length");
    const size_t expected = std::min(header.version, kRoomMax);
    if (!with.list->keys.empty()) desk.rows->reserve_slot(with.list->keys.front(), expected);
  } else if (payload.size() != sizeof(SavedArray) + desk.part->value.size()) {
    throw std::invalid_argument("a saved array has another length");
  }
  with.bytes.assign(payload.begin(), payload.end());
  change(link, header, OpKind::kLoad, std::move(with), desk);
}

// Nothing that anybody can see changes, so it has no number, and is no op.
void Shard::reserve(int link, const StoreHeader& header, Desk& desk) {
  if (!desk.rows) throw std::invalid_argument("the table has no rows");
  desk.rows->reserve(header.version);
  queue(link, answer(header, StoreKind::kCommitted, desk));
}

// What is not a contribution takes effect after the caller's last round.
void Shard::change(int link, const StoreHeader& header, OpKind kind, Change with, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (is_news(header, standing)) {
    if (!its_turn(header, standing)) return put_off(link, header, desk);
    standing.number = header.number;
    const Author author{header.worker, header.incarnation, header.number, 0};
    // By rounds: who has ticked ahead does not put off what comes first for others.
    const auto later = std::find_if(desk.settings.begin(), desk.settings.end(),
                                    [&](const Setting& one) { return one.after > header.clock; });
    desk.settings.insert(later, {header.clock, kind, author, std::move(with)});
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

// What no correct client sends is refused in its turn, and takes its number; a contribution counts
// as an empty one. So what comes after it does not wait for it for ever.
void Shard::refuse_change(int link, const StoreHeader& header, const std::string& why, Desk& desk) {
  Standing& standing = desk.of(header.worker);
  if (header.number > standing.number) {
    if (!its_turn(header, standing)) return put_off(link, header, desk);
    standing.number = header.number;
    const bool counts = !(header.flags & (kStorePiece | kStoreFollowed));
    if (header.kind == StoreKind::kPush && counts) {
      const Author author{header.worker, header.incarnation, header.number, standing.clock + 1};
      standing.pieces.clear();
      contribute(author, {}, true, desk);
    }
  }
  refuse(link, header, Refused::kProtocol, why);
}

// Not now: it comes after something that was put off, or is too far ahead.
void Shard::put_off(int link, const StoreHeader& header, Desk& desk) {
  desk.of(header.worker).eager = link;
  queue(link, answer(header, StoreKind::kLater, desk));
  say_go(desk);  // what it comes after may have been told to come already
}

}  // namespace commute
