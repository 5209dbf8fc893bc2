// SPDX-License-Identifier: Apache-2.0
#include "store/server.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace commute {

Server::Server(Settings settings, std::shared_ptr<Replay> replay)
    : settings_(settings), replay_(std::move(replay)), gone_(settings.workers) {
  for (uint32_t i = 0; i < settings_.shards; ++i) {
    const Shard::Settings shard{settings_.workers, settings_.first_shard + i, settings_.all_shards,
                                settings_.slots, Planted::kNone};
    desks_.push_back(std::make_unique<Desk>(shard, Replay::recorder(replay_)));
    desks_.back()->ladder.may_spin(settings_.may_spin);
  }
  for (auto& desk : desks_) desk->thread = std::thread([this, &desk = *desk] { run(desk); });
}

Server::~Server() {
  close();
}

void Server::add_channel(uint32_t shard, int socket, int segment, int64_t worker) {
  const uint32_t at = shard - settings_.first_shard;
  if (shard < settings_.first_shard || at >= desks_.size()) {
    ::close(socket);
    if (segment >= 0) ::close(segment);
    throw std::runtime_error("this server has no shard " + std::to_string(shard));
  }
  Desk& desk = *desks_[at];
  Mail mail;
  mail.channel = make_channel(socket, segment, false, desk.poller);
  mail.worker = worker;
  post(desk, std::move(mail));
}

void Server::on_lost(uint32_t worker) {
  if (worker >= settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {.lost = worker});
  {
    const std::lock_guard lock(mutex_);
    lost_.push_back(worker);
  }
  member_gone(worker);
}

void Server::on_left(uint32_t worker) {
  if (worker >= settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {.left = worker});
  member_gone(worker);
}

void Server::on_came(uint32_t observer) {
  if (observer < settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {.came = observer});
}

void Server::on_gone(uint32_t observer) {
  if (observer < settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {.gone = observer});
}

void Server::member_gone(uint32_t worker) {
  const std::lock_guard lock(mutex_);
  gone_[worker] = true;
  changed_.notify_all();
}

bool Server::wait_until_over(std::chrono::milliseconds at_most) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, at_most, [this] {
    return closing_.load() || std::find(gone_.begin(), gone_.end(), false) == gone_.end();
  });
}

Server::Counts Server::counts() const {
  Counts counts;
  for (const auto& desk : desks_) {
    counts.pushes += desk->pushes.load(std::memory_order_relaxed);
    counts.channels += desk->open.load(std::memory_order_relaxed);
    counts.refused += desk->refused.load(std::memory_order_relaxed);
  }
  return counts;
}

std::vector<ShardStatus> Server::status() {
  std::vector<std::future<ShardStatus>> answers;
  for (auto& desk : desks_) {
    auto asks = std::make_shared<std::promise<ShardStatus>>();
    answers.push_back(asks->get_future());
    post(*desk, {.asks = std::move(asks)});
  }
  std::vector<ShardStatus> found;
  for (auto& answer : answers) {
    // A shard that ends does not read its mail any more.
    while (answer.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready)
      if (closing_.load()) return {};
    found.push_back(answer.get());
  }
  return found;
}

std::vector<uint32_t> Server::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Server::close() {
  closing_ = true;
  for (auto& desk : desks_) desk->poller->wake();
  {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  for (auto& desk : desks_) {
    if (!desk->thread.joinable()) continue;
    desk->thread.join();
    if (replay_) replay_->compare(desk->shard);
  }
}

// --- a shard's thread ---

void Server::post(Desk& desk, Mail mail) {
  {
    const std::lock_guard lock(desk.mutex);
    desk.mail.push_back(std::move(mail));
    desk.has_mail.store(true, std::memory_order_seq_cst);
  }
  desk.poller->wake();
}

void Server::take_mail(Desk& desk) {
  std::vector<Mail> mail;
  {
    const std::lock_guard lock(desk.mutex);
    mail = std::exchange(desk.mail, {});
    desk.has_mail.store(false);
  }
  for (Mail& letter : mail) read(desk, letter);
  desk.open.store(desk.clients.size(), std::memory_order_relaxed);
}

void Server::read(Desk& desk, Mail& letter) {
  if (letter.channel)
    desk.clients.push_back({++desk.last_link, std::move(letter.channel), letter.worker});
  if (letter.lost >= 0) desk.shard.on_lost(uint32_t(letter.lost));
  if (letter.left >= 0) desk.shard.on_left(uint32_t(letter.left));
  if (letter.came >= 0) desk.shard.on_came(uint32_t(letter.came));
  if (letter.gone >= 0) {
    for (const Client& client : desk.clients)
      if (client.worker == letter.gone) desk.shard.on_link_down(client.link);
    std::erase_if(desk.clients, [&](const Client& it) { return it.worker == letter.gone; });
    desk.shard.on_gone(uint32_t(letter.gone));
  }
  if (letter.asks) letter.asks->set_value(status_of(desk));
}

ShardStatus Server::status_of(const Desk& desk) {
  ShardStatus status = commute::status_of(desk.shard);
  for (const Client& client : desk.clients) {
    status.clients.push_back(client.counted);
    status.clients.back().worker = client.worker;
  }
  return status;
}

void Server::run(Desk& desk) {
  while (!closing_.load(std::memory_order_relaxed)) {
    if (turn(desk)) {
      desk.ladder.moved();
      continue;
    }
    const bool sockets =
        std::any_of(desk.clients.begin(), desk.clients.end(),
                    [](const Client& client) { return client.channel->needs_system_calls(); });
    if (desk.ladder.should_spread()) spread(desk);
    if (desk.ladder.rest(*desk.poller, sockets)) continue;
    desk.poller->about_to_sleep();
    for (Client& client : desk.clients) client.channel->about_to_sleep();
    if (!turn(desk) && !closing_.load()) {
      const auto nap = desk.holds_back ? kAround : kSlice;
      desk.poller->sleep(int(nap.count()));
      spread(desk);
    }
    for (Client& client : desk.clients) client.channel->awake();
  }
  desk.clients.clear();
}

// The first shard keeps off the cores of its clients, who run while it does. The others keep off
// those of the shards before them: they work at the same time, while clients wait for all of them.
void Server::spread(Desk& desk) {
  std::vector<int> cores;
  if (&desk == desks_.front().get())
    for (const Client& client : desk.clients) cores.push_back(client.channel->other_core());
  for (const auto& other : desks_) {
    if (other.get() == &desk) break;
    cores.push_back(other->core.load(std::memory_order_relaxed));
  }
  const int core = desk.spread.look(std::move(cores), Clock::now());
  desk.core.store(core, std::memory_order_relaxed);
  for (Client& client : desk.clients) client.channel->runs_on(core);
}

bool Server::turn(Desk& desk) {
  bool moved = false;
  if (desk.has_mail.load(std::memory_order_seq_cst)) {
    take_mail(desk);
    moved = true;
  }
  desk.holds_back = false;
  for (Client& client : desk.clients) {
    try {
      moved |= serve(desk, client);
    } catch (const LinkClosed& closed) {
      if (std::string_view(closed.what()).ends_with("garbage")) desk.refused.fetch_add(1);
      client.channel.reset();
      desk.shard.on_link_down(client.link);
      moved = true;
    }
  }
  if (moved) {
    std::erase_if(desk.clients, [](const Client& client) { return !client.channel; });
    desk.open.store(desk.clients.size(), std::memory_order_relaxed);
    desk.pushes.store(desk.shard.pushes(), std::memory_order_relaxed);
  }
  return moved;
}

bool Server::serve(Desk& desk, Client& client) const {
  const int link = client.link;
  Channel* channel = client.channel.get();
  Shard& shard = desk.shard;
  bool moved = channel->flush();
  while (const StoreMessage* answer = shard.next(link)) {
    if (!channel->send(*answer)) break;
    shard.sent(link);
    moved = true;
  }
  if (!shard.wants(link) || gives_way(desk, client)) return moved;
  const auto begin = Clock::now();
  const StoreMessage* message = channel->receive();
  if (message == nullptr) return moved;
  if (client.worker >= 0 && client.worker != message->header.worker)
    throw LinkClosed("it spoke for another worker: garbage");
  ++client.counted.messages;
  client.counted.bytes += message->payload.size();
  const bool waits = (message->header.flags & kStoreOneOfMany) == 0;
  const uint64_t call = message->header.call;
  shard.on_message(link, message->header, message->payload);
  const StoreMessage* answer = shard.next(link);
  if (answer == nullptr || answer->header.call != call) {
    channel->take();
  } else if (channel->answer(*answer)) {
    shard.sent(link);
  }
  // Its client takes what is there meanwhile, and not all at the end while other cores are idle.
  if (!waits && !settings_.may_spin && channel->other_core() == ::sched_getcpu()) ::sched_yield();
  const auto end = Clock::now();
  (waits ? client.waited : client.many) = end;
  if (!waits && (client.used += end - begin) > kStretch) {
    client.not_before = end + kGiveWay * client.used;
    client.used = {};
  }
  return true;
}

bool Server::gives_way(Desk& desk, Client& client) const {
  if (settings_.may_spin || client.not_before == Clock::time_point{}) return false;
  const auto now = Clock::now();
  const bool others_wait =
      std::any_of(desk.clients.begin(), desk.clients.end(), [&](const Client& other) {
        return &other != &client && now - other.waited < kAround &&
               other.waited - other.many > kAround;
      });
  if (others_wait && now < client.not_before) return desk.holds_back = true;
  client.not_before = {};
  return false;
}

}  // namespace commute
