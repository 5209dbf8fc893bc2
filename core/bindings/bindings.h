// SPDX-License-Identifier: Apache-2.0
// One function per bound header; module.cc calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace commute::bindings {

void bind_plan(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_fast_call(nanobind::module_& module);
void bind_health(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_control(nanobind::module_& module);

}  // namespace commute::bindings
