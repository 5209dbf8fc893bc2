// SPDX-License-Identifier: Apache-2.0
// The recorder: the last operations of this rank, always on, in a ring that never grows.
//
// Times are taken from the clock that the engine uses anyway, and become wall-clock times, by which
// ranks are compared, when somebody looks. Not locked: the engine calls it under its own mutex.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"
#include "operation.h"

namespace commute {

struct Record {
  uint64_t number = 0;  // of the record itself, from 1
  Call call;
  uint64_t sequence = 0;
  int peer = -1;
  std::string algorithm;  // short names: no allocation
  Operation::State state = Operation::State::kQueued;
  int64_t begun_ns = 0;  // of the steady clock in the ring, of the wall clock in a snapshot
  int64_t ended_ns = 0;
};

class Recorder {
 public:
  static constexpr size_t kRecords = 4096;

  uint64_t begin(const Operation& operation, const std::string& algorithm, Clock::time_point now) {
    Record& record = ring_[++last_ % kRecords];
    record.number = last_;
    record.call = operation.call;
    record.sequence = operation.sequence;
    record.peer = operation.peer;
    record.algorithm = algorithm;
    record.state = Operation::State::kQueued;
    record.begun_ns = nanoseconds(now.time_since_epoch());
    record.ended_ns = 0;
    return last_;
  }

  // A record that has been overwritten since is left alone.
  void end(uint64_t number, const Operation& operation, Operation::State state,
           Clock::time_point now) {
    Record& record = ring_[number % kRecords];
    if (record.number != number) return;
    record.sequence = operation.sequence;
    record.state = state;
    record.ended_ns = nanoseconds(now.time_since_epoch());
  }

  // Oldest first.
  std::vector<Record> snapshot() const {
    const int64_t to_wall = nanoseconds(std::chrono::system_clock::now().time_since_epoch()) -
                            nanoseconds(Clock::now().time_since_epoch());
    std::vector<Record> records;
    for (uint64_t number = last_ < kRecords ? 1 : last_ - kRecords + 1; number <= last_; ++number) {
      records.push_back(ring_[number % kRecords]);
      records.back().begun_ns += to_wall;
      if (records.back().ended_ns != 0) records.back().ended_ns += to_wall;
    }
    return records;
  }

 private:
  template <class Duration>
  static int64_t nanoseconds(Duration duration) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  }

  std::vector<Record> ring_ = std::vector<Record>(kRecords);
  uint64_t last_ = 0;
};

}  // namespace commute
