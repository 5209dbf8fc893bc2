// SPDX-License-Identifier: Apache-2.0
#include "store/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kernels.h"

namespace commute {
namespace {

// Each element by `scale`, a block at a time, so that the kernels do it.
void multiply(const TableSpec& spec, std::vector<std::byte>& array, const std::byte* scale) {
  const size_t item = item_bytes(spec.dtype);
  constexpr size_t kBlock = 512;
  std::vector<std::byte> factors(kBlock * item);
  for (size_t i = 0; i < kBlock; ++i) std::copy_n(scale, item, &factors[i * item]);
  const auto times = kernels().reduce_for(spec.dtype, spec.update.times);
  for (size_t at = 0; at < spec.count; at += kBlock) {
    std::byte* block = array.data() + at * item;
    times(block, factors.data(), block, std::min<size_t>(kBlock, spec.count - at));
  }
}

}  // namespace

Endpoint::Endpoint(Client::Settings settings)
    : pid_(::getpid()), client_(settings), channels_(settings.shards) {}

Endpoint::~Endpoint() {
  if (::getpid() == pid_) {
    close();
    return;
  }
  if (background_.joinable()) background_.detach();  // it does not exist in a forked child
  for (auto& channel : channels_) (void)channel.release();
}

void Endpoint::embed(uint32_t slots, std::shared_ptr<Replay> replay) {
  const std::lock_guard lock(mutex_);
  replay_ = std::move(replay);
  embedded_ = std::make_unique<Shard>(Shard::Settings{1, 0, 1, slots, Planted::kNone},
                                      Replay::recorder(replay_));
}

void Endpoint::add_channel(int shard, int socket, int segment) {
  auto channel = make_channel(socket, segment, true, poller_);
  const std::lock_guard lock(mutex_);
  if (channels_.at(size_t(shard))) retire(size_t(shard));
  channels_[size_t(shard)] = std::move(channel);
  client_.on_link(shard, true);
  after_call(Then::kReturn);
}

std::vector<int> Endpoint::broken() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> found;
  for (size_t shard = 0; shard < channels_.size() && !embedded_; ++shard)
    if (!channels_[shard]) found.push_back(int(shard));
  return found;
}

// --- waiting ---

bool Endpoint::wait(uint64_t call, Clock::time_point until) {
  check_process();
  std::unique_lock lock(mutex_);
  return drive(lock, until, false, [&] { return client_.done(call); });
}

bool Endpoint::wait_flushed(Clock::time_point until) {
  check_process();
  std::unique_lock lock(mutex_);
  if (failure_.code != FailureCode::kNone) throw Error(failure_);  // what was pushed may be lost
  return drive(lock, until, false, [&] { return client_.flushed(); });
}

template <class Done>
bool Endpoint::drive(std::unique_lock<std::mutex>& lock, Clock::time_point until, bool background,
                     Done done) {
  if (done()) return true;
  waiters_ += !background;
  if (resting_) poller_->wake();  // the background thread gives way
  struct Leave {
    Endpoint& self;
    bool background;
    ~Leave() {
      self.waiters_ -= !background;
      self.tell_others();
    }
  } leave{*this, background};
  for (;;) {
    if (failure_.code != FailureCode::kNone) {
      if (background) return false;
      throw Error(failure_);
    }
    const bool moved = turn();
    if (moved) ladder_.moved();
    if (done()) return true;
    if (moved) {
      if (waiters_ > 1) changed_.notify_all();
      continue;
    }
    const bool cut =
        !embedded_ && std::find(channels_.begin(), channels_.end(), nullptr) != channels_.end();
    if (cut || Clock::now() >= until || (background && (waiters_ > 0 || closing_))) return false;
    if (resting_)
      changed_.wait_until(lock, std::min(until, Clock::now() + kSlice));
    else
      rest(lock, until);
  }
}

void Endpoint::rest(std::unique_lock<std::mutex>& lock, Clock::time_point until) {
  resting_ = true;
  if (ladder_.should_spread()) tell_core();
  const bool sockets = std::any_of(channels_.begin(), channels_.end(), [](const auto& channel) {
    return channel && channel->needs_system_calls();
  });
  lock.unlock();
  const bool again = ladder_.rest(*poller_, sockets);
  lock.lock();
  if (!again) {
    poller_->about_to_sleep();
    for (auto& channel : channels_)
      if (channel) channel->about_to_sleep();
    if (!turn() && !closing_ && failure_.code == FailureCode::kNone) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      lock.unlock();
      poller_->sleep(int(std::clamp<int64_t>(left.count(), 1, kSlice.count())));
      lock.lock();
      tell_core();  // most often that of the shard which has woken us
    }
    for (auto& channel : channels_)
      if (channel) channel->awake();
  }
  resting_ = false;
  retired_.clear();
  tell_others();
}

void Endpoint::tell_others() {
  changed_.notify_all();
  if (is_its_turn()) your_turn_.notify_one();
}

// --- moving ---

void Endpoint::after_call(Then then) {
  const bool moved = turn();
  if (moved && resting_) poller_->wake();
  if (embedded_ || then == Then::kWait || (then == Then::kReturn && client_.idle())) return;
  wants_background_ = true;
  wants_answers_ |= then == Then::kBackground;
  if (!background_.joinable() && !closing_)
    background_ = std::thread([this] { background_loop(); });
  tell_others();
}

bool Endpoint::turn() {
  if (embedded_) return turn_embedded();
  bool moved = false;
  for (size_t shard = 0; shard < channels_.size(); ++shard) {
    if (!channels_[shard]) continue;
    try {
      moved |= turn_channel(shard);
    } catch (const LinkClosed&) {
      retire(shard);
      moved = true;
    }
  }
  return moved;
}

// Whoever rests in the poller may hold an event of the channel: it is ended after that.
void Endpoint::retire(size_t shard) {
  client_.on_link(int(shard), false);
  if (resting_)
    retired_.push_back(std::move(channels_[shard]));
  else
    channels_[shard].reset();
}

// Shards keep out of the way of those they serve; if both did, they would chase each other.
void Endpoint::tell_core() {
  const int core = ::sched_getcpu();
  for (auto& channel : channels_)
    if (channel) channel->runs_on(core);
}

bool Endpoint::turn_channel(size_t shard) {
  Channel& channel = *channels_[shard];
  bool moved = channel.flush();
  for (bool more = true; more;) {
    more = false;
    if (const StoreMessage* message = client_.next(int(shard)))
      if (channel.send(*message)) {
        client_.sent(int(shard));
        more = true;
      }
    if (const StoreMessage* answer = channel.receive()) {
      client_.on_message(int(shard), answer->header, answer->payload);
      channel.take();
      more = true;
    }
    moved |= more;
  }
  return moved;
}

bool Endpoint::turn_embedded() {
  bool moved = false;
  for (bool more = true; more;) {
    more = false;
    if (const StoreMessage* message = client_.next(0)) {
      client_.sent(0);
      embedded_->on_message(0, message->header, message->payload);
      more = true;
    }
    while (const StoreMessage* answer = embedded_->next(0)) {
      client_.on_message(0, answer->header, answer->payload);
      embedded_->sent(0);
      more = true;
    }
    moved |= more;
  }
  return moved;
}

void Endpoint::background_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    your_turn_.wait(lock, [this] { return is_its_turn(); });
    if (closing_) return;
    const auto until = Clock::now() + kSlice;
    // What was only left to be sent is answered while somebody waits, or calls again: where a call
    // is always under way, this thread would never rest.
    const auto done = [this] { return wants_answers_ ? client_.quiet() : client_.idle(); };
    if (drive(lock, until, true, done)) wants_background_ = wants_answers_ = false;
    // A broken channel is mended by the next call that waits.
    if (std::find(channels_.begin(), channels_.end(), nullptr) != channels_.end())
      wants_background_ = wants_answers_ = false;
  }
}

// --- the end ---

void Endpoint::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  if (failure_.code != FailureCode::kNone) return;
  failure_ = std::move(failure);
  changed_.notify_all();
  poller_->wake();
}

void Endpoint::close() {
  fail({FailureCode::kClosed, -1, -1, 0, "the store is closed"});
  std::unique_lock lock(mutex_);
  closing_ = true;
  tell_others();
  poller_->wake();
  while (resting_ || waiters_ > 0) {
    poller_->wake();
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
  std::thread background = std::move(background_);
  lock.unlock();
  if (background.joinable()) background.join();
  lock.lock();
  for (auto& channel : channels_) channel.reset();
  if (replay_) std::exchange(replay_, nullptr)->compare(*embedded_);
}

Client::Owner gather(const TableSpec& spec, const std::vector<const std::byte*>& arrays,
                     const std::byte* scale) {
  const size_t bytes = spec.bytes();
  auto sum = std::make_shared<std::vector<std::byte>>(arrays.front(), arrays.front() + bytes);
  if (scale != nullptr) multiply(spec, *sum, scale);
  const auto combine = kernels().reduce_for(spec.dtype, spec.update.combines_by());
  for (size_t i = 1; i < arrays.size(); ++i) {
    std::vector<std::byte> next(arrays[i], arrays[i] + bytes);
    if (scale != nullptr) multiply(spec, next, scale);
    if (spec.update.kind == UpdateKind::kAssign)
      sum->swap(next);
    else
      combine(sum->data(), sum->data(), next.data(), spec.count);
  }
  return sum;
}

}  // namespace commute
