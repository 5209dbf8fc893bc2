// SPDX-License-Identifier: Apache-2.0
// Has memory ready before it is used, by a thread of its own.
//
// Memory that is new to a process costs as much as filling it twice: the kernel finds and clears a
// page at its first touch, and a host may have to find one for the kernel. A table that grows would
// spend a tenth of its time on that, and lose its caches to it.
//
//   ask(range) -> a queue -> the thread populates range after range, in steps
//
// Only a wish: what is touched before its turn, or cannot be populated (an old kernel, no memory),
// is as it would be without. Ranges must stay mapped until `close`.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <thread>

namespace commute {

class Populator {
 public:
  Populator() = default;
  ~Populator() { close(); }
  Populator(const Populator&) = delete;
  Populator& operator=(const Populator&) = delete;

  // Starts the thread at the first call.
  void ask(std::span<std::byte> range);
  // Waits for the step that is being done, and forgets the others.
  void close();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::span<std::byte>> asked_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace commute
