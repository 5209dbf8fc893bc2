// SPDX-License-Identifier: Apache-2.0
// A link between two processes of one host: two byte rings in shared memory, one per direction.
//
//   segment = ring (first to second) ring (second to first)
//   ring    = written:u64 | read:u64 | flags | bytes        each counter on a cache line of its own
//
// `written` and `read` count from the beginning and only grow; their difference is what is inside.
// The writer publishes bytes by storing `written`, the reader frees room by storing `read`; then
// each rings the other's doorbell. The Unix socket over which the segment was passed stays open:
// its end tells that the peer has gone, also when it was killed and could not say so.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "doorbell.h"
#include "link.h"
#include "poller.h"
#include "segment.h"

namespace commute {

class SharedLink final : public Link {
 public:
  static constexpr size_t kRingBytes = 256 << 10;
  // Published, and freed, in such pieces, so that both ends of a large message work at once.
  static constexpr size_t kPieceBytes = 64 << 10;
  static size_t segment_bytes();

  // `first`: whether this side made the segment. Takes ownership of `socket`, registers it with
  // `poller`.
  SharedLink(std::shared_ptr<Segment> segment, bool first, int socket,
             std::shared_ptr<Poller> poller, Doorbell peer);
  ~SharedLink() override;

  size_t write(const iovec* pieces, int count) override;
  size_t read(void* into, size_t bytes) override;
  void close(std::chrono::steady_clock::time_point linger_until) override;

 private:
  struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> closed;  // by either end
    alignas(64) std::byte bytes[kRingBytes];
  };

  size_t write_piece(const std::byte* from, size_t bytes);
  size_t read_piece(std::byte* into, size_t bytes);
  bool peer_gone();

  std::shared_ptr<Segment> segment_;
  Ring* outgoing_;
  Ring* incoming_;
  int socket_;
  std::shared_ptr<Poller> poller_;
  Readiness ready_;
  Doorbell peer_;
};

}  // namespace commute
