// SPDX-License-Identifier: Apache-2.0
// Point-to-point: the messages between this rank and one peer, on a link of their own.
//
// Each direction is a queue in program order; message n sent meets message n received. Both queues
// move independently of each other and of the group's collectives, so a receive that is posted
// early holds up nothing. The first header tells dtype and count: a receive that expects something
// else raises a mismatch.
#pragma once

#include <array>
#include <deque>
#include <memory>

#include "operation.h"
#include "stream.h"

namespace commute {

class Pair {
 public:
  Pair(int rank, int peer, uint32_t group, uint32_t epoch, std::unique_ptr<Stream> stream)
      : rank_(rank), peer_(peer), group_(group), epoch_(epoch), stream_(std::move(stream)) {}

  void post(std::shared_ptr<Operation> operation);  // numbers it
  bool advance();                                   // true when something moved; raises Error
  bool idle() const { return sends_.empty() && receives_.empty(); }
  std::array<const Operation*, 2> waiting() const;  // first to receive, first to send; or nullptr
  int peer() const { return peer_; }
  // Takes back a receive of which nothing has arrived; false when it is too late.
  bool withdraw(const Operation& receive);
  void fail(const Failure& failure);
  Stream& stream() { return *stream_; }

 private:
  bool send(Operation& operation);
  bool receive(Operation& operation);
  [[noreturn]] void raise(FailureCode code, uint64_t sequence, const std::string& text) const;

  int rank_;
  int peer_;
  uint32_t group_;
  uint32_t epoch_;
  std::unique_ptr<Stream> stream_;
  std::deque<std::shared_ptr<Operation>> sends_;
  std::deque<std::shared_ptr<Operation>> receives_;
  uint64_t sends_posted_ = 0;
  uint64_t receives_done_ = 0;
};

}  // namespace commute
