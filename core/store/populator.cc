// SPDX-License-Identifier: Apache-2.0
#include "store/populator.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <system_error>

namespace commute {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // linux/mman.h, since 5.14
#endif

constexpr size_t kStepBytes = 2 << 20;  // a huge page: nobody waits for more than that at the end
// A huge page is cleared in 0.2 ms, and takes 4 where a host has to find its memory piece by piece.
constexpr double kDearSeconds = 1e-3;

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

void Populator::ask(std::span<std::byte> range) {
  const std::lock_guard lock(mutex_);
  asked_.push_back(range);
  if (thread_.joinable() || closing_) {
    changed_.notify_one();
    return;
  }
  try {
    thread_ = std::thread(&Populator::run, this);
  } catch (const std::system_error&) {  // no thread to be had: then it is as without
    asked_.clear();
    closing_ = true;
  }
}

void Populator::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Populator::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !asked_.empty(); });
    if (closing_) return;
    std::span<std::byte>& range = asked_.front();
    const auto step = range.first(std::min(range.size(), kStepBytes));
    range = range.subspan(step.size());
    if (range.empty()) asked_.pop_front();
    lock.unlock();
    populate(step);
    lock.lock();
  }
}

void Populator::populate(std::span<std::byte> step) {
  if (dear_) ::madvise(step.data(), step.size(), MADV_NOHUGEPAGE);
  const double began = processor_seconds();
  ::madvise(step.data(), step.size(), MADV_POPULATE_WRITE);
  dear_ = dear_ || processor_seconds() - began > kDearSeconds;
}

}  // namespace commute
