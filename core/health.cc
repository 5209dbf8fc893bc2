// SPDX-License-Identifier: Apache-2.0
#include "health.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tcp_link.h"

namespace commute {
namespace {

// A link that has this much unsent is dead in all but name; its beats are not queued any further.
constexpr size_t kOutgoingMax = 64 * 1024;
constexpr int kEventsPerLook = 64;
constexpr int kReadsPerLook = 16;
constexpr int kWakeRank = -2;  // stands for the eventfd in epoll's data

std::chrono::steady_clock::duration seconds(double value) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(value));
}

}  // namespace

Health::Health(int rank, double peer_timeout_s, Callbacks callbacks)
    : pid_(::getpid()),
      rank_(rank),
      timeout_(seconds(peer_timeout_s)),
      interval_(seconds(std::min(1.0, peer_timeout_s / 4))),
      tick_(seconds(peer_timeout_s / 50)),
      callbacks_(std::move(callbacks)),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      last_look_(Clock::now()) {
  if (epoll_fd_ < 0 || event_fd_ < 0)
    throw std::runtime_error("no file descriptor left for the health thread");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = kWakeRank;
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, event_fd_, &event);
  thread_ = std::thread([this] { loop(); });
}

Health::~Health() {
  if (::getpid() !=
      pid_) {  // a forked child: the thread does not exist, the sockets are the parent's
    thread_.detach();
    return;
  }
  close(false, "", std::chrono::milliseconds(0));
  ::close(event_fd_);
  ::close(epoll_fd_);
}

void Health::add(int fd, int rank) {
  const int on = 1;
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const std::lock_guard lock(mutex_);
  drop(rank);
  if (closing_) {
    ::close(fd);
    return;
  }
  members_[rank] = Member{fd, "", "", Clock::now()};
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = rank;
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  send_to(members_[rank], encode({ControlKind::kBeat, 0, rank_, rank_, 0, ""}));
}

bool Health::watches(int rank) const {
  const std::lock_guard lock(mutex_);
  return members_.contains(rank);
}

double Health::silent_for(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(rank);
  if (found == members_.end()) return -1;
  return std::chrono::duration<double>(Clock::now() - found->second.heard).count();
}

uint64_t Health::refused() const {
  const std::lock_guard lock(mutex_);
  return refused_;
}

void Health::spread(const Failure& failure) {
  const std::string frame =
      encode({ControlKind::kAbandon, static_cast<uint8_t>(failure.code), failure.rank, failure.by,
              failure.operation, failure.text, failure.group});
  const std::lock_guard lock(mutex_);
  for (auto& [rank, member] : members_) {
    // Every member reports to the coordinator what it noticed itself, and nothing else.
    if (rank < 0 && failure.by != rank_) continue;
    send_to(member, frame);
  }
}

void Health::leave(uint64_t group, bool failed, const std::string& why) {
  const std::string goodbye = encode({ControlKind::kLeave, failed, rank_, rank_, 0, why, group});
  const std::lock_guard lock(mutex_);
  for (auto& [rank, member] : members_) send_to(member, goodbye);
}

void Health::close(bool failed, const std::string& why, std::chrono::milliseconds linger) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
    const std::string goodbye = encode({ControlKind::kLeave, failed, rank_, rank_, 0, why});
    for (auto& [rank, member] : members_) send_to(member, goodbye);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_fd_, &one, sizeof one);
  thread_.join();
  const auto until = Clock::now() + linger;
  const std::lock_guard lock(mutex_);
  for (auto& [rank, member] : members_) {
    while (!member.outgoing.empty() && Clock::now() < until) {
      flush(member);
      if (!member.outgoing.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    close_delivered(member.fd, until);
  }
  members_.clear();
}

// --- the thread ---

void Health::loop() {
  auto next_beat = Clock::now() + interval_;
  for (;;) {
    const auto tick = std::chrono::duration_cast<std::chrono::milliseconds>(tick_).count();
    epoll_event events[kEventsPerLook];
    const int found =
        epoll_wait(epoll_fd_, events, kEventsPerLook, static_cast<int>(std::max<int64_t>(tick, 1)));
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
    }
    for (int i = 0; i < found; ++i)
      if (events[i].data.fd != kWakeRank) read_from(events[i].data.fd);
    const auto now = Clock::now();
    if (now >= next_beat) {
      beat();
      next_beat = now + interval_;
    }
    // Everything that had arrived was read before anybody is judged.
    if (now - last_look_ >= tick_ && found < kEventsPerLook) judge(now);
  }
}

void Health::beat() {
  const std::string frame = encode({ControlKind::kBeat, 0, rank_, rank_, 0, ""});
  const std::lock_guard lock(mutex_);
  for (auto& [rank, member] : members_) send_to(member, frame);
}

void Health::judge(Clock::time_point now) {
  std::vector<int> silent;
  {
    const std::lock_guard lock(mutex_);
    const bool stalled = now - last_look_ > timeout_ / 2;
    last_look_ = now;
    for (auto& [rank, member] : members_) {
      if (stalled) member.heard = now;
      const bool watched = rank >= 0 && !member.left && member.spoke;
      if (watched && now - member.heard > timeout_ - 2 * tick_) silent.push_back(rank);
    }
  }
  char text[80];
  std::snprintf(text, sizeof text, "nothing was heard from it for %.3g s",
                std::chrono::duration<double>(timeout_).count());
  for (const int rank : silent) lose(rank, text);
}

void Health::read_from(int rank) {
  std::vector<ControlFrame> frames;
  std::string ended;
  {
    const std::lock_guard lock(mutex_);
    const auto found = members_.find(rank);
    if (found == members_.end()) return;
    Member& member = found->second;
    char bytes[4096];
    ssize_t moved = 1;
    // Bounded, so that one that floods does not keep the others waiting; epoll comes back to it.
    for (int reads = 0; reads < kReadsPerLook; ++reads) {
      moved = ::recv(member.fd, bytes, sizeof bytes, 0);
      if (moved <= 0) break;
      member.incoming.append(bytes, static_cast<size_t>(moved));
      member.heard = Clock::now();
      member.spoke = true;
      try {
        while (auto frame = decode(member.incoming)) frames.push_back(std::move(*frame));
      } catch (const std::runtime_error& bad) {
        ++refused_;
        ended = std::string("its control link carried bytes that no member sends: ") + bad.what();
        break;
      }
    }
    // A process that is killed with unread bytes resets its connection.
    const bool reset = moved < 0 && errno == ECONNRESET;
    if (moved == 0 || reset)
      ended = "its connection closed without a goodbye; the process has died or was killed";
    else if (moved < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
      ended = std::string("its connection broke: ") + std::strerror(errno);
  }
  for (const ControlFrame& frame : frames) handle(rank, frame);
  if (!ended.empty()) lose(rank, ended);
}

void Health::handle(int rank, const ControlFrame& frame) {
  switch (frame.kind) {
    case ControlKind::kBeat:
      return;
    case ControlKind::kLeave: {
      if (frame.group != 0 && frame.code == 0) {
        if (callbacks_.left_group) callbacks_.left_group(frame.group, frame.rank);
        return;
      }
      if (frame.group != 0)
        return callbacks_.failed(
            {FailureCode::kPeerLost, frame.rank, rank, 0, frame.text, frame.group});
      {
        const std::lock_guard lock(mutex_);
        const auto found = members_.find(frame.rank);
        if (found != members_.end()) found->second.left = true;
      }
      if (frame.rank == rank_) return;
      if (frame.code == 0) return callbacks_.left(frame.rank);
      return callbacks_.failed({FailureCode::kPeerLost, frame.rank, rank, 0, frame.text});
    }
    case ControlKind::kLost:
      return callbacks_.failed(
          {FailureCode::kPeerLost, frame.rank, frame.by, 0,
           frame.rank == rank_ ? "the others have given this rank up: " + frame.text : frame.text});
    case ControlKind::kAbandon: {
      const bool known = frame.code >= static_cast<uint8_t>(FailureCode::kMismatch) &&
                         frame.code <= static_cast<uint8_t>(FailureCode::kProtocol);
      const auto code = known ? static_cast<FailureCode>(frame.code) : FailureCode::kProtocol;
      return callbacks_.failed(
          {code, frame.rank, frame.by, frame.operation, frame.text, frame.group});
    }
  }
}

void Health::lose(int rank, const std::string& cause) {
  bool goodbye = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = members_.find(rank);
    if (found == members_.end()) return;
    goodbye = found->second.left;
    drop(rank);
    if (!goodbye && rank >= 0 && members_.contains(-1))
      send_to(members_[-1], encode({ControlKind::kLost, 0, rank, rank_, 0, cause}));
  }
  if (!goodbye && rank >= 0) callbacks_.failed({FailureCode::kPeerLost, rank, rank_, 0, cause});
}

// --- links, with mutex_ ---

void Health::send_to(Member& member, const std::string& bytes) {
  if (member.outgoing.size() < kOutgoingMax) member.outgoing += bytes;
  flush(member);
}

void Health::flush(Member& member) {
  while (!member.outgoing.empty()) {
    const ssize_t moved = ::send(member.fd, member.outgoing.data(), member.outgoing.size(),
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (moved <= 0) {
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) member.outgoing.clear();
      return;
    }
    member.outgoing.erase(0, static_cast<size_t>(moved));
  }
}

void Health::drop(int rank) {
  const auto found = members_.find(rank);
  if (found == members_.end()) return;
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, found->second.fd, nullptr);
  ::close(found->second.fd);
  members_.erase(found);
}

}  // namespace commute
