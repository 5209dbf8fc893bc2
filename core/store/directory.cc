// SPDX-License-Identifier: Apache-2.0
#include "store/directory.h"

#include <algorithm>
#include <tuple>

#include "store/encoding.h"

namespace commute {

std::vector<std::byte> TableEntry::encode() const {
  std::vector<std::byte> encoded;
  put(encoded, table);
  put(encoded, maker);
  put(encoded, bytes);
  put(encoded, chunk_bytes);
  put_text(encoded, name);
  put_text(encoded, declaration);
  put(encoded, static_cast<uint32_t>(slots.size()));
  put_bytes(encoded, slots.data(), slots.size() * sizeof(uint32_t));
  return encoded;
}

TableEntry TableEntry::decode(Bytes from) {
  TableEntry entry;
  entry.table = take<uint32_t>(from);
  entry.maker = take<uint32_t>(from);
  entry.bytes = take<uint64_t>(from);
  entry.chunk_bytes = take<uint64_t>(from);
  entry.name = take_text(from);
  entry.declaration = take_text(from);
  const auto chunks = take<uint32_t>(from);
  if (from.size() != chunks * sizeof(uint32_t)) throw std::invalid_argument("it ends too early");
  for (uint32_t i = 0; i < chunks; ++i) entry.slots.push_back(take<uint32_t>(from));
  return entry;
}

uint64_t store_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char letter : name.substr(0, name.find('/')))
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return hash;
}

uint64_t chunk_bytes_for(uint64_t bytes, uint32_t slots) {
  constexpr uint64_t kLine = 64;  // so that no element is cut
  const uint64_t even = (bytes + slots - 1) / slots;
  const uint64_t chunk = std::max<uint64_t>(kChunkBytes, (even + kLine - 1) / kLine * kLine);
  return chunk <= kPartBytesMax ? chunk : 0;
}

uint64_t chunks_of(uint64_t bytes, uint64_t chunk_bytes) {
  return std::max<uint64_t>(1, (bytes + chunk_bytes - 1) / chunk_bytes);
}

std::vector<uint32_t> place(const std::map<std::string, TableEntry>& tables, uint64_t bytes,
                            uint64_t chunk_bytes, uint32_t slots, uint32_t shards) {
  std::vector<uint64_t> of_slot(slots), of_shard(shards);
  const auto load = [&](uint32_t slot, uint64_t more) {
    of_slot[slot] += more + 1;  // empty chunks are spread too
    of_shard[slot % shards] += more + 1;
  };
  const auto chunk = [&](uint64_t total, uint64_t size, uint64_t i) {
    return std::min(size, total - std::min(total, i * size));
  };
  for (const auto& [name, entry] : tables)
    for (uint64_t i = 0; i < entry.slots.size(); ++i)
      load(entry.slots[i], chunk(entry.bytes, entry.chunk_bytes, i));
  std::vector<bool> used(slots);
  std::vector<uint32_t> placed;
  // All chunks but the last are equally large: in their order, the largest come first.
  for (uint64_t i = 0; i < chunks_of(bytes, chunk_bytes); ++i) {
    uint32_t best = slots;
    for (uint32_t slot = 0; slot < slots; ++slot) {
      if (used[slot]) continue;
      const auto rank = [&](uint32_t s) { return std::tuple(of_slot[s], of_shard[s % shards], s); };
      if (best == slots || rank(slot) < rank(best)) best = slot;
    }
    used[best] = true;
    placed.push_back(best);
    load(best, chunk(bytes, chunk_bytes, i));
  }
  return placed;
}

}  // namespace commute
