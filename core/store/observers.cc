// SPDX-License-Identifier: Apache-2.0
// What a shard does about observers only (rule 6 of shard.h); their messages are taken as those of
// members are.
#include <algorithm>
#include <utility>

#include "store/shard.h"

namespace commute {

// Its numbers are not given out again, so nothing of it can come back: all of it is let go. Where
// it was to make a part, whoever waits for that asks the directory for another maker.
void Shard::on_gone(uint32_t observer) {
  if (present_.erase(observer) == 0) return;
  incarnations_.erase(observer);
  for (auto& [key, waiting] : not_yet_)
    for (const Waiting& one : std::exchange(waiting, {}))
      if (one.header.version == observer)
        refuse_unmade(one.link, one.header);
      else
        waiting.push_back(one);
  std::erase_if(not_yet_, [](const auto& item) { return item.second.empty(); });
  for (auto& [key, desk] : desks_) {
    desk.observers.erase(observer);
    if (desk.rows) desk.rows->forget(observer);
  }
  for (auto& [number, slot] : slots_)
    for (const auto& [table, part] : slot.parts()) {
      if (!part.last.contains(observer) && !part.clocks.contains(observer)) continue;
      const SlotOp op{OpKind::kForget, table, {{observer, 0, 0, 0}}, {}, {}};
      if (record_) record_(number, op);
      slot.apply(op);
    }
}

// To whom waits for a part that an observer was to make.
void Shard::refuse_unmade(int link, const StoreHeader& to) {
  refuse(link, to, Refused::kLost, name_of(to.version) + " went before it had made the table",
         to.version);
}

std::string Shard::name_of(uint64_t worker) const {
  return (worker < settings_.workers ? "rank " : "client ") + std::to_string(worker);
}

}  // namespace commute
