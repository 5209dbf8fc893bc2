// SPDX-License-Identifier: Apache-2.0
#include "outbox.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>

#include "copy.h"

namespace commute {
namespace {

// Where ranks are threads, or containers number their processes alike, a pid is not enough.
uint64_t this_process() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

}  // namespace

Outboxes::Outboxes(int rank, int ranks, size_t slot_bytes, size_t room_bytes)
    : rank_(rank),
      ranks_(ranks),
      slot_bytes_((slot_bytes + kPageBytes - 1) / kPageBytes * kPageBytes),
      segments_(size_t(ranks)),
      event_fds_(size_t(ranks), -1) {
  auto segment = std::make_shared<Segment>(Segment::create(room_at(), room_bytes));
  Head& mine = *new (segment->data()) Head{};
  mine.rank = static_cast<uint32_t>(rank);
  mine.ranks = static_cast<uint32_t>(ranks);
  mine.slot_bytes = slot_bytes_;
  mine.pid = ::getpid();
  mine.process = this_process();
  mine.at = reinterpret_cast<uintptr_t>(&mine);
  mine.magic = kMagic;
  arena_ = std::make_shared<Arena>(segment, room_at());
  segments_[size_t(rank)] = std::move(segment);
}

Outboxes::~Outboxes() {
  for (const int fd : event_fds_)
    if (fd >= 0) ::close(fd);
}

void Outboxes::attach(int peer, std::shared_ptr<Segment> segment, int event_fd) {
  const Head& theirs = *reinterpret_cast<const Head*>(segment->data());
  if (segment->bytes() < room_at() || theirs.magic != kMagic ||
      theirs.rank != static_cast<uint32_t>(peer) || theirs.ranks != static_cast<uint32_t>(ranks_) ||
      theirs.slot_bytes != slot_bytes_) {
    ::close(event_fd);
    throw std::runtime_error("rank " + std::to_string(peer) +
                             " passed memory that is not its outbox");
  }
  event_fds_[size_t(peer)] = event_fd;
  segments_[size_t(peer)] = std::move(segment);
}

std::byte* Outboxes::array(int rank, size_t at, size_t bytes) const {
  const Segment& segment = *segments_[size_t(rank)];
  if (at < room_at() || at > segment.bytes() || bytes > segment.bytes() - at)
    throw std::runtime_error("rank " + std::to_string(rank) +
                             " named memory that is not in its room");
  segment.populate(at, bytes);
  return segment.data() + at;
}

const std::byte* Outboxes::in_room_of(int peer, uintptr_t from, size_t bytes) const {
  const Segment& segment = *segments_[size_t(peer)];
  const uintptr_t at = from - head(peer).at;  // a head is where its segment begins
  if (at < room_at() || at > segment.bytes() || bytes > segment.bytes() - at) return nullptr;
  return segment.data() + at;
}

// Where processes are numbered differently another one may have the number: then what is read is
// something else.
bool Outboxes::can_fetch() const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_ || !attached(peer)) continue;
    const Head& theirs = head(peer);
    uint64_t seen[2] = {};
    try {
      fetch(peer, theirs.at + offsetof(Head, magic), reinterpret_cast<std::byte*>(&seen[0]), 8);
      fetch(peer, theirs.at + offsetof(Head, at), reinterpret_cast<std::byte*>(&seen[1]), 8);
    } catch (const std::system_error&) {
      return false;
    }
    if (seen[0] != kMagic || seen[1] != theirs.at) return false;
  }
  return true;
}

// The number of the process is read last, in the same system call: where that process has ended,
// or has become another program, its pid may stand for something else.
void Outboxes::fetch(int peer, uintptr_t from, std::byte* to, size_t bytes) const {
  if (bytes == 0) return;
  const Head& theirs = head(peer);
  const auto pid = static_cast<pid_t>(theirs.pid);
  if (pid == ::getpid() && theirs.process == this_process()) {  // a thread of this process
    copy_bytes(to, reinterpret_cast<const void*>(from), bytes);
    return;
  }
  const uintptr_t number_at = theirs.at + offsetof(Head, process);
  uint64_t number = ~theirs.process;
  while (bytes > 0) {
    const iovec local[] = {{to, bytes}, {&number, sizeof number}};
    const iovec remote[] = {{reinterpret_cast<void*>(from), bytes},
                            {reinterpret_cast<void*>(number_at), sizeof number}};
    const ssize_t got = ::process_vm_readv(pid, local, 2, remote, 2, 0);
    if (got <= 0) throw std::system_error(got < 0 ? errno : EFAULT, std::generic_category());
    const size_t some = std::min(bytes, size_t(got));
    to += some;
    from += some;
    bytes -= some;
  }
  if (number != theirs.process) throw std::system_error(ESRCH, std::generic_category());
}

Doorbell Outboxes::doorbell(int peer) {
  return {&head(peer).sleeping, event_fds_[size_t(peer)], segments_[size_t(peer)]};
}

void Outboxes::signal(uint32_t signal) {
  head(rank_).signals[signal].count.fetch_add(1, std::memory_order_seq_cst);
  ring_others();
}

void Outboxes::ring_others() {
  for (int peer = 0; peer < ranks_; ++peer) ring(peer);
}

void Outboxes::publish(uint64_t use, uint64_t operation, uint64_t history, const Call& call,
                       bool loudly) {
  Line& mine = line(rank_, use);
  uint64_t words[3];
  call.pack(words);
  // Nobody waits for this line now, but somebody may look at it to explain a mismatch.
  mine.operation.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < 3; ++i) mine.words[i].store(words[i], std::memory_order_release);
  mine.history.store(history, std::memory_order_release);
  if (!loudly) {
    mine.operation.store(operation, std::memory_order_release);
    return;
  }
  mine.operation.store(operation, std::memory_order_seq_cst);
  ring_others();
}

bool Outboxes::called(int rank, uint64_t use, uint64_t operation, Call& call) const {
  const Line& theirs = line(rank, use);
  if (theirs.operation.load(std::memory_order_acquire) != operation) return false;
  uint64_t words[3];
  for (size_t i = 0; i < 3; ++i) words[i] = theirs.words[i].load(std::memory_order_acquire);
  call = Call::unpack(words);
  // Unchanged while it was read?
  return theirs.operation.load(std::memory_order_relaxed) == operation;
}

uint64_t Outboxes::last_published(int rank) const {
  return std::max(line(rank, 0).operation.load(std::memory_order_acquire),
                  line(rank, 1).operation.load(std::memory_order_acquire));
}

}  // namespace commute
