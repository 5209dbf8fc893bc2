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

void Server::add_channel(uint32_t shard, int socket, int segment) {
  const uint32_t at = shard - settings_.first_shard;
  if (shard < settings_.first_shard || at >= desks_.size()) {
    ::close(socket);
    if (segment >= 0) ::close(segment);
    throw std::runtime_error("this server has no shard " + std::to_string(shard));
  }
  Desk& desk = *desks_[at];
  Mail mail;
  mail.channel = make_channel(socket, segment, false, desk.poller);
  post(desk, std::move(mail));
}

void Server::on_lost(uint32_t worker) {
  if (worker >= settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {nullptr, int(worker), -1});
  {
    const std::lock_guard lock(mutex_);
    lost_.push_back(worker);
  }
  member_gone(worker);
}

void Server::on_left(uint32_t worker) {
  if (worker >= settings_.workers) return;
  for (auto& desk : desks_) post(*desk, {nullptr, -1, int(worker)});
  member_gone(worker);
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
  for (Mail& letter : mail) {
    if (letter.channel) desk.channels.emplace_back(++desk.last_link, std::move(letter.channel));
    if (letter.lost >= 0) desk.shard.on_lost(uint32_t(letter.lost));
    if (letter.left >= 0) desk.shard.on_left(uint32_t(letter.left));
  }
  desk.open.store(desk.channels.size(), std::memory_order_relaxed);
}

void Server::run(Desk& desk) {
  while (!closing_.load(std::memory_order_relaxed)) {
    if (turn(desk)) {
      desk.ladder.moved();
      continue;
    }
    const bool sockets =
        std::any_of(desk.channels.begin(), desk.channels.end(),
                    [](const auto& channel) { return channel.second->needs_system_calls(); });
    if (desk.ladder.should_spread()) spread(desk);
    if (desk.ladder.rest(*desk.poller, sockets)) continue;
    desk.poller->about_to_sleep();
    for (auto& [link, channel] : desk.channels) channel->about_to_sleep();
    if (!turn(desk) && !closing_.load()) {
      desk.poller->sleep(int(kSlice.count()));
      spread(desk);
    }
    for (auto& [link, channel] : desk.channels) channel->awake();
  }
  desk.channels.clear();
}

void Server::spread(Desk& desk) {
  std::vector<int> cores;
  for (const auto& [link, channel] : desk.channels) cores.push_back(channel->other_core());
  const int core = desk.spread.look(std::move(cores), Clock::now());
  for (auto& [link, channel] : desk.channels) channel->runs_on(core);
}

bool Server::turn(Desk& desk) {
  bool moved = false;
  if (desk.has_mail.load(std::memory_order_seq_cst)) {
    take_mail(desk);
    moved = true;
  }
  for (auto& [link, channel] : desk.channels) {
    try {
      moved |= serve(desk.shard, link, *channel);
    } catch (const LinkClosed& closed) {
      if (std::string_view(closed.what()).ends_with("garbage")) desk.refused.fetch_add(1);
      channel.reset();
      desk.shard.on_link_down(link);
      moved = true;
    }
  }
  if (moved) {
    std::erase_if(desk.channels, [](const auto& channel) { return !channel.second; });
    desk.open.store(desk.channels.size(), std::memory_order_relaxed);
    desk.pushes.store(desk.shard.pushes(), std::memory_order_relaxed);
  }
  return moved;
}

bool Server::serve(Shard& shard, int link, Channel& channel) {
  bool moved = channel.flush();
  while (const StoreMessage* answer = shard.next(link)) {
    if (!channel.send(*answer)) break;
    shard.sent(link);
    moved = true;
  }
  for (int i = 0; i < kBurst && shard.wants(link); ++i) {
    const StoreMessage* message = channel.receive();
    if (message == nullptr) break;
    moved = true;
    const uint64_t call = message->header.call;
    shard.on_message(link, message->header, message->payload);
    const StoreMessage* answer = shard.next(link);
    if (answer == nullptr || answer->header.call != call) {
      channel.take();
    } else if (channel.answer(*answer)) {
      shard.sent(link);
    }
  }
  return moved;
}

}  // namespace commute
