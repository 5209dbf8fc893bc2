// SPDX-License-Identifier: Apache-2.0
// Has memory ready before it is used, by a thread of its own.
//
// Memory that is new to a process costs as much as filling it twice: the kernel finds and clears a
// page at its first touch, and a host may have to find one for the kernel. A table that grows would
// spend a tenth of its time on that, and lose its caches to it.
//
//   ask(range) -> a queue -> the thread populates range after range, in steps
//
// Where a huge page takes long, because a host that had taken unused memory back has to find it
// again, it goes on with small ones, for which the kernel has memory at hand: a table of 100 MB was
// ready after 0.05 instead of 0.2 s. What that costs look-ups is less.
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
  void populate(std::span<std::byte> step);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::span<std::byte>> asked_;
  bool closing_ = false;
  bool dear_ = false;  // huge pages are: the thread's own
  std::thread thread_;
};

}  // namespace commute
