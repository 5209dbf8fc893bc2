// SPDX-License-Identifier: Apache-2.0
// The kinds of link, for tests that must hold on every one of them. A new kind is one line in
// kLinkKinds.
//
//   LINK_TEST(bytes_arrive) { auto ends = kind.make(a, b); ... }   // runs as bytes_arrive/tcp, ...
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "../memory_link.h"
#include "../shared_link.h"
#include "../tcp_link.h"
#include "check.h"

namespace commute::check {

// Two connected TCP sockets on the loopback, as two processes would have them.
inline std::pair<int, int> tcp_sockets() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  const int dialer = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = ::bind(listener, generic, length) == 0 && ::listen(listener, 1) == 0 &&
                         ::getsockname(listener, generic, &length) == 0 &&
                         ::connect(dialer, generic, length) == 0;
  const int acceptor = connected ? ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
  ::close(listener);
  if (acceptor < 0) throw std::runtime_error("no TCP connection on the loopback");
  return {dialer, acceptor};
}

using Ends = std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>>;

struct LinkKind {
  const char* name;
  // The two ends of one link; the owner of the first sleeps in `a`, of the second in `b`.
  Ends (*make)(const std::shared_ptr<Poller>& a, const std::shared_ptr<Poller>& b);
};

inline Ends tcp_ends(const std::shared_ptr<Poller>& a, const std::shared_ptr<Poller>& b) {
  const auto [dialer, acceptor] = tcp_sockets();
  return {std::make_unique<TcpLink>(dialer, a), std::make_unique<TcpLink>(acceptor, b)};
}

template <size_t capacity>
Ends memory_ends(const std::shared_ptr<Poller>& a, const std::shared_ptr<Poller>& b) {
  return memory_link_pair(a, b, capacity);
}

inline Ends shared_ends(const std::shared_ptr<Poller>& a, const std::shared_ptr<Poller>& b) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw std::runtime_error("no pair of Unix sockets");
  auto segment = std::make_shared<Segment>(Segment::create(SharedLink::segment_bytes()));
  return {std::make_unique<SharedLink>(segment, true, sockets[0], a, doorbell_of(b)),
          std::make_unique<SharedLink>(segment, false, sockets[1], b, doorbell_of(a))};
}

inline constexpr LinkKind kLinkKinds[] = {
    {"tcp", tcp_ends},
    {"memory", memory_ends<64 * 1024>},
    {"narrow_memory", memory_ends<7>},  // holds less than one element of 8 bytes
    {"shared_memory", shared_ends},
};

template <void (*body)(const LinkKind&), size_t... kinds>
bool register_for_kinds(const char* name, std::index_sequence<kinds...>) {
  static std::deque<std::string> names;
  (
      [&] {
        names.push_back(std::string(name) + "/" + kLinkKinds[kinds].name);
        tests().push_back({names.back().c_str(), [] { body(kLinkKinds[kinds]); }});
      }(),
      ...);
  return true;
}

}  // namespace commute::check

#define LINK_TEST(name)                                                                   \
  static void body_##name(const commute::check::LinkKind& kind);                          \
  static const bool registered_##name = commute::check::register_for_kinds<&body_##name>( \
      #name, std::make_index_sequence<std::size(commute::check::kLinkKinds)>());          \
  static void body_##name([[maybe_unused]] const commute::check::LinkKind& kind)
