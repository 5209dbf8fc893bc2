// SPDX-License-Identifier: Apache-2.0
#include "store/status.h"

#include <algorithm>

namespace commute {
namespace {

void add(TableStatus& status, const Slot::Part& part, uint32_t members) {
  const bool first = status.slots++ == 0;
  status.bytes += part.rows ? part.rows->memory() : part.value.size();
  if (part.rows) status.rows += part.rows->size();
  for (const auto& state : part.states) status.state_bytes += state.size();
  status.updates = std::max(status.updates, part.updates);
  status.dtype = name(part.spec.dtype);
  status.update = part.spec.update.describe();
  status.staleness = part.spec.staleness;
  for (uint32_t worker = 0; worker < members; ++worker) {
    const uint64_t* const found = part.clocks.find(worker);
    const uint64_t clock = found == nullptr ? 0 : *found;
    uint64_t& least = status.clocks[worker];
    least = first ? clock : std::min(least, clock);
  }
}

}  // namespace

ShardStatus status_of(const Shard& shard) {
  ShardStatus status;
  status.pushes = shard.pushes();
  for (const auto& [number, slot] : shard.slots()) {
    for (const auto& [table, part] : slot.parts())
      add(status.tables[table], part, shard.settings().workers);
    for (const auto& [name, entry] : slot.directory()) status.directory.push_back(entry);
  }
  return status;
}

}  // namespace commute
