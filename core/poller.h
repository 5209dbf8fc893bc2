// SPDX-License-Identifier: Apache-2.0
// Where a rank sleeps: epoll over its TCP links, and an eventfd by which threads and memory links
// wake it.
//
// A sleeper announces itself (`about_to_sleep`), looks once more for work, and only then sleeps;
// whoever makes work publishes it first and then calls `wake`, which makes a system call only if a
// sleeper is announced. With sequentially consistent fences on both sides no wake-up is lost.
#pragma once

#include <atomic>
#include <cstdint>

namespace commute {

// What epoll found about one TCP link; kept by the link, written by the poller.
struct Readiness {
  bool readable = true;  // optimistic: the first try finds out
  bool writable = true;
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

  void about_to_sleep() { sleeping_.exchange(true, std::memory_order_acq_rel); }
  // Sleeps until something is ready, `wake`, a signal, or `timeout_ms`; 0 only looks. Returns true
  // when something was ready.
  bool sleep(int timeout_ms);

  // Any thread. Cheap when nobody sleeps.
  void wake();

 private:
  int epoll_fd_;
  int event_fd_;
  std::atomic<bool> sleeping_{false};
};

}  // namespace commute
