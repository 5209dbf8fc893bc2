// SPDX-License-Identifier: Apache-2.0
// The health thread over real TCP sockets. Times are short and never asserted exactly: a thing must
// happen before a generous deadline, or must not have happened while it was watched.
#include "../health.h"

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>

#include "link_kinds.h"

namespace {

using namespace commute;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr double kTimeout = 0.2;     // of a silent peer
constexpr double kPatient = 1000.0;  // where silence must not matter; beats come each second
constexpr auto kDeadline = 20s;
constexpr auto kWatched = 600ms;  // three timeouts: long enough to see what must not happen

// A member, and what it was told.
struct Member {
  Member(int rank, double timeout)
      : health(rank, timeout,
               {[this](Failure failure) {
                  const std::lock_guard lock(mutex);
                  failures.push_back(std::move(failure));
                  changed.notify_all();
                },
                [this](int left_rank) {
                  const std::lock_guard lock(mutex);
                  left.push_back(left_rank);
                  changed.notify_all();
                }}) {}

  bool hears(const std::function<bool()>& truth, Clock::duration patience = kDeadline) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, patience, truth);
  }
  bool fails(Clock::duration patience = kDeadline) {
    return hears([this] { return !failures.empty(); }, patience);
  }
  Failure failure() {
    const std::lock_guard lock(mutex);
    return failures.empty() ? Failure{} : failures.front();
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Failure> failures;
  std::vector<int> left;
  Health health;  // last: its thread uses the rest
};

// The far end of a control link in the test's hands.
class Wire {
 public:
  explicit Wire(Health& health, int rank) {
    const auto [mine, theirs] = check::tcp_sockets();
    fd_ = mine;
    health.add(theirs, rank);
  }
  ~Wire() { end(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  void say(const std::string& bytes) {
    CHECK_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  void say(const ControlFrame& frame) { say(encode(frame)); }
  void beat(int rank) { say({ControlKind::kBeat, 0, rank, rank, 0, ""}); }
  void end() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  // The next frame of another kind than BEAT, or of any kind; nothing at the end of the link.
  std::optional<ControlFrame> next(bool beats_too = false) {
    const auto until = Clock::now() + kDeadline;
    while (Clock::now() < until) {
      while (auto frame = decode(incoming_))
        if (beats_too || frame->kind != ControlKind::kBeat) return frame;
      pollfd look{fd_, POLLIN, 0};
      ::poll(&look, 1, 100);
      char bytes[4096];
      const ssize_t moved = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
      if (moved == 0 || (moved < 0 && errno == ECONNRESET)) return std::nullopt;
      if (moved > 0) incoming_.append(bytes, static_cast<size_t>(moved));
    }
    check::fail(__FILE__, __LINE__, "nothing came before the deadline");
    return std::nullopt;
  }

 private:
  int fd_ = -1;
  std::string incoming_;
};

void connect(Member& a, int a_rank, Member& b, int b_rank) {
  const auto [mine, theirs] = check::tcp_sockets();
  a.health.add(mine, b_rank);
  b.health.add(theirs, a_rank);
}

bool says(const Failure& failure, const char* part) {
  if (failure.text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" does not say \"%s\"\n", failure.text.c_str(), part);
  return false;
}

TEST(members_that_beat_stay_alive) {
  Member a(0, kTimeout);
  Member b(1, kTimeout);
  connect(a, 0, b, 1);
  CHECK(a.health.watches(1) && !a.health.watches(2));
  CHECK(!a.fails(kWatched));
  CHECK(b.failures.empty());
  CHECK(a.health.silent_for(1) >= 0 && a.health.silent_for(1) < 10);
  CHECK(a.health.silent_for(2) < 0);
}

TEST(beats_keep_coming) {
  Member member(0, kTimeout);
  Wire wire(member.health, 1);
  for (int i = 0; i < 5; ++i) {
    const auto frame = wire.next(true);
    CHECK(frame && frame->kind == ControlKind::kBeat && frame->rank == 0 && frame->by == 0);
    wire.beat(1);
  }
  CHECK(!member.fails(0ms));
}

// Also where the dying side leaves a beat unread, which resets the connection.
void expect_loss_by_close(bool with_unread_bytes) {
  Member member(0, kPatient);
  Wire coordinator(member.health, -1);
  Wire wire(member.health, 1);
  if (!with_unread_bytes) CHECK(wire.next(true).has_value());
  wire.end();
  CHECK(member.fails());
  CHECK(member.failure().code == FailureCode::kPeerLost);
  CHECK_EQ(member.failure().rank, 1);
  CHECK_EQ(member.failure().by, 0);
  CHECK(says(member.failure(), "closed without a goodbye"));
  CHECK(!member.health.watches(1));
  const auto told = coordinator.next();
  CHECK(told && told->kind == ControlKind::kLost && told->rank == 1 && told->by == 0);
}

TEST(a_closed_link_is_a_loss_at_once) {
  expect_loss_by_close(false);
  expect_loss_by_close(true);
}

TEST(silence_is_a_loss) {
  Member member(0, kTimeout);
  Wire wire(member.health, 1);
  wire.beat(1);
  CHECK(member.fails());
  CHECK(member.failure().code == FailureCode::kPeerLost);
  CHECK_EQ(member.failure().rank, 1);
  CHECK(says(member.failure(), "nothing was heard from it for 0.2 s"));
}

// Its other end may still be on its way to the peer's health thread.
TEST(a_link_that_has_never_spoken_is_not_judged) {
  Member member(0, kTimeout);
  Wire wire(member.health, 1);
  CHECK(!member.fails(kWatched));
}

TEST(the_coordinators_silence_and_end_are_no_loss) {
  Member member(0, kTimeout);
  Wire coordinator(member.health, -1);
  coordinator.beat(-1);
  CHECK(!member.fails(kWatched));
  coordinator.end();
  CHECK(!member.fails(kWatched));
}

TEST(a_goodbye_is_no_loss) {
  Member a(0, kPatient);
  Member b(1, kPatient);
  connect(a, 0, b, 1);
  b.health.close(false, "", 1s);
  CHECK(a.hears([&] { return !a.left.empty(); }));
  CHECK_EQ(a.left.front(), 1);
  CHECK(!a.fails(100ms));
}

TEST(a_goodbye_by_the_coordinator_counts_too) {
  Member member(0, kPatient);
  Wire coordinator(member.health, -1);
  Wire wire(member.health, 1);
  coordinator.say({ControlKind::kLeave, 0, 1, 1, 0, ""});
  CHECK(member.hears([&] { return !member.left.empty(); }));
  wire.end();
  CHECK(!member.fails(100ms));
}

TEST(a_goodbye_in_trouble_is_a_loss_with_its_reason) {
  Member a(0, kPatient);
  Member b(1, kPatient);
  connect(a, 0, b, 1);
  b.health.close(true, "ValueError: no such file", 1s);
  CHECK(a.fails());
  CHECK(a.failure().code == FailureCode::kPeerLost);
  CHECK_EQ(a.failure().rank, 1);
  CHECK(says(a.failure(), "ValueError: no such file"));
  CHECK(a.left.empty());
}

TEST(a_failure_is_spread_to_everyone) {
  Member a(0, kPatient);
  Member b(1, kPatient);
  Member c(2, kPatient);
  connect(a, 0, b, 1);
  connect(a, 0, c, 2);
  Wire coordinator(a.health, -1);
  a.health.spread({FailureCode::kMismatch, 2, 0, 7, "rank 2 called something else"});
  for (Member* member : {&b, &c}) {
    CHECK(member->fails());
    CHECK(member->failure().code == FailureCode::kMismatch);
    CHECK_EQ(member->failure().rank, 2);
    CHECK_EQ(member->failure().by, 0);
    CHECK_EQ(member->failure().operation, 7u);
    CHECK(says(member->failure(), "something else"));
  }
  const auto told = coordinator.next();
  CHECK(told && told->kind == ControlKind::kAbandon && told->operation == 7);
}

// What others noticed, they report themselves.
TEST(the_coordinator_hears_only_what_a_member_noticed_itself) {
  Member member(0, kPatient);
  Wire coordinator(member.health, -1);
  member.health.spread({FailureCode::kMismatch, 2, 1, 7, "by rank 1"});
  member.health.spread({FailureCode::kTimeout, 2, 0, 8, "by rank 0"});
  const auto told = coordinator.next();
  CHECK(told && told->operation == 8);
}

TEST(losses_and_abandoned_operations_are_heard) {
  Member member(0, kPatient);
  Wire coordinator(member.health, -1);
  coordinator.say({ControlKind::kLost, 0, 3, -1, 0, "its process was killed"});
  CHECK(member.fails());
  CHECK(member.failure().code == FailureCode::kPeerLost && member.failure().rank == 3);
  Member other(0, kPatient);
  Wire wire(other.health, 1);
  wire.say({ControlKind::kAbandon, 99, 1, 1, 4, "a code from the future"});
  CHECK(other.fails());
  CHECK(other.failure().code == FailureCode::kProtocol && other.failure().operation == 4);
}

TEST(frames_may_arrive_in_pieces_and_together) {
  Member member(0, kPatient);
  Wire wire(member.health, 1);
  const std::string bytes = encode({ControlKind::kBeat, 0, 1, 1, 0, ""}) +
                            encode({ControlKind::kLeave, 0, 5, 5, 0, ""}) +
                            encode({ControlKind::kLeave, 0, 6, 6, 0, "bye"});
  for (const char byte : bytes) wire.say(std::string(1, byte));
  CHECK(member.hears([&] { return member.left.size() == 2; }));
  wire.say(bytes);
  CHECK(member.hears([&] { return member.left.size() == 4; }));
}

TEST(garbage_closes_the_link_and_is_counted) {
  Member member(0, kPatient);
  Wire coordinator(member.health, -1);
  Wire wire(member.health, 1);
  wire.say(std::string(100, 'x'));
  CHECK(member.fails());
  CHECK_EQ(member.failure().rank, 1);
  CHECK(says(member.failure(), "bytes that no member sends"));
  CHECK_EQ(member.health.refused(), 1u);
  while (wire.next(true)) {
  }
  coordinator.say("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  while (coordinator.next(true)) {
  }
  CHECK_EQ(member.health.refused(), 2u);
  CHECK_EQ(member.failures.size(), 1u);  // the coordinator's end is no loss
}

// One peer that sends without end keeps neither the beats nor the others from being heard.
TEST(a_flood_does_not_drown_the_others) {
  Member member(0, kTimeout);
  Wire quiet(member.health, 2);
  std::atomic<bool> stop{false};
  const auto [mine, theirs] = check::tcp_sockets();
  member.health.add(theirs, 1);
  std::thread flood([&, fd = mine] {
    std::string beats;
    for (int i = 0; i < 1000; ++i) beats += encode({ControlKind::kBeat, 0, 1, 1, 0, ""});
    while (!stop && ::send(fd, beats.data(), beats.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  for (int i = 0; i < 5; ++i) {
    CHECK(quiet.next(true).has_value());
    quiet.beat(2);
  }
  quiet.say({ControlKind::kLeave, 0, 2, 2, 0, ""});
  CHECK(member.hears([&] { return !member.left.empty(); }));
  stop = true;
  member.health.close(false, "", 0ms);
  flood.join();
  ::close(mine);
}

// Stands for a process that was stopped: the callback holds the health thread for longer than the
// timeout, while the peer's words wait unread and then cease.
TEST(whoever_was_stalled_judges_nobody_by_that_time) {
  std::atomic<int> lost{0};
  std::atomic<bool> stalled{false};
  Health health(0, kTimeout,
                {[&](const Failure& failure) { lost += failure.rank == 1; },
                 [&](int) {
                   if (!stalled.exchange(true)) std::this_thread::sleep_for(kWatched);
                 }});
  Wire watched(health, 1);
  Wire other(health, 2);
  watched.beat(1);
  other.say({ControlKind::kLeave, 0, 2, 2, 0, ""});  // stalls the thread
  const auto until = Clock::now() + kDeadline;
  while (!stalled && Clock::now() < until) std::this_thread::sleep_for(1ms);
  CHECK(stalled);
  // Woken up, it gives the peer a fresh start: at least one beat more before any judgement.
  for (int beats = 0; beats < 4; ++beats) CHECK(watched.next(true).has_value());
  watched.beat(1);
  CHECK_EQ(lost.load(), 0);
  while (lost == 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
  CHECK_EQ(lost.load(), 1);  // real silence afterwards is judged
}

TEST(a_link_replaced_by_a_newer_one_is_closed_and_is_no_loss) {
  Member member(0, kPatient);
  Wire first(member.health, 1);
  Wire second(member.health, 1);
  while (first.next(true)) {
  }
  second.beat(1);
  second.say({ControlKind::kLeave, 0, 1, 1, 0, ""});
  CHECK(member.hears([&] { return !member.left.empty(); }));
  CHECK(member.failures.empty());
}

TEST(closing_says_goodbye_and_is_bounded_and_idempotent) {
  Member member(0, kPatient);
  Wire wire(member.health, 1);
  const auto begun = Clock::now();
  member.health.close(true, "why not", 1s);
  member.health.close(false, "", 1s);
  CHECK(Clock::now() - begun < 10s);
  const auto goodbye = wire.next();
  CHECK(goodbye && goodbye->kind == ControlKind::kLeave && goodbye->code == 1);
  CHECK(goodbye && goodbye->rank == 0 && goodbye->text == "why not");
  CHECK(!wire.next().has_value());
  Wire late(member.health, 2);  // a link that comes too late is closed at once
  CHECK(!late.next().has_value());
  CHECK(member.failures.empty());
}

// A peer that reads nothing holds up neither beats nor the close, and costs bounded memory.
TEST(a_peer_that_does_not_read_holds_up_nothing) {
  Member member(0, kPatient);
  Wire deaf(member.health, 1);
  const Failure failure{FailureCode::kTimeout, -1, 0, 1, std::string(2000, 'x')};
  for (int i = 0; i < 5000; ++i) member.health.spread(failure);  // 10 MB
  const auto begun = Clock::now();
  member.health.close(false, "", 100ms);
  CHECK(Clock::now() - begun < 10s);
}

TEST(members_come_and_go_without_leaving_descriptors) {
  const int before = ::dup(0);
  for (int i = 0; i < 50; ++i) {
    Member a(0, kPatient);
    Member b(1, kPatient);
    connect(a, 0, b, 1);
  }
  const int after = ::dup(0);
  CHECK_EQ(before + 1, after);
  ::close(before);
  ::close(after);
}

}  // namespace
