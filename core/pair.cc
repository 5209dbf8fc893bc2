// SPDX-License-Identifier: Apache-2.0
#include "pair.h"

#include <algorithm>

namespace commute {
namespace {

size_t bytes_of(const Operation& operation) {
  return operation.call.count * item_bytes(operation.call.dtype);
}

}  // namespace

void Pair::post(std::shared_ptr<Operation> operation) {
  if (operation->call.collective == Collective::kSend) {
    operation->sequence = ++sends_posted_;
    sends_.push_back(std::move(operation));
  } else {
    receives_.push_back(std::move(operation));
  }
}

std::array<const Operation*, 2> Pair::waiting() const {
  return {receives_.empty() ? nullptr : receives_.front().get(),
          sends_.empty() ? nullptr : sends_.front().get()};
}

bool Pair::advance() {
  bool moved = false;
  try {
    while (!sends_.empty()) {
      const size_t before = sends_.front()->moved;
      const bool done = send(*sends_.front());
      moved |= done || sends_.front()->moved != before;
      if (!done) break;
      sends_.front()->finish();
      sends_.pop_front();
    }
    while (!receives_.empty()) {
      const size_t before = receives_.front()->moved;
      const bool done = receive(*receives_.front());
      moved |= done || receives_.front()->moved != before;
      if (!done) break;
      ++receives_done_;
      receives_.front()->finish();
      receives_.pop_front();
    }
  } catch (const LinkClosed& closed) {
    raise(FailureCode::kPeerLost, 0, closed.what());
  } catch (const BadFrame& bad) {
    raise(FailureCode::kProtocol, 0,
          std::string("it sent a frame that no rank sends: ") + bad.what());
  }
  return moved;
}

bool Pair::send(Operation& operation) {
  const size_t bytes = bytes_of(operation);
  if (!operation.begun) {
    FrameHeader header{};
    header.kind = FrameKind::kPair;
    header.set_call(operation.call);
    header.group = group_;
    header.epoch = epoch_;
    header.operation = operation.sequence;
    header.bytes = bytes;
    header.sender = static_cast<uint32_t>(rank_);
    stream_->begin(header);
    operation.begun = true;
  }
  while (operation.moved < bytes || !stream_->header_sent()) {
    const bool header_was_sent = stream_->header_sent();
    const size_t moved = stream_->send(operation.in + operation.moved, bytes - operation.moved);
    operation.moved += moved;
    if (moved == 0 && header_was_sent == stream_->header_sent()) return false;
  }
  stream_->end();
  return true;
}

bool Pair::receive(Operation& operation) {
  const size_t bytes = bytes_of(operation);
  if (!operation.begun) {
    const FrameHeader* header = stream_->header();
    if (header == nullptr) return false;
    operation.sequence = receives_done_ + 1;
    if (header->kind != FrameKind::kPair || header->epoch != epoch_ || header->group != group_ ||
        header->operation != operation.sequence)
      raise(FailureCode::kProtocol, operation.sequence,
            "it sent a frame that belongs on another link");
    if (header->dtype != operation.call.dtype || header->count != operation.call.count)
      raise(FailureCode::kMismatch, operation.sequence,
            "message " + std::to_string(operation.sequence) + " from rank " +
                std::to_string(peer_) + " to rank " + std::to_string(rank_) + " has " +
                std::to_string(header->count) + " " + name(header->dtype) +
                ", the receiver expected " + std::to_string(operation.call.count) + " " +
                name(operation.call.dtype) +
                "; pass arrays of the same length and dtype to send and recv");
    operation.begun = true;
    if (bytes == 0) stream_->skip();
  }
  while (operation.moved < bytes) {
    const size_t moved = stream_->take(operation.out + operation.moved, bytes - operation.moved);
    if (moved == 0) return false;
    operation.moved += moved;
  }
  return true;
}

bool Pair::withdraw(const Operation& receive) {
  const auto found = std::find_if(receives_.begin(), receives_.end(),
                                  [&](const auto& queued) { return queued.get() == &receive; });
  if (found == receives_.end() || receive.begun) return false;
  receives_.erase(found);
  return true;
}

void Pair::fail(const Failure& failure) {
  for (auto* queue : {&sends_, &receives_}) {
    for (auto& operation : *queue) operation->fail(failure);
    queue->clear();
  }
}

void Pair::raise(FailureCode code, uint64_t sequence, const std::string& text) const {
  throw Error({code, peer_, rank_, sequence, text});
}

}  // namespace commute
