// SPDX-License-Identifier: Apache-2.0
// Where a rank sleeps: epoll over its TCP links, and an eventfd by which threads and memory links
// wake it.
//
// The protocol by which no wake-up is lost is told in doorbell.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "doorbell.h"

namespace commute {

// What epoll found about one TCP link; kept by the link, written by the poller. A link takes a flag
// down before it tries, and puts it up again if that went well: what epoll finds meanwhile, perhaps
// on another thread, is not lost.
struct Readiness {
  std::atomic<bool> readable = true;  // optimistic: the first try finds out
  std::atomic<bool> writable = true;
};

class Poller {
 public:
  Poller();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // `readiness` must live until `remove`. Edge-triggered: flags are set here and cleared by the
  // link when the kernel says "would block".
  void add(int fd, Readiness* readiness);
  void remove(int fd);

  void about_to_sleep() { sleeping_->exchange(1, std::memory_order_seq_cst); }
  // Sleeps until something is ready, `wake`, a signal, or `timeout_ms`; 0 only looks. Returns true
  // when something was ready.
  bool sleep(int timeout_ms);

  // Any thread. Cheap when nobody sleeps.
  void wake();

  // Lets other processes ring: from now on the flag is the one in shared memory, which `keeper`
  // keeps alive. Before anybody sleeps here.
  void use_flag(std::atomic<uint32_t>* flag, std::shared_ptr<void> keeper) {
    sleeping_ = flag;
    keeper_ = std::move(keeper);
  }
  int event_fd() const { return event_fd_; }
  std::atomic<uint32_t>* flag() const { return sleeping_; }

 private:
  int epoll_fd_;
  int event_fd_;
  std::atomic<uint32_t> private_flag_{0};
  std::atomic<uint32_t>* sleeping_ = &private_flag_;
  std::shared_ptr<void> keeper_;
};

// The doorbell of whoever sleeps in this poller, for the threads of its own process.
inline Doorbell doorbell_of(const std::shared_ptr<Poller>& poller) {
  return {poller->flag(), poller->event_fd(), poller};
}

}  // namespace commute
