// SPDX-License-Identifier: Apache-2.0
// What a shard holds, for people who ask: numbers and names, no values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "store/shard.h"

namespace commute {

// The parts of one table on one shard, together.
struct TableStatus {
  uint64_t slots = 0;
  uint64_t bytes = 0;        // of the value; of rows all their memory
  uint64_t rows = 0;         // of a sparse table
  uint64_t state_bytes = 0;  // of the update
  uint64_t updates = 0;      // of the part that has most
  std::string dtype;
  std::string update;  // with its numbers as they are now
  int32_t staleness = 0;
  std::map<uint32_t, uint64_t> clocks;  // of members; the least of all parts
};

struct ClientStatus {
  int64_t worker = -1;
  uint64_t messages = 0;
  uint64_t bytes = 0;  // of payloads, from the client
};

struct ShardStatus {
  std::map<uint32_t, TableStatus> tables;  // by number
  std::vector<TableEntry> directory;       // of the first shard
  std::vector<ClientStatus> clients;       // one for each channel
  uint64_t pushes = 0;
};

// Without the clients, which are the server's.
ShardStatus status_of(const Shard& shard);

}  // namespace commute
