// SPDX-License-Identifier: Apache-2.0
#include "shared_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace commute {
namespace {

// Copies between a ring and plain memory, around the ring's end.
void copy_in(std::byte* ring, size_t size, uint64_t at, const void* from, size_t count) {
  const size_t begin = at % size;
  const size_t first = std::min(count, size - begin);
  std::memcpy(ring + begin, from, first);
  std::memcpy(ring, static_cast<const std::byte*>(from) + first, count - first);
}

void copy_out(const std::byte* ring, size_t size, uint64_t at, void* into, size_t count) {
  const size_t begin = at % size;
  const size_t first = std::min(count, size - begin);
  std::memcpy(into, ring + begin, first);
  std::memcpy(static_cast<std::byte*>(into) + first, ring, count - first);
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
  if (outgoing_->closed.load(std::memory_order_acquire) != 0 || peer_gone())
    throw LinkClosed("the peer closed its connection");
  const uint64_t begin = outgoing_->written.load(std::memory_order_relaxed);
  const uint64_t room = kRingBytes - (begin - outgoing_->read.load(std::memory_order_seq_cst));
  uint64_t at = begin;
  for (int i = 0; i < count && at - begin < room; ++i) {
    const size_t moved = std::min<size_t>(pieces[i].iov_len, room - (at - begin));
    copy_in(outgoing_->bytes, kRingBytes, at, pieces[i].iov_base, moved);
    at += moved;
  }
  if (at == begin) return 0;
  outgoing_->written.store(at, std::memory_order_seq_cst);
  peer_.ring();
  return at - begin;
}

size_t SharedLink::read(void* into, size_t bytes) {
  if (socket_ < 0) throw LinkClosed("this side closed the connection");
  if (bytes == 0) return 0;
  const uint64_t at = incoming_->read.load(std::memory_order_relaxed);
  const bool ended = incoming_->closed.load(std::memory_order_acquire) != 0 || peer_gone();
  // After `ended`: what the peer wrote before it closed is seen now.
  const uint64_t there = incoming_->written.load(std::memory_order_seq_cst) - at;
  if (there == 0 && ended) throw LinkClosed("the peer closed its connection");
  const size_t moved = std::min<size_t>(bytes, there);
  if (moved == 0) return 0;
  copy_out(incoming_->bytes, kRingBytes, at, into, moved);
  incoming_->read.store(at + moved, std::memory_order_seq_cst);
  peer_.ring();
  return moved;
}

// The socket carries nothing after the segment was passed: if it is readable, it has ended.
bool SharedLink::peer_gone() {
  if (!ready_.readable) return false;
  char byte;
  const ssize_t got = ::recv(socket_, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    ready_.readable = false;
    return false;
  }
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
