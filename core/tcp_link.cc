// SPDX-License-Identifier: Apache-2.0
#include "tcp_link.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace commute {
namespace {

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK;
}

[[noreturn]] void raise_closed(const char* what) {
  throw LinkClosed(std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

TcpLink::TcpLink(int fd, std::shared_ptr<Poller> poller) : fd_(fd), poller_(std::move(poller)) {
  const int on = 1;
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
  // Fails harmlessly on the Unix socket pairs of the tests.
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  try {
    poller_->add(fd_, &ready_);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

TcpLink::~TcpLink() {
  close({});
}

size_t TcpLink::write(const iovec* pieces, int count) {
  if (fd_ < 0) throw LinkClosed("this side closed the connection");
  if (!ready_.writable.exchange(false)) return 0;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(count);
  for (;;) {
    const ssize_t moved = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && would_block()) return 0;
    ready_.writable = true;  // also after an error, which the next try is to find again
    if (moved < 0) raise_closed("the connection broke while sending");
    return static_cast<size_t>(moved);
  }
}

size_t TcpLink::read(void* into, size_t bytes) {
  if (fd_ < 0) throw LinkClosed("this side closed the connection");
  if (bytes == 0 || !ready_.readable.exchange(false)) return 0;
  for (;;) {
    const ssize_t moved = ::recv(fd_, into, bytes, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && would_block()) return 0;
    ready_.readable = true;  // also at the end, which the next try is to find again
    if (moved == 0) throw LinkClosed("the peer closed its connection");
    if (moved < 0) raise_closed("the connection broke while receiving");
    return static_cast<size_t>(moved);
  }
}

void TcpLink::close(std::chrono::steady_clock::time_point linger_until) {
  if (fd_ < 0) return;
  poller_->remove(fd_);
  close_delivered(std::exchange(fd_, -1), linger_until);
}

void close_delivered(int fd, std::chrono::steady_clock::time_point linger_until) {
  ::shutdown(fd, SHUT_WR);
  char forgotten[4096];
  for (;;) {
    const bool flooded = ::recv(fd, forgotten, sizeof forgotten, MSG_DONTWAIT) > 0;
    if (std::chrono::steady_clock::now() >= linger_until) break;
    if (flooded) continue;
    int undelivered = 0;
    if (::ioctl(fd, SIOCOUTQ, &undelivered) != 0 || undelivered == 0) break;
    pollfd look{fd, POLLIN, 0};
    ::poll(&look, 1, 2);
    if (look.revents & (POLLERR | POLLNVAL)) break;
  }
  ::close(fd);
}

}  // namespace commute
