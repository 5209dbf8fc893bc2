// SPDX-License-Identifier: Apache-2.0
// What can go wrong, as data. The core never aborts on bad input: it raises `Error`, or hands a
// `Failure` to the engine, which gives it to every pending and later operation of the group.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace commute {

// The codes travel in control frames: never renumber.
enum class FailureCode : uint8_t {
  kNone = 0,
  kMismatch = 1,     // ranks called different things
  kTimeout = 2,      // an operation's deadline passed
  kInterrupted = 3,  // Ctrl-C, or the caller gave up
  kPeerLost = 4,     // a process died, left, or fell silent
  kProtocol = 5,     // bytes that no correct peer sends
  kClosed = 6,       // this side closed the group
};

struct Failure {
  FailureCode code = FailureCode::kNone;
  int rank = -1;           // whom it is about; -1 when nobody in particular
  int by = -1;             // the rank that noticed; -1 for the coordinator
  uint64_t operation = 0;  // number of the operation that was given up; 0 when none was running
  std::string text;        // a sentence for people
  uint64_t group = 0;      // the id of the group that it is about; 0 for the world
};

class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure)
      : std::runtime_error(failure.text), failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

}  // namespace commute
