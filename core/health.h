// SPDX-License-Identifier: Apache-2.0
// The health thread of a member: beats on its control links, and hears who is alive, left, or lost.
//
// It holds one control link to the coordinator (rank -1) and one to each peer it has data links
// with. It is a C++ thread, so Python code that holds the GIL for long does not look dead. Rules:
//   1. Every link gets a beat each interval (a quarter of the timeout, at most 1 s), and any frame
//   counts as heard.
//   2. A peer's link that closes without a goodbye is a loss at once; one that stays silent is a
//   loss just before the timeout has passed, so that callers hear of it within the timeout.
//   3. Whoever was itself stalled (stopped, or starved of CPU) judges nobody by the time it slept
//   through.
//   4. The coordinator's own silence or end is no loss: peers still watch each other.
// News is passed to every other link once; a group fails only once, so the flood ends.
//
// Threads: every public function may be called from any thread. Callbacks come from the health
// thread, without locks held.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "control.h"
#include "failure.h"

namespace commute {

class Health {
 public:
  struct Callbacks {
    std::function<void(Failure)> failed;  // a loss, or an operation given up elsewhere
    std::function<void(int rank)> left;   // a goodbye
    std::function<void(uint64_t group, int rank)> left_group = {};  // a goodbye to one group
  };

  Health(int rank, double peer_timeout_s, Callbacks callbacks);
  ~Health();
  Health(const Health&) = delete;
  Health& operator=(const Health&) = delete;

  void add(int fd, int rank);  // takes ownership; rank -1 is the coordinator
  bool watches(int rank) const;
  double silent_for(int rank) const;  // seconds since the last word; negative when not watched

  // Tells everyone what broke the group.
  void spread(const Failure& failure);
  // Says goodbye to one group.
  void leave(uint64_t group, bool failed, const std::string& why);
  // Says goodbye on every link, waits at most `linger` for it to leave, ends the thread, closes the
  // links.
  void close(bool failed, const std::string& why, std::chrono::milliseconds linger);

  uint64_t refused() const;  // links closed because of bytes that no member sends

 private:
  using Clock = std::chrono::steady_clock;
  struct Member {
    int fd = -1;
    std::string incoming;
    std::string outgoing;
    Clock::time_point heard;
    bool left = false;
    bool spoke = false;  // silence is judged only on a link that has carried a word
  };

  void loop();
  void beat();
  void judge(Clock::time_point now);
  void read_from(int rank);
  void handle(int rank, const ControlFrame& frame);
  void lose(int rank, const std::string& cause);
  void send_to(Member& member, const std::string& bytes);  // with mutex_
  void flush(Member& member);                              // with mutex_
  void drop(int rank);                                     // with mutex_

  const int pid_;  // of the process that made it
  const int rank_;
  const Clock::duration timeout_;
  const Clock::duration interval_;  // between beats
  const Clock::duration tick_;      // between looks at who is silent
  const Callbacks callbacks_;
  int epoll_fd_;
  int event_fd_;
  Clock::time_point last_look_;

  mutable std::mutex mutex_;  // guards everything below
  std::map<int, Member> members_;
  bool closing_ = false;
  uint64_t refused_ = 0;

  std::thread thread_;
};

}  // namespace commute
