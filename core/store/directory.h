// SPDX-License-Identifier: Apache-2.0
// Which tables a store has, and in which slots their chunks lie.
//
// The first shard keeps it, as part of slot 0, so it changes by ops like everything else. A dense
// table is cut into chunks of one size, each of which gets a slot of its own, once: the least
// loaded one, and of equals one of the least loaded shard. Slot i lies on shard i modulo the number
// of shards.
//
// Tables are known by "store/table". What all workers must agree on is compared as a sentence,
// which is also what the error shows.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "store/message.h"

namespace commute {

// Chunks begin here; a table with more than kChunkBytes for every slot has larger ones.
constexpr size_t kChunkBytes = 64 << 10;
constexpr uint32_t kSlots = 1024;

struct TableEntry {
  uint32_t table = 0;
  uint32_t maker = 0;        // the worker whose declaration came first
  uint64_t bytes = 0;        // of the whole table
  uint64_t chunk_bytes = 0;  // of every chunk but the last
  std::string name;
  std::string declaration;      // as a sentence
  std::vector<uint32_t> slots;  // by chunk

  std::vector<std::byte> encode() const;
  // Raises std::invalid_argument.
  static TableEntry decode(Bytes bytes);
};

// The number of a store, from the name of one of its tables ("store/table") or its own.
uint64_t store_of(const std::string& name);

// How a table of so many bytes is cut; 0 when it has too many for this number of slots.
uint64_t chunk_bytes_for(uint64_t bytes, uint32_t slots);
uint64_t chunks_of(uint64_t bytes, uint64_t chunk_bytes);

// Slots for the chunks of one more table, beside those that are there.
std::vector<uint32_t> place(const std::map<std::string, TableEntry>& tables, uint64_t bytes,
                            uint64_t chunk_bytes, uint32_t slots, uint32_t shards);

}  // namespace commute
