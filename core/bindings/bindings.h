// SPDX-License-Identifier: Apache-2.0
// One function per bound header; module.cc calls them all.
#pragma once

#include <fcntl.h>
#include <nanobind/nanobind.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <system_error>

#include "operation.h"
#include "segment.h"

namespace commute::bindings {

// As a point in time; what is too far away for one never comes.
inline Clock::time_point after(Clock::time_point now, double seconds) {
  if (seconds > 1e9) return Clock::time_point::max();
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// How waits treat the GIL (fast_call.cc says why), and how long they last at most.
constexpr uint64_t kHeldBytes = 4096;
constexpr std::chrono::microseconds kHoldGil{2};
constexpr std::chrono::milliseconds kSlice{100};

// New shared memory, as a descriptor to be passed on. Raises std::system_error.
inline int new_segment(size_t bytes) {
  const int fd =
      ::fcntl(Segment::create(bytes, 0, Segment::Touch::kLater).fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "passing shared memory on");
  return fd;
}

// A collective that has not been submitted. Addresses are plain integers; `combine` is for
// reductions of the caller's own, `array` for direct plans. Raises std::invalid_argument.
std::shared_ptr<Operation> new_collective(std::shared_ptr<Executor> executor, uintptr_t in,
                                          uintptr_t out, uint64_t count, int dtype, int reduce_op,
                                          bool mean, double timeout, const Combine* combine,
                                          std::shared_ptr<SharedArray> array, size_t array_offset);
// How often this process, or one before it, was forked: a child must not use its parent's links.
int fork_count();

void bind_plan(nanobind::module_& module);
void bind_combine(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_arrays(nanobind::module_& module);
void bind_fast_call(nanobind::module_& module);
void bind_persistent(nanobind::module_& module);
void bind_health(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_control(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_plain_table(nanobind::module_& module);
void bind_store_machines(nanobind::module_& module);
void bind_saving_files(nanobind::module_& module);
void bind_store_status(nanobind::module_& module);
void bind_learn(nanobind::module_& module);
void bind_linear(nanobind::module_& module);

}  // namespace commute::bindings
