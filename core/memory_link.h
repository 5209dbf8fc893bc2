// SPDX-License-Identifier: Apache-2.0
// The in-memory twin of a TCP link, for ranks that are threads of one process: tests without
// sockets.
//
// Two bounded byte pipes, one per direction. A pipe is a ring buffer under a mutex: this is a twin
// for tests, so it is simple rather than fast, and it can be made narrow on purpose to show what a
// plan does when the path holds less than a message.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "link.h"
#include "poller.h"

namespace commute {

class MemoryPipe {
 public:
  explicit MemoryPipe(size_t capacity) : ring_(capacity) {}

  size_t write(const void* bytes, size_t count);  // raises LinkClosed when closed
  size_t read(void* into, size_t count);          // raises LinkClosed when closed and empty
  void close();

 private:
  std::mutex mutex_;
  std::vector<char> ring_;
  size_t written_ = 0;  // both count from the beginning; their difference is what is inside
  size_t read_ = 0;
  bool closed_ = false;
};

class MemoryLink final : public Link {
 public:
  MemoryLink(std::shared_ptr<MemoryPipe> outgoing, std::shared_ptr<MemoryPipe> incoming,
             std::shared_ptr<Poller> peer)
      : outgoing_(std::move(outgoing)), incoming_(std::move(incoming)), peer_(std::move(peer)) {}
  ~MemoryLink() override { close({}); }

  size_t write(const iovec* pieces, int count) override;
  size_t read(void* into, size_t bytes) override;
  void close(std::chrono::steady_clock::time_point linger_until) override;

 private:
  std::shared_ptr<MemoryPipe> outgoing_;
  std::shared_ptr<MemoryPipe> incoming_;
  std::shared_ptr<Poller> peer_;  // woken when bytes or room appear for it
};

// The two ends of one path; the first belongs to the rank that sleeps in `a`.
std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> memory_link_pair(std::shared_ptr<Poller> a,
                                                                         std::shared_ptr<Poller> b,
                                                                         size_t capacity_bytes);

}  // namespace commute
