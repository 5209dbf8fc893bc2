// SPDX-License-Identifier: Apache-2.0
// Channels in shared memory keep their order: answers that go back in the slot of their request,
// and those that come by a slot of their own, are received as they were sent.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include "check.h"
#include "store/channel.h"

using namespace commute;

namespace {

constexpr uint64_t kRequests = 10'000;

struct Ends {
  Ends() {
    int sockets[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
    for (int i = 0; i < 2; ++i)
      ends[i] = make_channel(sockets[i], ::fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0), i == 0, poller);
  }

  Segment memory = Segment::create(SharedChannel::segment_bytes());
  std::shared_ptr<Poller> poller = std::make_shared<Poller>();
  std::unique_ptr<Channel> ends[2];
};

void send(Channel& channel, uint64_t number) {
  StoreMessage message;
  message.header.number = number;
  while (!channel.send(message)) std::this_thread::yield();
}

StoreMessage numbered(uint64_t number) {
  StoreMessage message;
  message.header.number = number;
  return message;
}

uint64_t received(Channel& channel) {
  const StoreMessage* message = channel.receive();
  if (message == nullptr) return 0;
  const uint64_t number = message->header.number;
  channel.take();
  return number;
}

TEST(an_answer_in_its_slot_does_not_pass_a_reply) {
  Ends made;
  Channel &client = *made.ends[0], &shard = *made.ends[1];
  CHECK(client.send({}) && shard.send(numbered(1)));
  CHECK(shard.receive() != nullptr && shard.answer(numbered(2)));
  CHECK_EQ(received(client), uint64_t{1});
  CHECK_EQ(received(client), uint64_t{2});
  CHECK(client.send({}) && shard.receive() != nullptr && shard.answer(numbered(3)));
  CHECK_EQ(received(client), uint64_t{3});
}

TEST(a_slot_that_is_used_again_hides_no_answer) {
  Ends made;
  Channel &client = *made.ends[0], &shard = *made.ends[1];
  int asked = 0;
  while (client.send({})) ++asked;
  CHECK(shard.receive() != nullptr);
  shard.take();  // its answer comes later
  CHECK(shard.receive() != nullptr && shard.answer(numbered(1)));
  CHECK(client.send({}));  // in the first one's slot
  CHECK_EQ(received(client), uint64_t{1});
  for (int i = 1; i < asked; ++i) CHECK(shard.receive() && shard.answer(numbered(uint64_t(i) + 1)));
  for (int i = 1; i < asked; ++i) CHECK_EQ(received(client), uint64_t(i) + 1);
}

// Two answers to each request: one at once, one after it. The two must not change places, nor pass
// those of other requests.
void serve(Channel& channel) {
  uint64_t number = 0;
  for (uint64_t i = 0; i < kRequests;) {
    if (channel.receive() == nullptr) {
      std::this_thread::yield();
      continue;
    }
    ++i;
    StoreMessage answer;
    answer.header.number = ++number;
    if (!channel.answer(answer)) send(channel, number);
    send(channel, ++number);
  }
}

void ask(Channel& channel) {
  uint64_t asked = 0, last = 0, misplaced = 0;
  while (last < 2 * kRequests) {
    StoreMessage request;
    if (asked < kRequests && channel.send(request)) ++asked;
    while (const StoreMessage* answer = channel.receive()) {
      misplaced += answer->header.number != last + 1;
      last = std::max(last, answer->header.number);
      channel.take();
    }
    std::this_thread::yield();
  }
  CHECK_EQ(misplaced, uint64_t{0});
}

TEST(answers_keep_their_order_in_shared_memory) {
  Ends made;
  std::thread shard([&] { serve(*made.ends[1]); });
  ask(*made.ends[0]);
  shard.join();
}

}  // namespace
