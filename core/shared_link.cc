// SPDX-License-Identifier: Apache-2.0
#include "shared_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "copy.h"

namespace commute {
namespace {

// Copies between a ring and plain memory, around the ring's end.
void copy_in(std::byte* ring, size_t size, uint64_t at, const void* from, size_t count) {
  const size_t begin = at % size;
  const size_t first = std::min(count, size - begin);
  copy_bytes(ring + begin, from, first);
  copy_bytes(ring, static_cast<const std::byte*>(from) + first, count - first);
}

void copy_out(const std::byte* ring, size_t size, uint64_t at, void* into, size_t count) {
  const size_t begin = at % size;
  const size_t first = std::min(count, size - begin);
  copy_bytes(into, ring + begin, first);
  copy_bytes(static_cast<std::byte*>(into) + first, ring, count - first);
}

}  // namespace

size_t SharedLink::segment_bytes() {
  return 2 * sizeof(Ring);
}

SharedLink::SharedLink(std::shared_ptr<Segment> segment, bool first, int socket,
                       std::shared_ptr<Poller> poller, Doorbell peer)
    : segment_(std::move(segment)),
      outgoing_(reinterpret_cast<Ring*>(segment_->data()) + (first ? 0 : 1)),
      incoming_(reinterpret_cast<Ring*>(segment_->data()) + (first ? 1 : 0)),
      socket_(socket),
      poller_(std::move(poller)),
      peer_(std::move(peer)) {
  poller_->add(socket_, &ready_);
}

SharedLink::~SharedLink() {
  close({});
}

size_t SharedLink::write(const iovec* pieces, int count) {
  if (socket_ < 0) throw LinkClosed("this side closed the connection");
  if (outgoing_->closed.load(std::memory_order_seq_cst) != 0 || peer_gone())
    throw LinkClosed("the peer closed its connection");
  size_t moved = 0;
  for (int i = 0; i < count; ++i) {
    const auto* from = static_cast<const std::byte*>(pieces[i].iov_base);
    for (size_t left = pieces[i].iov_len; left > 0;) {
      const size_t put = write_piece(from, std::min(left, kPieceBytes));
      if (put == 0) return moved;
      from += put;
      left -= put;
      moved += put;
    }
  }
  return moved;
}

size_t SharedLink::write_piece(const std::byte* from, size_t bytes) {
  const uint64_t at = outgoing_->written.load(std::memory_order_relaxed);
  const uint64_t room = kRingBytes - (at - outgoing_->read.load(std::memory_order_seq_cst));
  const size_t moved = std::min<size_t>(bytes, room);
  if (moved == 0) return 0;
  copy_in(outgoing_->bytes, kRingBytes, at, from, moved);
  outgoing_->written.store(at + moved, std::memory_order_seq_cst);
  peer_.ring();
  return moved;
}

size_t SharedLink::read(void* into, size_t bytes) {
  if (socket_ < 0) throw LinkClosed("this side closed the connection");
  const bool ended = incoming_->closed.load(std::memory_order_seq_cst) != 0 || peer_gone();
  size_t moved = 0;
  while (moved < bytes) {
    const size_t got =
        read_piece(static_cast<std::byte*>(into) + moved, std::min(bytes - moved, kPieceBytes));
    if (got == 0) break;
    moved += got;
  }
  // Looked at before reading: what the peer wrote before it closed has been read now.
  if (moved == 0 && bytes > 0 && ended) throw LinkClosed("the peer closed its connection");
  return moved;
}

size_t SharedLink::read_piece(std::byte* into, size_t bytes) {
  const uint64_t at = incoming_->read.load(std::memory_order_relaxed);
  const uint64_t there = incoming_->written.load(std::memory_order_seq_cst) - at;
  const size_t moved = std::min<size_t>(bytes, there);
  if (moved == 0) return 0;
  copy_out(incoming_->bytes, kRingBytes, at, into, moved);
  incoming_->read.store(at + moved, std::memory_order_seq_cst);
  peer_.ring();
  return moved;
}

// The socket carries nothing after the segment was passed: if it is readable, it has ended.
bool SharedLink::peer_gone() {
  if (!ready_.readable.exchange(false)) return false;
  char byte;
  const ssize_t got = ::recv(socket_, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  ready_.readable = true;
  return true;
}

void SharedLink::close(std::chrono::steady_clock::time_point) {
  if (socket_ < 0) return;
  outgoing_->closed.store(1, std::memory_order_seq_cst);
  incoming_->closed.store(1, std::memory_order_seq_cst);
  peer_.ring();
  poller_->remove(socket_);
  ::close(socket_);
  socket_ = -1;
}

}  // namespace commute
