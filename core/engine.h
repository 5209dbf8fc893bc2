// SPDX-License-Identifier: Apache-2.0
// The engine of one group on one rank: a queue of collectives, one sequence, one progress lock.
//
// Who moves bytes: whoever holds the progress lock. A blocking call or `wait` takes it and drives
// the queue on the caller's thread; a progress thread, started with the first asynchronous call,
// drives it when nobody waits, and gives way as soon as somebody does. Collectives run one at a
// time in the order in which they were submitted; each pair's messages move beside them.
//
// Waiting is a ladder: spin for kSpin where every rank has a core, look again for kYield while
// giving the core to others, then sleep in epoll, in slices, so that deadlines, interrupts and a
// caller's signals are seen.
//
// Failing: the first failure, from here or from the network, is final for the group. Every pending
// and later operation gets it, and `on_failure` is told once, so that the other ranks hear of it.
//
// Threads: every public function may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "executor.h"
#include "pair.h"
#include "poller.h"
#include "recorder.h"
#include "spread.h"

namespace commute {

// Shared from within: Python hands engines to the core as shared pointers, and `tell` keeps weak
// ones (bindings/engine.cc).
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  struct Settings {
    int rank = 0;
    int ranks = 1;
    uint32_t group = 0;
    uint32_t epoch = 1;
  };

  Engine(Settings settings, std::shared_ptr<Poller> poller);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return settings_.rank; }
  int ranks() const { return settings_.ranks; }
  const std::shared_ptr<Poller>& poller() const { return poller_; }

  // Whether waiting may begin with spinning: there is a core for each local rank.
  void may_spin(bool yes) { may_spin_ = yes; }

  // Links are added once per peer, at first use.
  void add_link(int peer, std::unique_ptr<Link> link);
  void add_pair_link(int peer, std::unique_ptr<Link> link);
  bool has_pair_link(int peer) const;
  // Makes this rank's outbox; peers attach it, and this rank theirs, before a plan uses outboxes.
  Outboxes& share_memory(size_t slot_bytes, size_t room_bytes = 0);
  // Takes ownership of both descriptors. Raises std::runtime_error.
  void attach_outbox(int peer, int segment_fd, int event_fd);

  // Of ranks that share memory.
  const Outboxes& outboxes() const { return *links_.outboxes; }

  // Of a peer whose outbox is attached.
  Doorbell doorbell(int peer) { return links_.outboxes->doorbell(peer); }

  std::shared_ptr<Executor> bind(Plan plan, size_t tile_bytes);
  // Counts operations from 1 again, in a new epoch, and uses the links to ranks that turned out to
  // be near no more (they are closed with the others: a peer may still be reading from one). All
  // ranks call this between the same operations.
  void begin_anew(uint32_t epoch, const std::vector<int>& near);

  // Queues the operation; `background` lets the progress thread run it. Raises Error when the group
  // has failed.
  void submit(const std::shared_ptr<Operation>& operation, bool background);
  // Queues a collective and drives it at once, for calls that are expected to be short; false when
  // it has not finished by `until`, or somebody else drives: `wait` for it then.
  bool run(const std::shared_ptr<Operation>& operation, Clock::time_point now,
           Clock::time_point until);
  // Queues a collective for the progress thread, but begins a kernel here and now, where nothing is
  // before it: what peers wait for is written when this returns, and `wait` or `done` does the
  // rest.
  void begin(const std::shared_ptr<Operation>& operation, Clock::time_point now);
  // Drives or waits until the operation has finished (true) or `until` has come (false).
  bool wait(const std::shared_ptr<Operation>& operation, Clock::time_point until);
  // Takes back a receive of which nothing has arrived; false when it is too late for that.
  bool withdraw(const std::shared_ptr<Operation>& receive);

  // Called once, without locks held, with the failure that broke the group, wherever it was
  // noticed: passing it on lets the news reach ranks that the coordinator cannot.
  void on_failure(std::function<void(const Failure&)> callback) {
    on_failure_ = std::move(callback);
  }
  void fail(Failure failure);
  Failure failure() const;
  // `rank` said goodbye: what it sent before still counts, what is wanted from it later is a loss.
  void peer_left(int rank);
  bool has_left(int rank) const { return links_.left[size_t(rank)].load(); }

  std::vector<int> waiting_for()
      const;  // ranks that held up the running operation when last looked
  std::vector<Record> records() const;
  uint64_t messages() const { return messages_.load(std::memory_order_relaxed); }

  // Fails what is pending, lets what was sent reach the peers (at most `linger`), closes the links.
  void close(std::chrono::milliseconds linger);

 private:
  static constexpr std::chrono::microseconds kSpin{1};
  static constexpr int kPolls = 200;  // of a kernel, about as long
  static constexpr std::chrono::microseconds kYield{200};
  // Asking sockets is a system call: while the running operation needs none, only every so often.
  static constexpr uint32_t kYieldsPerLook = 16;
  static constexpr std::chrono::milliseconds kSliceOfOthers{3};
  static constexpr uint32_t kCrowdedRests = 200;
  static constexpr std::chrono::milliseconds kSlice{100};
  static constexpr std::chrono::milliseconds kAnnounceAfter{100};

  void enqueue(const std::shared_ptr<Operation>& operation, Clock::time_point now);
  void number(Operation& operation, Clock::time_point now);
  bool takes_at_once(const Operation& operation) const;  // with mutex_
  bool poll(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Operation>& operation,
            Clock::time_point now);

  // For the holder of the progress lock.
  void stop_driving();
  void hold(std::unique_lock<std::mutex>& lock, const Operation* target, Clock::time_point until);
  void drive(const Operation* target, Clock::time_point until);
  bool gives_way(const Operation* target) const;
  bool
  turn();  // gives the running collective and every busy pair a turn; true when something moved
  bool turn_collective();
  bool turn_pairs();
  void take_posted();
  void start(const std::shared_ptr<Operation>& operation);
  void finish_running();
  template <class Move>
  void guarded(Move move);
  bool idle_drive(const Operation* target, Clock::time_point now, Clock::time_point until);
  void give_way(Clock::time_point now);
  void look_for_trouble(Clock::time_point now, Clock::duration idle);
  void check_deadline(const Operation& operation, Clock::time_point now,
                      const std::vector<int>& missing) const;
  void broken(Failure failure);
  void drain();

  void background_loop();
  bool work_left() const;  // with mutex_ and no driver, or as the driver

  const Settings settings_;
  const int pid_;  // of the process that made it: a forked child must not touch it
  std::shared_ptr<Poller> poller_;
  std::function<void(const Failure&)> on_failure_;

  // Used by the holder of the progress lock only (but links are added by any thread, once per
  // slot).
  Links links_;
  std::vector<std::atomic<Pair*>> pairs_;  // by rank
  std::vector<Pair*> busy_pairs_;
  std::vector<std::shared_ptr<Operation>> in_pairs_;  // their operations, for the recorder
  std::shared_ptr<Operation> running_;
  bool announced_ = false;
  Clock::time_point idle_since_ = Clock::time_point::max();  // max: something moved just now
  bool may_spin_ = false;
  uint32_t yields_ = 0;
  Spread spread_;
  uint32_t crowded_ = 0;  // rests left to take asleep, because somebody else computes on our cores

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool driving_ = false;  // the progress lock, as a flag so that it can be waited for
  std::deque<std::shared_ptr<Operation>> queue_;
  std::deque<std::shared_ptr<Operation>> posted_;  // sends and receives not yet given to their pair
  std::vector<std::unique_ptr<Stream>> owned_streams_;
  std::vector<std::unique_ptr<Pair>> owned_pairs_;
  uint64_t submitted_ = 0;
  bool closing_ = false;
  bool links_closed_ = false;
  Failure failure_;
  std::vector<int> waiting_for_;
  Recorder recorder_;
  std::thread progress_thread_;

  // Looked at without the mutex.
  std::atomic<bool> failed_{false};
  std::atomic<bool> has_sockets_{false};  // some link is found ready by a system call only
  std::atomic<bool> has_posted_{false};
  std::atomic<bool> has_queued_{false};
  std::atomic<int> waiters_{0};
  std::atomic<int> withdrawing_{0};  // threads for which every driver gives way
  std::atomic<uint64_t> messages_{0};
};

}  // namespace commute
