// SPDX-License-Identifier: Apache-2.0
// Messages between a store's clients and its shards.
//
//   message = header payload            header = 72 bytes, little endian, as `StoreHeader` below;
//                                       payload at most kPayloadMax bytes
//
//   client to shard                      shard to client
//   table     a table's declaration      placed     its number, who makes it, the slots of its
//                                                   chunks
//   declare   a part of a table: spec,   declared   the part is there: this worker's clock in it
//             from its maker also the
//             first value
//   push      a contribution, or a       committed  it is held
//             piece of one               value      what a pull or a push asked for
//   tick      empty contributions up     later      not now: others are too far behind. It was not
//             to a clock                            taken, and holds nothing here
//   pull      the value, please          go         what was put off may be sent again
//   set       new numbers of the update  refused    and why, as text; `code` for programs
//   drop      these rows                 unknown    keys that were named by their digest: send them
//   reset     begin anew at a clock: no
//             rows, and no round open
//   load      a part's array, or rows
//             with their state, as saved
//   reserve   room for so many rows
//   leave     no contribution to the store any more
//   who       holds up the round         behind     every member's clock
//
// All but `table` and `leave` are about one part: of a dense table what lies in one slot, of a
// sparse one its rows on one shard. The messages of a worker about it are taken in the order of its
// calls; the atomic unit is a push in a slot. What
// changes something is numbered. An answer carries back the `call` of its question, which is the
// client's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace commute {

enum class StoreKind : uint8_t {
  kTable = 0,
  kDeclare = 1,
  kPush = 2,
  kTick = 3,
  kPull = 4,
  kSet = 5,
  kLeave = 6,
  kWho = 7,
  kDrop = 8,
  kReset = 9,
  kLoad = 10,
  kReserve = 11,
  kPlaced = 16,
  kDeclared = 17,
  kCommitted = 18,
  kValue = 19,
  kRefused = 20,
  kLater = 21,
  kGo = 22,
  kBehind = 23,
  kUnknown = 24,
};

// Flags.
constexpr uint8_t kStorePiece = 1;    // push: a piece of the contribution being built
constexpr uint8_t kStoreWants = 2;    // push: answer with the value, as to a pull after it
constexpr uint8_t kStoreMaker = 4;    // declare: the first value is in the payload
constexpr uint8_t kStoreSummary = 8;  // pull: sum, squares and so on instead of the value
constexpr uint64_t kStoreSizes = 1;   // as its version: of rows only how many, and their bytes
constexpr uint8_t kStoreTop = 16;     // pull: the `version` elements of largest magnitude
constexpr uint8_t kStoreItems = 32;   // pull: what is saved: rows with their state from the hash
                                      // `version` on, or the dense part's array number `version`
constexpr uint8_t kStoreAsks = kStoreSummary | kStoreTop | kStoreItems;
constexpr uint8_t kStoreFollowed = 64;    // push: other rows of this contribution follow
constexpr uint8_t kStoreOneOfMany = 128;  // the sender has others under way, or about to be

// Why something was refused.
enum class Refused : uint16_t {
  kProtocol = 1,  // no correct client sends this
  kMismatch = 2,  // declared differently elsewhere
  kInvalid = 3,   // a declaration that cannot be
  kLost = 4,      // a member was lost; `version` says which
  kReplaced = 5,  // a newer incarnation of this worker has come
};

struct StoreHeader {
  uint32_t magic = 0x73746d63;  // "cmts"
  StoreKind kind = StoreKind::kPush;
  uint8_t flags = 0;
  Refused code{};
  uint32_t table = 0;
  uint32_t slot = 0;
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  uint64_t number = 0;   // of what changes something; declare and leave: of the store
  uint64_t clock = 0;    // of the worker on this table, with this contribution
  uint64_t slowest = 0;  // to clients: the slowest member's clock in this part
                         // to shards: the number of what this comes after in this part
  uint64_t version = 0;  // value: how many rounds, or contributions, it holds
                         // load: how many rows the slot of the first key will have
                         // reserve: how many the whole table
  uint64_t bytes = 0;    // of the payload
  uint64_t call = 0;     // of the client; answers carry it back
};
static_assert(sizeof(StoreHeader) == 72, "the header is 72 bytes on the wire");

constexpr uint32_t kEverySlot = ~uint32_t{0};  // of the shard: the part of a sparse table
constexpr size_t kPartBytesMax = 1 << 20;
constexpr size_t kPayloadMax = kPartBytesMax + 4096;

using Bytes = std::span<const std::byte>;

// A message on its way out; the payload is valid until the machine it came from is used again.
struct StoreMessage {
  StoreHeader header;
  Bytes payload;
};

}  // namespace commute
