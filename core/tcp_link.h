// SPDX-License-Identifier: Apache-2.0
// A link over a connected, authenticated, non-blocking TCP socket.
#pragma once

#include <memory>

#include "link.h"
#include "poller.h"

namespace commute {

// Closes a TCP socket once the peer's kernel has taken what was sent, at the latest at
// `linger_until`. A socket closed with unread bytes resets the connection and drops what it has not
// delivered yet, so what arrives meanwhile is read and forgotten.
void close_delivered(int fd, std::chrono::steady_clock::time_point linger_until);

class TcpLink final : public Link {
 public:
  // Takes ownership of `fd`, makes it non-blocking and registers it with `poller`.
  TcpLink(int fd, std::shared_ptr<Poller> poller);
  ~TcpLink() override;

  size_t write(const iovec* pieces, int count) override;
  size_t read(void* into, size_t bytes) override;
  bool needs_system_calls() const override { return true; }
  void close(std::chrono::steady_clock::time_point linger_until) override;

 private:
  int fd_;
  std::shared_ptr<Poller> poller_;
  Readiness ready_;
};

}  // namespace commute
