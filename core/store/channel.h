// SPDX-License-Identifier: Apache-2.0
// A channel: whole messages between a client and a shard, in order, both ways, without blocking.
//
// Between processes of one host it lies in shared memory, made by the client:
//
//   segment = head | request slots | reply slots        slot = state | header | payload
//
//   request slot   free --client--> asked --shard--> answered --client--> free
//                                     \--shard------------------------->/
//   reply slot     free --shard--> answered --client--> free
//
// The shard takes requests in their order, in place. An answer that is ready at once overwrites its
// request and goes back in the same slot; one that must wait for others lets the slot go, and comes
// by a reply slot, as does every answer while the client has not read all replies: so answers are
// received in the order in which they were sent. A side that is about to sleep sets its flag in the
// head, and the other then rings by a byte on the Unix socket over which the segment was passed.
// The end of that socket is the end of the channel.
//
// Otherwise it is a TCP connection that carries header and payload, one message after the other.
//
// One thread at a time uses an end.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "link.h"
#include "poller.h"
#include "segment.h"
#include "store/message.h"

namespace commute {

class Channel {
 public:
  Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  virtual ~Channel() = default;

  // Takes the whole message; false when there is no room now. Raises LinkClosed.
  virtual bool send(const StoreMessage& message) = 0;
  // The next message that has come, or nothing; valid until `take` or `answer`. Raises LinkClosed,
  // also for bytes that no correct peer sends.
  virtual const StoreMessage* receive() = 0;
  virtual void take() = 0;
  // Instead of `take`, with the answer to the message.
  virtual bool answer(const StoreMessage& message) {
    take();
    return send(message);
  }
  // Moves what `send` took and could not pass on yet; true when something moved.
  virtual bool flush() { return false; }
  virtual bool needs_system_calls() const { return false; }
  // The other end rings from now on / need not ring any more.
  virtual void about_to_sleep() {}
  virtual void awake() {}
  // On one host: where this end runs, and where the other was last seen; -1 for unknown.
  virtual void runs_on(int) {}
  virtual int other_core() const { return -1; }
};

class SharedChannel final : public Channel {
 public:
  static size_t segment_bytes();

  // Takes ownership of `socket`, registers it with `poller`.
  SharedChannel(std::shared_ptr<Segment> segment, bool is_client, int socket,
                std::shared_ptr<Poller> poller);
  ~SharedChannel() override;

  bool send(const StoreMessage& message) override;
  const StoreMessage* receive() override;
  void take() override;
  bool answer(const StoreMessage& message) override;
  void about_to_sleep() override;
  void awake() override;
  void runs_on(int core) override;
  int other_core() const override;

 private:
  // Two pulls and a push of some 16,000 narrow rows: what workers that learn have under way.
  static constexpr uint64_t kRequests = 12;
  static constexpr uint64_t kReplies = 8;
  static constexpr size_t kHeadBytes = 4096;
  // Payloads begin on a page: they are copied page by page.
  static constexpr size_t kPayloadAt = 4096;
  static constexpr size_t kSlotBytes = kPayloadAt + kPayloadMax;
  // Of each payload, touched ahead: most messages are no longer. All of it would be 16 MB, which
  // took each end 8 ms.
  static constexpr size_t kTouchedBytes = 128 << 10;
  static_assert(kTouchedBytes <= kPayloadMax);

  enum State : uint32_t { kFree = 0, kAsked = 1, kAnswered = 2 };
  struct Slot {
    std::atomic<uint32_t> state;
    alignas(64) StoreHeader header;
  };
  struct Head {
    alignas(64) std::atomic<uint32_t> client_sleeps;
    std::atomic<int32_t> client_core;  // plus one; 0: not said
    alignas(64) std::atomic<uint32_t> shard_sleeps;
    std::atomic<int32_t> shard_core;
  };

  Slot& request(uint64_t number) const;
  Slot& reply(uint64_t number) const;
  bool put(Slot& slot, State from, State to, const StoreMessage& message);
  const StoreMessage* view(const Slot& slot);
  void pass(Slot& slot, State to);
  void look_at_socket();

  std::shared_ptr<Segment> segment_;
  const bool is_client_;
  int socket_;
  std::shared_ptr<Poller> poller_;
  Readiness ready_;
  std::atomic<uint32_t>* mine_;  // flags
  std::atomic<uint32_t>* theirs_;
  uint64_t asked_ = 0;     // requests sent, or taken
  uint64_t returned_ = 0;  // client: request slots that have come back
  uint64_t replied_ = 0;   // by reply slots
  Slot* current_ = nullptr;
  bool closed_ = false;
  StoreMessage message_;
};

class StreamChannel final : public Channel {
 public:
  explicit StreamChannel(std::unique_ptr<Link> link) : link_(std::move(link)) {}

  bool send(const StoreMessage& message) override;
  const StoreMessage* receive() override;
  void take() override;
  bool flush() override;
  bool needs_system_calls() const override { return true; }

 private:
  std::unique_ptr<Link> link_;
  std::vector<std::byte> unsent_;
  size_t unsent_from_ = 0;
  // A read asks for so much more than it needs: small messages come with one call, and the little
  // that is moved to the front afterwards costs less than a call.
  static constexpr size_t kAhead = 16 << 10;
  std::vector<std::byte> incoming_;
  size_t have_ = 0;  // bytes of the message being received, and of what follows it
  StoreMessage message_;
};

// Takes ownership of `socket` and, unless it is -1, of the descriptor `segment`.
std::unique_ptr<Channel> make_channel(int socket, int segment, bool is_client,
                                      const std::shared_ptr<Poller>& poller);

// Whether a header can be the beginning of a message.
bool is_sound(const StoreHeader& header);

}  // namespace commute
