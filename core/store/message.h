// SPDX-License-Identifier: Apache-2.0
// Messages between a store's clients and its shards.
//
//   message = header payload            header = 72 bytes, little endian, as `StoreHeader` below
//
//   client to shard                      shard to client
//   declare   a part of a table: spec    declared   the part is there: clock of this worker in it
//   push      a contribution, or a       committed  the push is held
//             piece of one
//   tick      empty contributions up     value      what a pull or a push asked for
//             to a clock
//   pull      the value, please          refused    and why, as text
//   set       new numbers of the update
//   leave     no contribution after this clock
//
// A message is about one part, which is one table in one slot: that is the atomic unit. Pushes,
// ticks and sets of a worker are numbered through over the whole store; the pieces of one push on
// several parts carry one number. Answers are told apart by the call, which is the client's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace commute {

enum class StoreKind : uint8_t {
  kDeclare = 1,
  kPush = 2,
  kTick = 3,
  kPull = 4,
  kSet = 5,
  kLeave = 6,
  kDeclared = 16,
  kCommitted = 17,
  kValue = 18,
  kRefused = 19,
};

constexpr uint8_t kStorePiece = 1;  // push: a piece of the contribution being built
constexpr uint8_t kStoreWants = 2;  // push: answer with the value, as to a pull after it

struct StoreHeader {
  uint32_t magic = 0x73746d63;  // "cmts"
  StoreKind kind = StoreKind::kPush;
  uint8_t flags = 0;
  uint16_t reserved = 0;
  uint32_t table = 0;
  uint32_t slot = 0;
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  uint64_t number = 0;   // of the push, tick or set in its store
  uint64_t clock = 0;    // of the worker on this table, with this contribution
  uint64_t slowest = 0;  // to clients: the slowest member's clock in this part
  uint64_t version = 0;  // value: how many rounds, or contributions, it holds
  uint64_t bytes = 0;    // of the payload
  uint64_t call = 0;     // of the client; answers carry it back
};
static_assert(sizeof(StoreHeader) == 72, "the header is 72 bytes on the wire");

using Bytes = std::span<const std::byte>;

}  // namespace commute
