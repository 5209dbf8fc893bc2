// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace commute {
namespace {

// How long the first sign of a broken link waits for the health thread, which often knows the
// cause.
constexpr std::chrono::milliseconds kBetterWord{300};

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", value);
  return text;
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

Engine::Engine(Settings settings, std::shared_ptr<Poller> poller)
    : settings_(settings), pid_(::getpid()), poller_(std::move(poller)) {
  const auto ranks = size_t(settings_.ranks);
  links_.rank = settings_.rank;
  links_.group = settings_.group;
  links_.epoch = settings_.epoch;
  links_.streams = std::vector<std::atomic<Stream*>>(ranks);
  links_.left = std::vector<std::atomic<bool>>(ranks);
  links_.signals.resize(ranks * kSignals);
  links_.finished.resize(ranks);
  links_.staging.resize(kPieceBytes);
  pairs_ = std::vector<std::atomic<Pair*>>(ranks);
}

Engine::~Engine() {
  if (::getpid() == pid_) {
    close(std::chrono::milliseconds(0));
    return;
  }
  // In a forked child the thread does not exist and the sockets are the parent's: touch neither.
  if (progress_thread_.joinable()) progress_thread_.detach();
  for (auto& stream : owned_streams_) (void)stream.release();
  for (auto& pair : owned_pairs_) (void)pair.release();
}

// --- links and plans ---

void Engine::add_link(int peer, std::unique_ptr<Link> link) {
  const std::lock_guard lock(mutex_);
  if (link->needs_system_calls()) has_sockets_.store(true);
  owned_streams_.push_back(std::make_unique<Stream>(std::move(link)));
  links_.streams[size_t(peer)].store(owned_streams_.back().get(), std::memory_order_release);
}

void Engine::add_pair_link(int peer, std::unique_ptr<Link> link) {
  const std::lock_guard lock(mutex_);
  if (link->needs_system_calls()) has_sockets_.store(true);
  owned_pairs_.push_back(std::make_unique<Pair>(settings_.rank, peer, settings_.group,
                                                settings_.epoch,
                                                std::make_unique<Stream>(std::move(link))));
  pairs_[size_t(peer)].store(owned_pairs_.back().get(), std::memory_order_release);
}

bool Engine::has_pair_link(int peer) const {
  return pairs_[size_t(peer)].load(std::memory_order_acquire) != nullptr;
}

Outboxes& Engine::share_memory(size_t slot_bytes, size_t room_bytes) {
  links_.outboxes =
      std::make_unique<Outboxes>(settings_.rank, settings_.ranks, slot_bytes, room_bytes);
  poller_->use_flag(links_.outboxes->doorbell_flag(), links_.outboxes->own());
  return *links_.outboxes;
}

void Engine::attach_outbox(int peer, int segment_fd, int event_fd) {
  std::shared_ptr<Segment> segment;
  try {
    segment = std::make_shared<Segment>(Segment::map(segment_fd, kCacheLineBytes));
  } catch (...) {
    ::close(event_fd);
    throw;
  }
  links_.outboxes->attach(peer, std::move(segment), event_fd);
}

std::shared_ptr<Executor> Engine::bind(Plan plan, size_t tile_bytes) {
  if (plan.rank != settings_.rank || plan.ranks != settings_.ranks)
    throw std::invalid_argument("the plan was made for another rank or group size");
  plan.check();
  return std::make_shared<Executor>(std::move(plan), tile_bytes, links_);
}

void Engine::begin_anew(uint32_t epoch, const std::vector<int>& near) {
  const std::lock_guard lock(mutex_);
  for (const int peer : near) links_.streams[size_t(peer)].store(nullptr);
  has_sockets_ = std::any_of(links_.streams.begin(), links_.streams.end(),
                             [](const auto& stream) { return stream.load() != nullptr; });
  submitted_ = 0;
  recorder_ = Recorder();
  links_.epoch = epoch;
}

// --- calls ---

void Engine::submit(const std::shared_ptr<Operation>& operation, bool background) {
  {
    const std::lock_guard lock(mutex_);
    const int peer = operation->peer;
    if (!operation->executor && (peer < 0 || peer >= settings_.ranks || !has_pair_link(peer)))
      throw std::invalid_argument("there is no link to rank " + std::to_string(peer) +
                                  "; add one before sending or receiving");
    if (operation->executor && operation->executor->plan().direct != (operation->array != nullptr))
      throw std::invalid_argument(
          "direct plans, and only they, need an array that all ranks reach");
    // First, as it may fail: an operation that was refused must not stay queued.
    if (background && !progress_thread_.joinable())
      progress_thread_ = std::thread([this] { background_loop(); });
    enqueue(operation, Clock::now());
    if (background) changed_.notify_all();
  }
  if (background) poller_->wake();  // somebody may be driving, asleep
}

// With mutex_.
void Engine::enqueue(const std::shared_ptr<Operation>& operation, Clock::time_point now) {
  number(*operation, now);
  if (operation->executor) {
    queue_.push_back(operation);
    has_queued_.store(true, std::memory_order_release);
  } else {
    posted_.push_back(operation);
    has_posted_.store(true, std::memory_order_release);
  }
}

// With mutex_: its place in the order of all calls, and in the recorder.
void Engine::number(Operation& operation, Clock::time_point now) {
  static const std::string kNoAlgorithm;
  if (failure_.code != FailureCode::kNone) throw Error(failure_);
  if (operation.executor) operation.sequence = ++submitted_;
  operation.record = recorder_.begin(
      operation, operation.executor ? operation.executor->plan().algorithm : kNoAlgorithm, now);
}

// Nothing else is under way, and it is a kernel; but a reduction of the caller's own may be Python,
// and let another thread call this engine meanwhile, which must not find mutex_ taken.
bool Engine::takes_at_once(const Operation& operation) const {
  return !driving_ && !running_ && queue_.empty() && withdrawing_.load() == 0 &&
         operation.executor->kernel() && operation.combine == nullptr;
}

// With mutex_, for what is taken at once: begins it, and looks for as long as others may spin. True
// when it has finished, also by failing.
bool Engine::poll(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Operation>& operation,
                  Clock::time_point now) {
  number(*operation, now);
  bool done = false;
  std::exception_ptr trouble;
  try {
    start(operation);
    for (int polls = may_spin_ ? kPolls : 1; polls > 0 && !done; --polls)
      done = running_->executor->advance() == Executor::Progress::kDone;
  } catch (...) {
    trouble = std::current_exception();
  }
  if (trouble) {
    driving_ = true;  // nobody else must touch what raised
    lock.unlock();
    guarded([&] { std::rethrow_exception(trouble); });
    lock.lock();
    stop_driving();
  } else if (done) {
    finish_running();
  }
  return operation->finished();
}

void Engine::begin(const std::shared_ptr<Operation>& operation, Clock::time_point now) {
  {
    std::unique_lock lock(mutex_);
    if (takes_at_once(*operation)) {
      poll(lock, operation, now);
      return;
    }
  }
  submit(operation, true);
}

bool Engine::run(const std::shared_ptr<Operation>& operation, Clock::time_point now,
                 Clock::time_point until) {
  std::unique_lock lock(mutex_);
  if (takes_at_once(*operation)) {
    if (poll(lock, operation, now)) return true;
  } else {
    enqueue(operation, now);
    if (driving_ || withdrawing_.load() > 0) return false;
  }
  waiters_.fetch_add(1);
  hold(lock, operation.get(), until);
  waiters_.fetch_sub(1);
  return operation->finished();
}

bool Engine::wait(const std::shared_ptr<Operation>& operation, Clock::time_point until) {
  if (operation->finished()) return true;
  waiters_.fetch_add(1);
  std::unique_lock lock(mutex_);
  while (!operation->finished()) {
    if (!driving_ && withdrawing_.load() == 0) {
      hold(lock, operation.get(), until);
      if (Clock::now() >= until) break;
      continue;
    }
    poller_->wake();  // the progress thread gives way
    if (changed_.wait_until(lock, until) == std::cv_status::timeout) break;
  }
  waiters_.fetch_sub(1);
  changed_.notify_all();
  return operation->finished();
}

bool Engine::withdraw(const std::shared_ptr<Operation>& receive) {
  std::unique_lock lock(mutex_);
  withdrawing_.fetch_add(1);
  while (driving_) {
    poller_->wake();
    changed_.wait_for(lock, kSlice);
  }
  withdrawing_.fetch_sub(1);
  changed_.notify_all();  // whoever gave way goes on once the lock is free
  if (receive->finished()) return false;
  const auto found = std::find(posted_.begin(), posted_.end(), receive);
  bool gone = found != posted_.end();
  if (gone) posted_.erase(found);
  Pair* pair = pairs_[size_t(receive->peer)].load(std::memory_order_acquire);
  if (!gone && pair != nullptr) gone = pair->withdraw(*receive);
  if (!gone) return false;
  std::erase(in_pairs_, receive);
  std::erase_if(busy_pairs_, [](const Pair* busy) { return busy->idle(); });
  receive->fail({FailureCode::kTimeout, receive->peer, settings_.rank, 0, "withdrawn"});
  recorder_.end(receive->record, *receive, Operation::State::kFailed, Clock::now());
  return true;
}

// --- failing ---

void Engine::fail(Failure failure) {
  {
    std::unique_lock lock(mutex_);
    if (failure_.code != FailureCode::kNone) return;
    const bool known = failure.rank >= 0 && failure.rank < settings_.ranks;
    if (failure.code == FailureCode::kPeerLost && known && links_.left[size_t(failure.rank)].load())
      failure.text = links_.goodbye();
    failure_ = failure;
    failed_.store(true);
    if (!driving_) drain();
  }
  changed_.notify_all();
  poller_->wake();
  if (failure.code != FailureCode::kClosed && on_failure_) on_failure_(failure);
}

Failure Engine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Engine::peer_left(int rank) {
  if (rank < 0 || rank >= settings_.ranks) return;
  {
    const std::lock_guard lock(mutex_);  // so that nobody misses it between a look and a wait
    links_.left[size_t(rank)].store(true);
  }
  changed_.notify_all();
  poller_->wake();  // the running operation may wait for its signal
}

// A link broke under the running operation. The health thread often knows why (the exception that
// ended the peer, a goodbye), so its word is awaited for a moment.
void Engine::broken(Failure failure) {
  if (failure.code == FailureCode::kPeerLost) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kBetterWord, [&] {
      return failure_.code != FailureCode::kNone ||
             (failure.rank >= 0 && links_.left[size_t(failure.rank)].load());
    });
  }
  fail(std::move(failure));
}

// Gives the failure to everything pending. With mutex_, as the driver or when there is none.
void Engine::drain() {
  const auto now = Clock::now();
  const auto give_up = [this, now](const std::shared_ptr<Operation>& operation) {
    recorder_.end(operation->record, *operation, Operation::State::kFailed, now);
    operation->fail(failure_);
  };
  if (running_ && links_.outboxes) links_.outboxes->give_up();
  if (running_) give_up(running_);
  running_.reset();
  for (const auto& operation : queue_) give_up(operation);
  queue_.clear();
  for (const auto& operation : posted_) give_up(operation);
  posted_.clear();
  for (Pair* pair : busy_pairs_) pair->fail(failure_);
  for (const auto& operation : in_pairs_)
    recorder_.end(operation->record, *operation, operation->state.load(), now);
  in_pairs_.clear();
  busy_pairs_.clear();
}

// --- driving ---

// Moves, and turns whatever is raised into the group's failure. Without mutex_.
template <class Move>
void Engine::guarded(Move move) {
  try {
    move();
  } catch (const Error& error) {
    broken(error.failure());
  } catch (const std::exception& error) {  // out of memory, say: never a reason to hang
    broken({FailureCode::kProtocol, -1, settings_.rank, 0,
            "rank " + std::to_string(settings_.rank) + " cannot go on: " + error.what()});
  }
}

// Takes the progress lock, which must be free, drives, and gives it back.
void Engine::hold(std::unique_lock<std::mutex>& lock, const Operation* target,
                  Clock::time_point until) {
  driving_ = true;
  lock.unlock();
  guarded([&] { drive(target, until); });
  lock.lock();
  stop_driving();
}

// With mutex_.
void Engine::stop_driving() {
  driving_ = false;
  // `fail` leaves this to the driver, who may have been on its way out.
  if (failure_.code != FailureCode::kNone) drain();
  changed_.notify_all();
}

// Raises Error, and whatever else goes wrong.
void Engine::drive(const Operation* target, Clock::time_point until) {
  for (;;) {
    if (target != nullptr && target->finished()) return;
    if (failed_.load(std::memory_order_acquire)) return;
    const bool moved = turn();
    const auto now = Clock::now();
    if (moved) {
      idle_since_ = Clock::time_point::max();
      if (now >= until || gives_way(target)) return;
    } else if (!idle_drive(target, now, until)) {
      return;
    }
  }
}

bool Engine::gives_way(const Operation* target) const {
  return withdrawing_.load() > 0 || (target == nullptr && waiters_.load() > 0);
}

// Nothing moved: climbs the ladder. False when the driver should stop.
bool Engine::idle_drive(const Operation* target, Clock::time_point now, Clock::time_point until) {
  if (gives_way(target)) return false;
  if (target == nullptr) {
    const std::lock_guard lock(mutex_);
    if (!work_left() || closing_) return false;
  }
  if (idle_since_ == Clock::time_point::max()) idle_since_ = now;
  const auto idle = now - idle_since_;
  if (may_spin_ && idle < kSpin) return true;
  if (crowded_ == 0 && idle < kYield && now < until) {
    give_way(now);
    return true;
  }
  if (crowded_ > 0) --crowded_;
  if (now >= until) return false;
  look_for_trouble(now, idle);
  poller_->about_to_sleep();
  if (turn()) {
    idle_since_ = Clock::time_point::max();
    return true;
  }
  if (failed_.load() || gives_way(target)) return true;  // both are looked at next
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - now);
  const auto nap = std::clamp<int64_t>(left.count(), 1, kSlice.count());
  const bool ready = poller_->sleep(static_cast<int>(nap));
  return ready || Clock::now() < until;
}

// Beside a process that computes, giving way costs its whole time slice, milliseconds, while a
// sleeper is scheduled at once when it is woken. So a long absence turns this rung of the ladder
// off for a while.
void Engine::give_way(Clock::time_point now) {
  const bool in_memory = running_ && running_->executor->plan().uses_outbox();
  const bool look = (!in_memory && has_sockets_.load(std::memory_order_relaxed)) ||
                    ++yields_ % kYieldsPerLook == 0;
  if (look && in_memory) spread_.look(*links_.outboxes, now);
  if (look && poller_->sleep(0)) return;
  sched_yield();
  if (Clock::now() - now > kSliceOfOthers) crowded_ = kCrowdedRests;
}

bool Engine::turn() {
  const bool collective = turn_collective();
  return turn_pairs() || collective;
}

bool Engine::turn_collective() {
  if (!running_) {
    if (!has_queued_.load(std::memory_order_acquire)) return false;
    std::shared_ptr<Operation> next;
    {
      const std::lock_guard lock(mutex_);
      if (queue_.empty()) {
        has_queued_.store(false, std::memory_order_relaxed);
        return false;
      }
      next = std::move(queue_.front());
      queue_.pop_front();
      running_ = next;  // so that `drain` finds it
    }
    start(next);  // may copy a large array: not under the mutex
  }
  const auto before = running_->executor->messages();
  const auto progress = running_->executor->advance();
  messages_.fetch_add(running_->executor->messages() - before, std::memory_order_relaxed);
  if (progress == Executor::Progress::kDone) {
    const std::lock_guard lock(mutex_);
    finish_running();
  }
  return progress != Executor::Progress::kBlocked;
}

void Engine::start(const std::shared_ptr<Operation>& operation) {
  running_ = operation;
  announced_ = false;
  idle_since_ = Clock::time_point::max();
  operation->state.store(Operation::State::kRunning, std::memory_order_relaxed);
  operation->executor->begin(*operation);
}

// With mutex_.
void Engine::finish_running() {
  recorder_.end(running_->record, *running_, Operation::State::kDone, Clock::now());
  running_->finish();  // from here on its owner may use it again
  running_.reset();
  waiting_for_.clear();
  changed_.notify_all();  // costs nothing when nobody waits for another thread's driving
}

void Engine::take_posted() {
  const std::lock_guard lock(mutex_);
  for (auto& operation : posted_) {
    Pair* pair = pairs_[size_t(operation->peer)].load(std::memory_order_acquire);
    pair->post(operation);
    in_pairs_.push_back(operation);
    if (std::find(busy_pairs_.begin(), busy_pairs_.end(), pair) == busy_pairs_.end())
      busy_pairs_.push_back(pair);
  }
  posted_.clear();
  idle_since_ = Clock::time_point::max();
  has_posted_.store(false, std::memory_order_relaxed);
}

bool Engine::turn_pairs() {
  if (has_posted_.load(std::memory_order_acquire)) take_posted();
  if (busy_pairs_.empty()) return false;
  bool moved = false;
  for (Pair* pair : busy_pairs_) moved |= pair->advance();
  if (!moved) return false;
  std::erase_if(busy_pairs_, [](const Pair* pair) { return pair->idle(); });
  const std::lock_guard lock(mutex_);
  std::erase_if(in_pairs_, [this](const std::shared_ptr<Operation>& operation) {
    if (!operation->finished()) return false;
    recorder_.end(operation->record, *operation, operation->state.load(), Clock::now());
    return true;
  });
  changed_.notify_all();
  return true;
}

// Called now and then while nothing moves.
void Engine::look_for_trouble(Clock::time_point now, Clock::duration idle) {
  if (running_ && idle >= kAnnounceAfter) {
    if (!std::exchange(announced_, true)) running_->executor->announce();
    running_->executor->look_around();
  }
  std::vector<int> missing;
  if (running_) missing = running_->executor->waiting_for();
  std::shared_ptr<Operation> late;  // behind the running one
  {
    const std::lock_guard lock(mutex_);
    waiting_for_ = missing;
    if (!running_)
      for (const Pair* pair : busy_pairs_) waiting_for_.push_back(pair->peer());
    for (const auto& operation : queue_)
      if (!late && now >= operation->deadline) late = operation;
  }
  if (running_) check_deadline(*running_, now, missing);
  if (late) check_deadline(*late, now, missing);
  for (const Pair* pair : busy_pairs_)
    for (const Operation* operation : pair->waiting())
      if (operation != nullptr) check_deadline(*operation, now, {pair->peer()});
}

void Engine::check_deadline(const Operation& operation, Clock::time_point now,
                            const std::vector<int>& missing) const {
  if (now < operation.deadline) return;
  std::string text = operation.call.describe();
  if (operation.executor)
    text = "operation " + std::to_string(operation.sequence) + ", " + text + ",";
  text += " timed out after " + seconds(operation.timeout_s) + " on rank " +
          std::to_string(settings_.rank);
  if (!missing.empty())
    text += ", waiting for rank" + std::string(missing.size() > 1 ? "s " : " ") + list(missing);
  throw Error({FailureCode::kTimeout, missing.empty() ? -1 : missing.front(), settings_.rank,
               operation.sequence,
               text + "; see whether that rank is slow, stopped, or never made this call"});
}

// --- the progress thread ---

bool Engine::work_left() const {
  return running_ || !queue_.empty() || !posted_.empty() || !busy_pairs_.empty();
}

void Engine::background_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] {
      return closing_ || (!driving_ && waiters_.load() == 0 && withdrawing_.load() == 0 &&
                          failure_.code == FailureCode::kNone && work_left());
    });
    if (closing_) return;
    hold(lock, nullptr, Clock::time_point::max());
  }
}

// --- the end ---

std::vector<int> Engine::waiting_for() const {
  const std::lock_guard lock(mutex_);
  return waiting_for_;
}

std::vector<Record> Engine::records() const {
  const std::lock_guard lock(mutex_);
  return recorder_.snapshot();
}

void Engine::close(std::chrono::milliseconds linger) {
  const bool was_sound = failure().code == FailureCode::kNone;
  fail({FailureCode::kClosed, -1, settings_.rank, 0, "the group is closed"});
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  poller_->wake();
  while (driving_) {
    poller_->wake();
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
  if (std::exchange(links_closed_, true)) return;
  std::thread progress = std::move(progress_thread_);
  std::vector<Stream*> streams;
  for (const auto& stream : owned_streams_) streams.push_back(stream.get());
  for (const auto& pair : owned_pairs_) streams.push_back(&pair->stream());
  lock.unlock();  // the health thread's news must not wait for what follows
  if (progress.joinable()) progress.join();
  const auto until = Clock::now() + (was_sound ? linger : std::chrono::milliseconds(0));
  for (Stream* stream : streams) stream->close(until);
}

}  // namespace commute
