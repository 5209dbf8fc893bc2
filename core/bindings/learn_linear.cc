// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "learn/linear.h"

namespace commute::bindings {
namespace nb = nanobind;
namespace {

// Python has checked the arrays: contiguous, of these types, and as long as the offsets say.
const float* floats(uintptr_t address) {
  return reinterpret_cast<const float*>(address);
}

Places places(uintptr_t offsets, uintptr_t values, size_t count) {
  return {reinterpret_cast<const uint32_t*>(offsets), floats(values), count};
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def(
      "linear_scores",
      [](uintptr_t offsets, uintptr_t values, size_t count, uintptr_t weights, uintptr_t scores) {
        const nb::gil_scoped_release released;
        linear_scores(places(offsets, values, count), floats(weights),
                      reinterpret_cast<float*>(scores));
      },
      nb::arg("offsets"), nb::arg("values"), nb::arg("count"), nb::arg("weights"),
      nb::arg("scores"));
  module.def(
      "linear_gradients",
      [](int loss, uintptr_t offsets, uintptr_t values, size_t count, uintptr_t scores,
         uintptr_t labels, uintptr_t importances, uintptr_t gradients) {
        const nb::gil_scoped_release released;
        linear_gradients(Loss(loss), places(offsets, values, count), floats(scores), floats(labels),
                         floats(importances), reinterpret_cast<float*>(gradients));
      },
      nb::arg("loss"), nb::arg("offsets"), nb::arg("values"), nb::arg("count"), nb::arg("scores"),
      nb::arg("labels"), nb::arg("importances"), nb::arg("gradients"));
}

}  // namespace commute::bindings
