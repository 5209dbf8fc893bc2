// SPDX-License-Identifier: Apache-2.0
// The contract of link.h, on every kind of link. Threads stand for processes: each owns one end and
// one poller, and sleeps in it as an engine does.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "link_kinds.h"

namespace {

using namespace commute;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Rng = std::mt19937_64;

constexpr auto kDeadline = 20s;  // for things that take milliseconds

struct Wire {
  explicit Wire(const check::LinkKind& kind) : ends(kind.make(a_poller, b_poller)) {}
  Link& a() { return *ends.first; }
  Link& b() { return *ends.second; }

  std::shared_ptr<Poller> a_poller = std::make_shared<Poller>();
  std::shared_ptr<Poller> b_poller = std::make_shared<Poller>();
  check::Ends ends;
};

// Tries until `step` says true, asleep while nothing moves. False at the deadline: a lost wake-up
// shows as one, because nothing else ends the sleep.
bool until(Poller& poller, const std::function<bool()>& step) {
  const auto give_up = Clock::now() + kDeadline;
  while (!step()) {
    poller.about_to_sleep();
    if (step()) break;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(give_up - Clock::now()).count();
    if (left <= 0) return false;
    poller.sleep(static_cast<int>(left));
  }
  return true;
}

size_t write_one(Link& link, const char* bytes, size_t count) {
  const iovec piece{const_cast<char*>(bytes), count};
  return link.write(&piece, 1);
}

bool write_all(Link& link, Poller& poller, const char* bytes, size_t count) {
  size_t done = 0;
  return until(poller,
               [&] { return (done += write_one(link, bytes + done, count - done)) == count; });
}

bool read_all(Link& link, Poller& poller, char* into, size_t count) {
  size_t done = 0;
  return until(poller, [&] { return (done += link.read(into + done, count - done)) == count; });
}

// What the link still gives until it is closed.
std::string read_to_end(Link& link, Poller& poller) {
  std::string all;
  char piece[1000];
  const bool ended = until(poller, [&] {
    try {
      size_t moved;
      while ((moved = link.read(piece, sizeof piece)) > 0) all.append(piece, moved);
      return false;
    } catch (const LinkClosed&) {
      return true;
    }
  });
  CHECK(ended);
  return all;
}

std::string random_bytes(Rng& rng, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(rng());
  return bytes;
}

template <class Action>
bool raises_closed(Action action) {
  try {
    action();
  } catch (const LinkClosed&) {
    return true;
  }
  return false;
}

// Fills the link until it takes nothing more; returns what it took.
std::string fill(Link& link, Rng& rng, size_t at_most) {
  std::string written;
  while (written.size() < at_most) {
    const std::string piece = random_bytes(rng, 1 + rng() % 5000);
    const size_t moved = write_one(link, piece.data(), piece.size());
    CHECK(moved <= piece.size());
    if (moved == 0) break;
    written.append(piece, 0, moved);
  }
  return written;
}

// Sends and receives at once, in pieces of random size.
void exchange(Link& link, Poller& poller, const std::string& out, std::string& in, uint64_t seed) {
  Rng rng(seed);
  size_t sent = 0;
  size_t got = 0;
  const bool all = until(poller, [&] {
    for (;;) {
      const size_t to_send = std::min<size_t>(out.size() - sent, 1 + rng() % 9000);
      const size_t to_read = std::min<size_t>(in.size() - got, 1 + rng() % 9000);
      const size_t s = to_send > 0 ? write_one(link, out.data() + sent, to_send) : 0;
      const size_t r = to_read > 0 ? link.read(in.data() + got, to_read) : 0;
      sent += s;
      got += r;
      if (s + r == 0) return sent == out.size() && got == in.size();
    }
  });
  CHECK(all);
}

LINK_TEST(bytes_arrive_once_and_in_order_both_ways) {
  const uint64_t seed = 20240607;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  Wire wire(kind);
  const size_t bytes = std::string_view(kind.name) == "narrow_memory" ? 20'000 : 3'000'000;
  const std::string there = random_bytes(rng, bytes);
  const std::string back = random_bytes(rng, bytes / 2);
  std::string at_a(back.size(), '\0');
  std::string at_b(there.size(), '\0');
  std::thread peer([&] { exchange(wire.b(), *wire.b_poller, back, at_b, seed + 1); });
  exchange(wire.a(), *wire.a_poller, there, at_a, seed + 2);
  peer.join();
  CHECK(at_a == back);
  CHECK(at_b == there);
}

LINK_TEST(gather_writes_keep_the_order_of_their_pieces) {
  Wire wire(kind);
  std::string texts[] = {"alpha", "", "b", "gamma-delta", "e"};
  const std::string whole = "alphabgamma-deltae";
  size_t done = 0;
  std::string got(whole.size(), '\0');
  std::thread peer([&] { CHECK(read_all(wire.b(), *wire.b_poller, got.data(), got.size())); });
  const bool all = until(*wire.a_poller, [&] {
    iovec pieces[5];
    size_t skip = done;
    for (int i = 0; i < 5; ++i) {
      const size_t cut = std::min(skip, texts[i].size());
      pieces[i] = {texts[i].data() + cut, texts[i].size() - cut};
      skip -= cut;
    }
    return (done += wire.a().write(pieces, 5)) == whole.size();
  });
  peer.join();
  CHECK(all);
  CHECK_EQ(got, whole);
}

LINK_TEST(a_full_link_takes_nothing_and_does_not_block) {
  Rng rng(7);
  Wire wire(kind);
  const auto begun = Clock::now();
  std::string written = fill(wire.a(), rng, size_t{256} << 20);
  CHECK(!written.empty());
  CHECK_EQ(write_one(wire.a(), "x", 1), 0u);
  CHECK_EQ(write_one(wire.a(), "x", 0), 0u);
  CHECK(Clock::now() - begun < kDeadline);
  // It takes more once the peer has read, and nothing is lost or doubled at the brim.
  std::string got(written.size() + 5, '\0');
  std::thread peer([&] { CHECK(read_all(wire.b(), *wire.b_poller, got.data(), got.size())); });
  CHECK(write_all(wire.a(), *wire.a_poller, "12345", 5));
  peer.join();
  CHECK(got == written + "12345");
}

LINK_TEST(an_empty_link_gives_nothing_and_does_not_block) {
  Wire wire(kind);
  char byte = 0;
  CHECK_EQ(wire.a().read(&byte, 1), 0u);
  CHECK_EQ(wire.b().read(&byte, 1), 0u);
  CHECK_EQ(wire.b().read(&byte, 0), 0u);
}

LINK_TEST(what_was_written_is_read_before_the_close_is_seen) {
  Wire wire(kind);
  CHECK_EQ(write_one(wire.a(), "last", 4), 4u);
  wire.a().close(Clock::now() + kDeadline);
  CHECK_EQ(read_to_end(wire.b(), *wire.b_poller), "last");
  char byte;
  CHECK(raises_closed([&] { wire.b().read(&byte, 1); }));
  CHECK(raises_closed([&] {
    for (int i = 0; i < 1000;
         ++i) {  // a link may notice only when its first bytes come back refused
      write_one(wire.b(), "x", 1);
      wire.b_poller->sleep(1);
    }
  }));
}

// Closing a TCP socket that holds unread bytes resets the connection, which must not swallow what
// was written before.
LINK_TEST(large_data_survives_a_close_with_unread_bytes) {
  Rng rng(11);
  Wire wire(kind);
  const std::string unread = fill(wire.b(), rng, 100'000);
  std::string written = fill(wire.a(), rng, 4'000'000);
  std::string got;
  std::thread peer([&] { got = read_to_end(wire.b(), *wire.b_poller); });
  wire.a().close(Clock::now() + kDeadline);
  peer.join();
  CHECK(!unread.empty());
  CHECK(got == written);
}

LINK_TEST(closing_is_idempotent_and_ends_this_side_too) {
  Wire wire(kind);
  wire.a().close({});
  wire.a().close(Clock::now() + kDeadline);
  char byte;
  CHECK(raises_closed([&] { wire.a().read(&byte, 1); }));
  CHECK(raises_closed([&] { write_one(wire.a(), "x", 1); }));
}

// A peer that goes on sending must not keep the closing side busy.
LINK_TEST(closing_is_bounded_under_a_flood) {
  Wire wire(kind);
  std::atomic<bool> stop{false};
  std::thread flood([&] {
    const std::string bytes(1 << 20, 'x');
    try {
      while (!stop) write_one(wire.b(), bytes.data(), bytes.size()) || wire.b_poller->sleep(0);
    } catch (const LinkClosed&) {
    }
  });
  char byte;
  CHECK(until(*wire.a_poller, [&] { return wire.a().read(&byte, 1) == 1; }));
  const auto begun = Clock::now();
  wire.a().close(begun + 50ms);
  CHECK(Clock::now() - begun < 5s);
  stop = true;
  flood.join();
}

LINK_TEST(a_close_wakes_a_sleeping_reader) {
  Wire wire(kind);
  std::atomic<bool> asleep{false};
  std::thread peer([&] {
    asleep = true;
    CHECK_EQ(read_to_end(wire.b(), *wire.b_poller), "");
  });
  while (!asleep) std::this_thread::yield();
  wire.a().close({});
  peer.join();
}

LINK_TEST(no_wake_up_is_lost_in_ten_thousand_rounds) {
  constexpr uint32_t kRounds = 10'000;
  Wire wire(kind);
  const auto play = [](Link& link, Poller& poller, bool serves) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      char ball[4];
      std::memcpy(ball, &round, sizeof ball);
      if (serves && !write_all(link, poller, ball, sizeof ball)) return false;
      char back[4];
      if (!read_all(link, poller, back, sizeof back)) return false;
      if (std::memcmp(ball, back, sizeof ball) != 0) return false;
      if (!serves && !write_all(link, poller, ball, sizeof ball)) return false;
    }
    return true;
  };
  std::thread peer([&] { CHECK(play(wire.b(), *wire.b_poller, false)); });
  CHECK(play(wire.a(), *wire.a_poller, true));
  peer.join();
}

// A link may wake its owner without need, but not all the time.
LINK_TEST(waiting_sleeps) {
  Wire wire(kind);
  char byte;
  const auto end = Clock::now() + 300ms;
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_THREAD, &before);
  while (Clock::now() < end) {
    CHECK_EQ(wire.a().read(&byte, 1), 0u);
    wire.a_poller->about_to_sleep();
    wire.a_poller->sleep(50);
  }
  getrusage(RUSAGE_THREAD, &after);
  const auto micros = [](const timeval& t) { return t.tv_sec * 1'000'000 + t.tv_usec; };
  const auto used = micros(after.ru_utime) - micros(before.ru_utime) + micros(after.ru_stime) -
                    micros(before.ru_stime);
  CHECK(used < 60'000);
}

TEST(a_poller_is_woken_from_another_thread) {
  Poller poller;
  std::atomic<bool> published{false};
  std::thread waker([&] {
    published = true;
    poller.wake();
  });
  CHECK(until(poller, [&] { return published.load(); }));
  waker.join();
}

TEST(a_thousand_tcp_links_leave_no_descriptor_behind) {
  const int before = ::dup(0);
  for (int i = 0; i < 1000; ++i) Wire wire(check::kLinkKinds[0]);
  const int after = ::dup(0);
  CHECK_EQ(before + 1, after);  // `before` itself is still open
  ::close(before);
  ::close(after);
}

}  // namespace
