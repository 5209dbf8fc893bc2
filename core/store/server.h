// SPDX-License-Identifier: Apache-2.0
// A server: some shards, each owned by one thread, and the channels of their clients.
//
// Threads: each shard's thread alone touches its machine and its channels. What comes from outside
// (new channels, news of members) is left in the shard's mailbox, under a mutex, and its poller
// woken. Every public function may be called from any thread.
//
// Observers come and go while it runs, by numbers that are not used twice. When one goes its
// channels are closed, and nothing of it is kept. A channel whose worker is known carries messages
// of that worker only.
//
// Fairness: in each turn every channel gets its answers sent, and one message taken. A client that
// has many messages under way (it floods, or moves a large array) can keep this thread busy without
// end, and itself, and on a host short of cores those who wait for one answer at a time would miss
// both. There it gives way while such are around: it has a fortieth of the thread's time. One that
// waits for the last of many is not such a one: two of them would hold each other back. One that
// does not read holds at most what the shard lets it owe (shard.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "spread.h"
#include "store/channel.h"
#include "store/ladder.h"
#include "store/replay.h"
#include "store/shard.h"
#include "store/status.h"

namespace commute {

class Server {
 public:
  struct Settings {
    uint32_t workers = 1;      // 0: observers only
    uint32_t first_shard = 0;  // the number of this server's first shard among all
    uint32_t shards = 1;       // of this server
    uint32_t all_shards = 1;
    uint32_t slots = kSlots;
    bool may_spin = false;  // there is a core for everybody on this host
  };
  struct Counts {
    uint64_t pushes = 0;
    uint64_t channels = 0;  // open now
    uint64_t refused = 0;   // channels closed because of bytes that no client sends
  };

  explicit Server(Settings settings, std::shared_ptr<Replay> replay = nullptr);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Takes ownership of `socket` and, unless it is -1, of `segment`. Raises std::runtime_error.
  // `worker` is who dialled; -1 where that is not known.
  void add_channel(uint32_t shard, int socket, int segment, int64_t worker = -1);
  void on_lost(uint32_t worker);
  void on_left(uint32_t worker);
  void on_came(uint32_t observer);  // before its first channel
  void on_gone(uint32_t observer);

  // Waits until every worker has left or is lost, at most so long; true when they have.
  bool wait_until_over(std::chrono::milliseconds at_most);
  Counts counts() const;
  // What each shard holds, in their order; asks their threads. Empty once it is closed.
  std::vector<ShardStatus> status();
  std::vector<uint32_t> lost() const;  // workers
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kGiveWay = 39;  // so many times what its last message took
  static constexpr std::chrono::microseconds kStretch{100};
  static constexpr std::chrono::milliseconds kAround{1};
  static constexpr std::chrono::milliseconds kSlice{1000};

  struct Mail {
    std::unique_ptr<Channel> channel = nullptr;
    int64_t worker = -1;  // of the channel
    int64_t lost = -1;
    int64_t left = -1;
    int64_t came = -1;
    int64_t gone = -1;
    std::shared_ptr<std::promise<ShardStatus>> asks = nullptr;
  };
  struct Client {
    int link;
    std::unique_ptr<Channel> channel;
    int64_t worker = -1;
    ClientStatus counted{};
    Clock::time_point waited{};      // for its answer: when the last such was served
    Clock::time_point many{};        // under way: the same
    Clock::duration used{};          // with many under way, since it last gave way
    Clock::time_point not_before{};  // gives way until then
  };
  struct Desk {  // of one shard's thread
    Desk(const Shard::Settings& settings, Shard::Record record)
        : shard(settings, std::move(record)) {}

    Shard shard;
    std::shared_ptr<Poller> poller = std::make_shared<Poller>();
    std::vector<Client> clients;
    int last_link = 0;
    bool holds_back = false;  // a client that gives way
    Ladder ladder;
    Spread spread;
    std::atomic<int> core{-1};  // where its thread was last seen
    std::mutex mutex;           // guards the mail
    std::vector<Mail> mail;
    std::atomic<bool> has_mail{false};
    std::atomic<uint64_t> pushes{0};
    std::atomic<uint64_t> open{0};
    std::atomic<uint64_t> refused{0};
    std::thread thread;
  };

  void run(Desk& desk);
  bool turn(Desk& desk);
  void spread(Desk& desk);
  bool serve(Desk& desk, Client& client) const;
  bool gives_way(Desk& desk, Client& client) const;
  void take_mail(Desk& desk);
  static void read(Desk& desk, Mail& letter);
  static ShardStatus status_of(const Desk& desk);
  void post(Desk& desk, Mail mail);
  void member_gone(uint32_t worker);

  const Settings settings_;
  std::shared_ptr<Replay> replay_;
  std::vector<std::unique_ptr<Desk>> desks_;
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<bool> gone_;
  std::vector<uint32_t> lost_;
};

}  // namespace commute
