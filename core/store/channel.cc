// SPDX-License-Identifier: Apache-2.0
#include "store/channel.h"

#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "copy.h"
#include "tcp_link.h"

namespace commute {

std::unique_ptr<Channel> make_channel(int socket, int segment, bool is_client,
                                      const std::shared_ptr<Poller>& poller) {
  if (segment < 0)
    return std::make_unique<StreamChannel>(std::make_unique<TcpLink>(socket, poller));
  try {
    auto memory = std::make_shared<Segment>(
        Segment::map(segment, SharedChannel::segment_bytes(), Segment::Touch::kLater));
    return std::make_unique<SharedChannel>(std::move(memory), is_client, socket, poller);
  } catch (...) {
    ::close(socket);
    throw;
  }
}

bool is_sound(const StoreHeader& header) {
  return header.magic == StoreHeader{}.magic && header.bytes <= kPayloadMax;
}

// --- shared memory ---

size_t SharedChannel::segment_bytes() {
  return kHeadBytes + (kRequests + kReplies) * kSlotBytes;
}

SharedChannel::SharedChannel(std::shared_ptr<Segment> segment, bool is_client, int socket,
                             std::shared_ptr<Poller> poller)
    : segment_(std::move(segment)),
      is_client_(is_client),
      socket_(socket),
      poller_(std::move(poller)) {
  segment_->populate(0, kHeadBytes);
  for (uint64_t slot = 0; slot < kRequests + kReplies; ++slot)
    segment_->populate(kHeadBytes + slot * kSlotBytes, kPayloadAt + kTouchedBytes);
  auto* head = reinterpret_cast<Head*>(segment_->data());
  mine_ = is_client_ ? &head->client_sleeps : &head->shard_sleeps;
  theirs_ = is_client_ ? &head->shard_sleeps : &head->client_sleeps;
  poller_->add(socket_, &ready_);
}

SharedChannel::~SharedChannel() {
  poller_->remove(socket_);
  ::close(socket_);
}

SharedChannel::Slot& SharedChannel::request(uint64_t number) const {
  return *reinterpret_cast<Slot*>(segment_->data() + kHeadBytes + number % kRequests * kSlotBytes);
}

SharedChannel::Slot& SharedChannel::reply(uint64_t number) const {
  return *reinterpret_cast<Slot*>(segment_->data() + kHeadBytes +
                                  (kRequests + number % kReplies) * kSlotBytes);
}

// Writes the message into a slot in state `from`, and passes it on.
bool SharedChannel::put(Slot& slot, State from, State to, const StoreMessage& message) {
  if (slot.state.load(std::memory_order_acquire) != from) return false;
  slot.header = message.header;
  copy_bytes(reinterpret_cast<std::byte*>(&slot) + kPayloadAt, message.payload.data(),
             message.payload.size());
  pass(slot, to);
  return true;
}

void SharedChannel::pass(Slot& slot, State to) {
  slot.state.store(to, std::memory_order_seq_cst);
  if (theirs_->load(std::memory_order_seq_cst) == 0) return;
  if (theirs_->exchange(0, std::memory_order_seq_cst) == 0) return;
  runs_on(::sched_getcpu());  // whoever is woken is often woken on this very core
  const char ring = 0;
  [[maybe_unused]] const auto sent = ::send(socket_, &ring, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool SharedChannel::send(const StoreMessage& message) {
  if (closed_) throw LinkClosed("the other end has gone");
  Slot& slot = is_client_ ? request(asked_) : reply(replied_);
  if (!put(slot, kFree, is_client_ ? kAsked : kAnswered, message)) {
    look_at_socket();
    return false;
  }
  // The oldest request has let go of its slot, which is in use again: what came back later is next.
  if (is_client_ && asked_ - returned_ == kRequests) ++returned_;
  ++(is_client_ ? asked_ : replied_);
  return true;
}

const StoreMessage* SharedChannel::receive() {
  if (!is_client_) {
    Slot& slot = request(asked_);
    if (slot.state.load(std::memory_order_acquire) == kAsked) return view(slot);
    look_at_socket();
    return nullptr;
  }
  // Whatever was answered in a request's slot before a reply can be seen once the reply is, so the
  // reply is looked for first.
  Slot& slot = reply(replied_);
  const bool replied = slot.state.load(std::memory_order_acquire) == kAnswered;
  while (returned_ < asked_) {
    Slot& returned = request(returned_);
    const uint32_t state = returned.state.load(std::memory_order_acquire);
    if (state == kAnswered) return view(returned);
    if (state == kAsked) break;
    ++returned_;
  }
  if (replied) return view(slot);
  look_at_socket();
  return nullptr;
}

const StoreMessage* SharedChannel::view(const Slot& slot) {
  current_ = const_cast<Slot*>(&slot);
  message_.header = slot.header;  // a copy: the other end can still write
  if (!is_sound(message_.header)) throw LinkClosed("the other end sent garbage");
  message_.payload = {reinterpret_cast<const std::byte*>(&slot) + kPayloadAt,
                      message_.header.bytes};
  return &message_;
}

void SharedChannel::take() {
  if (is_client_ && returned_ < asked_ && current_ == &request(returned_)) {
    ++returned_;
    current_->state.store(kFree, std::memory_order_release);  // nobody else waits for it
    return;
  }
  ++(is_client_ ? replied_ : asked_);
  pass(*current_, kFree);
}

bool SharedChannel::answer(const StoreMessage& message) {
  // The client looks at its requests first, so this one must not pass replies that it has not read.
  if (replied_ > 0 && reply(replied_ - 1).state.load(std::memory_order_acquire) != kFree)
    return Channel::answer(message);
  ++asked_;
  return put(*current_, kAsked, kAnswered, message);
}

void SharedChannel::about_to_sleep() {
  mine_->store(1, std::memory_order_seq_cst);
}

void SharedChannel::awake() {
  mine_->store(0, std::memory_order_relaxed);
}

void SharedChannel::runs_on(int core) {
  auto* head = reinterpret_cast<Head*>(segment_->data());
  auto& said = is_client_ ? head->client_core : head->shard_core;
  if (said.load(std::memory_order_relaxed) != core + 1)
    said.store(core + 1, std::memory_order_relaxed);
}

int SharedChannel::other_core() const {
  auto* head = reinterpret_cast<Head*>(segment_->data());
  return (is_client_ ? head->shard_core : head->client_core).load(std::memory_order_relaxed) - 1;
}

// What the other end wrote before it went is read first: this is called when nothing is there.
void SharedChannel::look_at_socket() {
  if (closed_) throw LinkClosed("the other end has gone");
  if (!ready_.readable.load(std::memory_order_relaxed)) return;
  ready_.readable = false;
  char rings[64];
  for (;;) {
    const ssize_t got = ::recv(socket_, rings, sizeof rings, MSG_DONTWAIT);
    if (got > 0) continue;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    closed_ = true;  // what came in between is found by the next look
    return;
  }
}

// --- TCP ---

bool StreamChannel::send(const StoreMessage& message) {
  if (!unsent_.empty() && !flush()) return false;
  if (!unsent_.empty()) return false;
  const iovec pieces[] = {{const_cast<StoreHeader*>(&message.header), sizeof message.header},
                          {const_cast<std::byte*>(message.payload.data()), message.payload.size()}};
  const size_t moved = link_->write(pieces, message.payload.empty() ? 1 : 2);
  if (moved == 0) return false;
  const size_t all = sizeof message.header + message.payload.size();
  if (moved == all) return true;
  unsent_.resize(all);
  std::memcpy(unsent_.data(), &message.header, sizeof message.header);
  if (!message.payload.empty())
    std::memcpy(unsent_.data() + sizeof message.header, message.payload.data(),
                message.payload.size());
  unsent_from_ = moved;
  return true;
}

bool StreamChannel::flush() {
  if (unsent_.empty()) return false;
  const iovec rest{unsent_.data() + unsent_from_, unsent_.size() - unsent_from_};
  const size_t moved = link_->write(&rest, 1);
  unsent_from_ += moved;
  if (unsent_from_ == unsent_.size()) unsent_.clear();
  return moved > 0;
}

const StoreMessage* StreamChannel::receive() {
  constexpr size_t kHeader = sizeof(StoreHeader);
  for (;;) {
    size_t end = kHeader;
    if (have_ >= kHeader) {
      std::memcpy(&message_.header, incoming_.data(), kHeader);
      if (!is_sound(message_.header)) throw LinkClosed("the other end sent garbage");
      end += message_.header.bytes;
      if (have_ >= end) {
        message_.payload = {incoming_.data() + kHeader, message_.header.bytes};
        return &message_;
      }
    }
    if (incoming_.size() < end + kAhead) incoming_.resize(end + kAhead);
    const size_t moved = link_->read(incoming_.data() + have_, end + kAhead - have_);
    if (moved == 0) return nullptr;
    have_ += moved;
  }
}

void StreamChannel::take() {
  const size_t end = sizeof(StoreHeader) + message_.header.bytes;
  have_ -= end;
  if (have_ > 0) std::memmove(incoming_.data(), incoming_.data() + end, have_);
}

}  // namespace commute
