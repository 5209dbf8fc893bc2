// SPDX-License-Identifier: Apache-2.0
// A link: an ordered, flow-controlled, non-blocking path of bytes between two processes.
//
// Contract, tested by one conformance suite for every kind (tests/test_links.cc):
//   1. Bytes arrive exactly once and in order, or the link is closed.
//   2. `write` and `read` never block; both return how many bytes moved, 0 when none could.
//   3. After the peer closed, `read` first gives everything the peer had written, then raises
//   LinkClosed;
//      `write` raises LinkClosed at the latest when the peer's end is known to be gone.
//   4. When a link on which 0 was returned can move again, the owner's Poller wakes up.
//   5. One thread at a time uses a link (whoever holds the engine's progress lock).
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace commute {

class LinkClosed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Link {
 public:
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  virtual ~Link() = default;

  // Gathers up to `count` pieces into one write.
  virtual size_t write(const iovec* pieces, int count) = 0;
  virtual size_t read(void* into, size_t bytes) = 0;
  // Whether bytes come by a socket, so that only a system call finds out that there are some.
  virtual bool needs_system_calls() const { return false; }
  // Closes this end. Bytes already written still reach a peer that reads them; up to `linger_until`
  // is spent on making sure of that.
  virtual void close(std::chrono::steady_clock::time_point linger_until) = 0;
};

}  // namespace commute
