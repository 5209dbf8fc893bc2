// SPDX-License-Identifier: Apache-2.0
#include "poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace commute {
namespace {

constexpr int kEventsPerLook = 64;

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

}  // namespace

Poller::Poller()
    : epoll_fd_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      event_fd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;  // the eventfd itself
  checked(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, event_fd_, &event), "epoll_ctl");
}

Poller::~Poller() {
  ::close(event_fd_);
  ::close(epoll_fd_);
}

void Poller::add(int fd, Readiness* readiness) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = readiness;
  checked(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

void Poller::remove(int fd) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
}

bool Poller::sleep(int timeout_ms) {
  epoll_event events[kEventsPerLook];
  const int found = epoll_wait(epoll_fd_, events, kEventsPerLook, timeout_ms);
  sleeping_->store(0, std::memory_order_relaxed);
  for (int i = 0; i < found; ++i) {
    if (auto* readiness = static_cast<Readiness*>(events[i].data.ptr)) {
      if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        readiness->readable = true;
      if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) readiness->writable = true;
    } else {
      uint64_t rings;
      while (::read(event_fd_, &rings, sizeof rings) > 0) {
      }
    }
  }
  return found > 0;
}

void Poller::wake() {
  if (sleeping_->exchange(0, std::memory_order_seq_cst) == 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_fd_, &one, sizeof one);
}

}  // namespace commute
