// SPDX-License-Identifier: Apache-2.0
// The compiled module commute._core. It is private: the Python wrappers document and check
// everything.
#include "bindings.h"

NB_MODULE(_core, module) {
  // At the end of a process threads that still run may hold objects: nothing a user can act on.
  nanobind::set_leak_warnings(false);
  using namespace commute::bindings;
  bind_plan(module);
  bind_combine(module);
  bind_engine(module);
  bind_arrays(module);
  bind_fast_call(module);
  bind_persistent(module);
  bind_health(module);
  bind_kernels(module);
  bind_control(module);
  bind_store(module);
  bind_learn(module);
  bind_linear(module);
}
