// SPDX-License-Identifier: Apache-2.0
// A worker's end of the store: the client machine, its channels, and who moves the bytes.
//
// Whoever calls moves what can be moved at once; whoever waits drives until its call is done. A
// background thread drives when something is left that nobody waits for: asynchronous calls, and
// pushes for which a channel had no room. One thread at a time rests (yields, or sleeps in the
// poller), the others wait for it to have something to tell.
//
// In a world of one the shard is embedded: messages pass between the two machines on the caller's
// thread.
//
// Threads: every public function may be called from any thread. `mutex_` guards machine, channels
// and all else; it is not held while resting.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "failure.h"
#include "store/channel.h"
#include "store/client.h"
#include "store/ladder.h"
#include "store/replay.h"
#include "store/shard.h"

namespace commute {

class Endpoint {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Endpoint(Client::Settings settings);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // The shard lives in this process. Instead of channels.
  void embed(uint32_t slots, std::shared_ptr<Replay> replay);
  // Takes ownership of both descriptors; also for a shard whose channel broke.
  void add_channel(int shard, int socket, int segment);
  // Whether waiting may begin with spinning: there is a core for everybody on this host.
  void may_spin(bool yes) { ladder_.may_spin(yes); }
  std::vector<int> broken() const;  // shards without a channel

  // Who moves what a call began and could not be moved at once.
  enum class Then : uint8_t {
    kReturn,      // the background thread, if anything is left to be sent
    kWait,        // the caller, who waits for it now
    kBackground,  // the background thread, until it is answered
  };

  // Calls f(client) and moves what can be moved. Raises Error when the store has failed.
  template <class F>
  auto call(Then then, F f) {
    check_process();
    const std::lock_guard lock(mutex_);
    if (failure_.code != FailureCode::kNone) throw Error(failure_);
    struct After {
      Endpoint& self;
      Then then;
      ~After() { self.after_call(then); }
    } after{*this, then};
    return f(client_);
  }
  // Within `call`: moves what can be moved already.
  void move() { turn(); }
  Client::Order order_of(std::span<const uint64_t> keys) const { return client_.order_of(keys); }
  Client::Order distinct_of(std::span<const uint64_t> keys, uint32_t* index,
                            bool come_again) const {
    return client_.distinct_of(keys, index, come_again);
  }
  // Without moving anything, also of a store that has failed.
  template <class F>
  auto look(F f) {
    check_process();
    const std::lock_guard lock(mutex_);
    return f(client_);
  }
  // Drives until the call is done (true); false at `until`, or when a channel is broken. Raises
  // Error when the store has failed.
  bool wait(uint64_t call, Clock::time_point until);
  bool wait_flushed(Clock::time_point until);

  void fail(Failure failure);
  void close();

 private:
  static constexpr std::chrono::milliseconds kSlice{100};

  // Before the mutex is taken: in a forked child whoever held it does not exist. Raises Error.
  void check_process() const {
    if (::getpid() != pid_)
      throw Error({FailureCode::kClosed, -1, -1, 0, "the store was made before a fork"});
  }
  template <class Done>
  bool drive(std::unique_lock<std::mutex>& lock, Clock::time_point until, bool background,
             Done done);
  void rest(std::unique_lock<std::mutex>& lock, Clock::time_point until);
  void after_call(Then then);  // with mutex_, as all below
  bool turn();
  bool turn_channel(size_t shard);
  void tell_core();
  bool turn_embedded();
  void retire(size_t shard);
  // Whether the background thread has something to do, and nobody else does it.
  bool is_its_turn() const {
    return closing_ ||
           (wants_background_ && waiters_ == 0 && !resting_ && failure_.code == FailureCode::kNone);
  }
  void tell_others();
  void background_loop();

  std::shared_ptr<Poller> poller_ = std::make_shared<Poller>();
  const int pid_;  // of the process that made it: a forked child must not touch it

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // for those who wait while another rests
  // The background thread's own: woken at every rest of another it would take a core from those
  // who work (10,000 rows in 2 ms instead of 1).
  std::condition_variable your_turn_;
  Client client_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by shard
  std::vector<std::unique_ptr<Channel>> retired_;
  std::unique_ptr<Shard> embedded_;
  std::shared_ptr<Replay> replay_;  // of the embedded shard
  Ladder ladder_;
  bool resting_ = false;
  int waiters_ = 0;
  bool wants_background_ = false;
  bool wants_answers_ = false;  // not only to be sent
  bool closing_ = false;
  Failure failure_;
  std::thread background_;
};

// The arrays of a worker's devices as one contribution, scaled where asked; never null.
Client::Owner gather(const TableSpec& spec, const std::vector<const std::byte*>& arrays,
                     const std::byte* scale);

}  // namespace commute
