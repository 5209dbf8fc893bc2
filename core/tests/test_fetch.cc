// SPDX-License-Identifier: Apache-2.0
// The kernel that fetches blocks where they are (executor_fetch.cc), by threads as ranks; and the
// trial of its two forms.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <string>
#include <system_error>

#include "../trial.h"
#include "ranks.h"

namespace {

using namespace commute;
using namespace commute::check;
using Array = std::vector<int64_t>;

constexpr size_t kTile = 64;
const LinkKind& kLink = kLinkKinds[1];

// Element i of what one rank has for another in a round.
int64_t element(int from, int to, int round, size_t i) {
  return from * 1'000'000 + to * 10'000 + round * 100 + int64_t(i % 97);
}

Array sent(int rank, int ranks, int round, size_t count) {
  Array array;
  for (int to = 0; to < ranks; ++to)
    for (size_t i = 0; i < count; ++i) array.push_back(element(rank, to, round, i));
  return array;
}

// The block that came from a rank, in the array of `rank`.
bool came(const Array& out, int from, int rank, int round, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (out[size_t(from) * count + i] != element(from, rank, round, i)) return false;
  return true;
}

bool all_came(const Array& out, int rank, int ranks, int round, size_t count) {
  for (int from = 0; from < ranks; ++from)
    if (!came(out, from, rank, round, count)) return false;
  return true;
}

// One alltoall after the other; arrays are overwritten as soon as a call returns.
void exchange(int size, int rounds, size_t count) {
  Ranks ranks(size, kLink);
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(fetch_of(rank, size, Collective::kAlltoall), kTile);
    for (int round = 0; round < rounds; ++round) {
      Array in = sent(rank, size, round, count), out(in.size());
      CHECK(finish(engine, submit(engine, executor, in.data(), out.data(), count)));
      std::fill(in.begin(), in.end(), -1);
      CHECK(all_came(out, rank, size, round, count));
    }
  });
}

// --- who comes when ---

TEST(who_has_called_need_not_wait_for_who_comes_last) {
  constexpr size_t kCount = 100;
  for (int last = 0; last < 4; ++last) {
    Ranks ranks(4, kLink);
    std::atomic<int> served{0};
    ranks.run([&](int rank, Engine& engine) {
      const auto executor = engine.bind(fetch_of(rank, 4, Collective::kAlltoall), kTile);
      const Array in = sent(rank, 4, 0, kCount);
      Array out(in.size());
      if (rank == last) CHECK(eventually([&] { return served == 3; }));
      const auto operation = submit(engine, executor, in.data(), out.data(), kCount);
      // Nobody but this thread drives, so between two waits the array may be looked at.
      const auto has_others = [&] {
        CHECK(!engine.wait(operation, Clock::now() + 5ms));
        for (int from = 0; from < 4; ++from)
          if (from != last && !came(out, from, rank, 0, kCount)) return false;
        return true;
      };
      if (rank != last) {
        CHECK(eventually(has_others));
        ++served;
      }
      CHECK(finish(engine, operation));
      CHECK(all_came(out, rank, 4, 0, kCount));
    });
  }
}

TEST(all_who_are_missing_are_named) {
  Ranks ranks(4, kLink);
  const auto executor = ranks[0].bind(fetch_of(0, 4, Collective::kAlltoall), kTile);
  const Array in = sent(0, 4, 0, 8);
  Array out(in.size());
  const auto operation = submit(ranks[0], executor, in.data(), out.data(), 8);
  CHECK(!ranks[0].wait(operation, Clock::now() + 50ms));
  CHECK(ranks[0].waiting_for() == (std::vector<int>{1, 2, 3}));
}

TEST(who_is_read_waits_for_the_slowest_reader) {
  Ranks ranks(3, kLink);
  std::atomic<bool> looked{false};
  ranks.run([&](int rank, Engine& engine) {
    const auto executor = engine.bind(fetch_of(rank, 3, Collective::kScatter, 1), kTile);
    const Array in = sent(1, 3, 0, 50);
    Array out(50);
    if (rank == 2) CHECK(eventually([&] { return looked.load(); }));
    const auto operation =
        submit(engine, executor, rank == 1 ? in.data() : nullptr, out.data(), 50);
    if (rank == 1) {
      CHECK(!engine.wait(operation, Clock::now() + 50ms));
      looked = true;
    }
    CHECK(finish(engine, operation));
    for (size_t i = 0; i < 50; ++i) CHECK_EQ(out[i], element(1, rank, 0, i));
  });
}

// --- lines ---

TEST(lines_are_used_again_and_again) {
  for (const size_t count : {0, 1, 7, 100}) exchange(3, 200, count);
}

TEST(more_ranks_than_the_short_payload_has_room_for) {
  exchange(16, 6, 5);
  exchange(20, 6, 5);
}

// --- where arrays lie ---

// The room for an array that begins so many bytes behind a page's begin.
std::byte* placed(std::vector<std::byte>& room, size_t bytes, size_t behind) {
  constexpr size_t kPage = 4096;
  room.resize(bytes + 2 * kPage);
  return room.data() + -reinterpret_cast<uintptr_t>(room.data()) % kPage + behind;
}

// Long enough to be tried in both forms, small ones through the caches and large ones past them.
TEST(arrays_may_lie_anywhere_in_their_pages) {
  for (const auto& [count, rounds] : {std::pair{size_t{9'001}, 24}, std::pair{size_t{300'001}, 18}})
    for (const auto& [from, to] : {std::pair{0, 16}, std::pair{16, 0}, std::pair{48, 56}}) {
      Ranks ranks(2, kLink);
      ranks.run(
          [&, count = count, rounds = rounds, from = from, to = to](int rank, Engine& engine) {
            const auto executor = engine.bind(fetch_of(rank, 2, Collective::kAlltoall), kTile);
            std::vector<std::byte> in_room, out_room;
            const size_t bytes = 2 * count * sizeof(int64_t);
            auto* const in = reinterpret_cast<int64_t*>(placed(in_room, bytes, size_t(from)));
            auto* const out = reinterpret_cast<int64_t*>(placed(out_room, bytes, size_t(to)));
            for (int round = 0; round < rounds; ++round) {
              std::ranges::copy(sent(rank, 2, round, count), in);
              CHECK(finish(engine, submit(engine, executor, in, out, count)));
              CHECK(all_came(Array(out, out + 2 * count), rank, 2, round, count));
            }
          });
    }
}

// --- rooms ---

TEST(what_lies_in_the_room_of_a_peer_is_mapped_here) {
  constexpr size_t kSlot = 4096, kRoom = 1 << 20, kBytes = 10'000;
  Outboxes mine(0, 2, kSlot, kRoom);
  const Outboxes theirs(1, 2, kSlot, kRoom);
  // Mapped once more, as by another process.
  mine.attach(1, std::make_shared<Segment>(Segment::map(::dup(theirs.own()->fd()), kSlot)), -1);
  const size_t at = theirs.arena()->take(kBytes).value();
  std::byte* const array = theirs.arena()->data(at);
  const auto place = reinterpret_cast<uintptr_t>(array);
  const std::byte* const here = mine.in_room_of(1, place, kBytes);
  CHECK(here != nullptr && here != array);
  for (size_t i = 0; i < kBytes; ++i) array[i] = std::byte(i % 251);
  CHECK(std::equal(here, here + kBytes, array));
  CHECK(mine.in_room_of(1, place + 16, kBytes - 16) == here + 16);

  const auto begin = reinterpret_cast<uintptr_t>(theirs.own()->data());
  const uintptr_t end = begin + theirs.own()->bytes();
  CHECK(mine.in_room_of(1, end - kBytes, kBytes) != nullptr);
  CHECK(mine.in_room_of(1, end - kBytes + 1, kBytes) == nullptr);
  CHECK(mine.in_room_of(1, end, 0) != nullptr);
  CHECK(mine.in_room_of(1, end + 1, 0) == nullptr);
  CHECK(mine.in_room_of(1, place - 1, kBytes) == nullptr);  // the slots lie before the room
  CHECK(mine.in_room_of(1, begin, 8) == nullptr);
  CHECK(mine.in_room_of(1, begin - 1, 8) == nullptr);
  CHECK(mine.in_room_of(1, place, kRoom + 1) == nullptr);
  Array elsewhere(9);
  CHECK(mine.in_room_of(1, reinterpret_cast<uintptr_t>(elsewhere.data()), 72) == nullptr);
}

// --- giving up ---

// As rank 1 calls, fails and lets go of its array before rank 0 looks.
void give_up_before_it_is_read(Collective collective, bool in_room) {
  Ranks ranks(2, kLink);
  ranks[1].on_failure({});  // the news does not travel: rank 0 has to see it itself
  Array elsewhere = sent(1, 2, 0, 9), out(elsewhere.size());
  std::span<int64_t> in = elsewhere;
  if (in_room) {
    Arena& arena = *ranks[1].outboxes().arena();
    in = {reinterpret_cast<int64_t*>(arena.data(arena.take(4096).value())), elsewhere.size()};
    std::ranges::copy(elsewhere, in.begin());
  }
  const auto given_up = submit(ranks[1], ranks[1].bind(fetch_of(1, 2, collective, 1), kTile),
                               in.data(), out.data(), 9);
  CHECK(!ranks[1].wait(given_up, Clock::now() + 10ms));
  ranks[1].fail({FailureCode::kTimeout, 0, 1, 1, "it took too long"});
  CHECK(given_up->finished());
  std::fill(in.begin(), in.end(), -1);

  const Array mine = sent(0, 2, 0, 9);
  Array got(mine.size());
  const auto operation = submit(ranks[0], ranks[0].bind(fetch_of(0, 2, collective, 1), kTile),
                                mine.data(), got.data(), 9);
  CHECK(settled(ranks[0], operation));
  CHECK(operation->state.load() == Operation::State::kFailed);
  CHECK(operation->failure.code == FailureCode::kPeerLost);
  CHECK_EQ(operation->failure.rank, 1);
  CHECK(operation->failure.text.find("gave this call up") != std::string::npos);
}

TEST(a_block_of_who_gave_up_is_no_result) {
  for (const bool in_room : {false, true}) {
    give_up_before_it_is_read(Collective::kAlltoall, in_room);
    give_up_before_it_is_read(Collective::kScatter, in_room);
  }
}

// Each call of rank 1 is complete when it closes, so it gives nothing up.
TEST(who_leaves_after_its_last_call_gave_nothing_up) {
  for (int round = 0; round < 20; ++round) {
    Ranks ranks(3, kLink);
    ranks.run([&](int rank, Engine& engine) {
      const auto executor = engine.bind(fetch_of(rank, 3, Collective::kAlltoall), kTile);
      const Array in = sent(rank, 3, round, 1000);
      Array out(in.size());
      CHECK(finish(engine, submit(engine, executor, in.data(), out.data(), 1000)));
      CHECK(all_came(out, rank, 3, round, 1000));
      if (rank != 1) return;
      engine.close(std::chrono::milliseconds(0));
      for (const int peer : {0, 2}) ranks[peer].peer_left(1);
    });
  }
}

// --- another process ---

struct Whereabouts {
  int segment_fd;
  uintptr_t array;
};

// A process that tells where its outbox and its array are and, when it is told to, stops being who
// it was: its outbox is not there any more, though its array is.
[[noreturn]] void be_read(int told, int tells) {
  const Outboxes theirs(1, 2, Ranks::kSlotBytes);
  const int64_t array[] = {42, 43};
  const Whereabouts said{theirs.own()->fd(), reinterpret_cast<uintptr_t>(array)};
  char word = 0;
  bool ok = ::write(tells, &said, sizeof said) == sizeof said && ::read(told, &word, 1) == 1;
  ok = ok && ::mmap(theirs.own()->data(), 4096, PROT_READ | PROT_WRITE,
                    MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
  ok = ok && ::write(tells, &word, 1) == 1 && ::read(told, &word, 1) == 1;
  ::_exit(ok ? 0 : 1);
}

// False when there is no such peer, or no such array any more.
bool fetches(const Outboxes& mine, uintptr_t from) {
  int64_t got[2] = {};
  try {
    mine.fetch(1, from, reinterpret_cast<std::byte*>(got), sizeof got);
  } catch (const std::system_error&) {
    return false;
  }
  return got[0] == 42 && got[1] == 43;
}

void read_other_process(pid_t pid, int tells, int told) {
  Whereabouts at{};
  CHECK(::read(told, &at, sizeof at) == sizeof at);
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(at.segment_fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;  // this host lets nobody look into other processes
  Outboxes mine(0, 2, Ranks::kSlotBytes);
  mine.attach(1, std::make_shared<Segment>(Segment::map(fd, 4096)), ::dup(tells));
  if (!mine.can_fetch()) return;  // likewise
  CHECK(fetches(mine, at.array));
  CHECK(!fetches(mine, 4096));
  char word = 1;
  CHECK(::write(tells, &word, 1) == 1 && ::read(told, &word, 1) == 1);
  CHECK(!fetches(mine, at.array));
  CHECK(!mine.can_fetch());
}

TEST(another_process_is_read_only_while_it_is_that_of_the_peer) {
  int there[2], back[2];
  CHECK(::pipe2(there, O_CLOEXEC) == 0 && ::pipe2(back, O_CLOEXEC) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) be_read(there[0], back[1]);
  CHECK(pid > 0);
  if (pid > 0) {
    read_other_process(pid, there[1], back[0]);
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  for (const int fd : {there[0], there[1], back[0], back[1]}) ::close(fd);
}

// --- the two forms ---

TEST(large_blocks_are_the_same_by_both_forms) {
  const size_t count = kStreamedBytes / 2 / sizeof(int64_t) + 3;
  exchange(2, Trial::kSamples + 4, count);  // both ranks note into one trial
}

// Notes samples as a caller would, until the trial is settled.
Trial::Form winner(Trial& trial, double first, double second) {
  for (int i = 0; i < 2 * Trial::kSamples; ++i) {
    const Trial::Form form = trial.next();
    trial.note(form, form == Trial::kFirst ? first : second);
  }
  return trial.next();
}

TEST(the_quicker_form_wins) {
  Trial one, other, equal;
  CHECK_EQ(winner(one, 1e-9, 2e-9), Trial::kFirst);
  CHECK_EQ(winner(other, 2e-9, 1e-9), Trial::kSecond);
  CHECK_EQ(winner(equal, 1e-9, 1e-9), Trial::kFirst);
}

TEST(one_form_after_the_other_and_the_quickest_sample_counts) {
  Trial trial;
  int second = 0;
  for (int i = 0; i < 2 * Trial::kSamples; ++i) {
    const Trial::Form form = trial.next();
    CHECK_EQ(form, i < Trial::kSamples ? Trial::kFirst : Trial::kSecond);
    second += form == Trial::kSecond;
    // The first form is quick but once; the second never quite so quick, but always.
    trial.note(form, form == Trial::kSecond ? 2e-9 : i == 4 ? 1e-9 : 1e-6);
  }
  CHECK_EQ(second, Trial::kSamples);
  CHECK_EQ(trial.next(), Trial::kFirst);
  trial.note(Trial::kSecond, 1e-12);  // too late
  CHECK_EQ(trial.next(), Trial::kFirst);
}

TEST(a_trial_is_noted_by_many_threads) {
  Trial trial;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { CHECK_EQ(winner(trial, 3e-9, 2e-9), Trial::kSecond); });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(trial.next(), Trial::kSecond);
}

}  // namespace
