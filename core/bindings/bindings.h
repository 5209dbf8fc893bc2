// SPDX-License-Identifier: Apache-2.0
// One function per bound header; module.cc calls them all.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>

#include "operation.h"

namespace commute::bindings {

// As a point in time; what is too far away for one never comes.
inline Clock::time_point after(Clock::time_point now, double seconds) {
  if (seconds > 1e9) return Clock::time_point::max();
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void bind_plan(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_fast_call(nanobind::module_& module);
void bind_health(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_control(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_plain_table(nanobind::module_& module);
void bind_store_machines(nanobind::module_& module);

}  // namespace commute::bindings
