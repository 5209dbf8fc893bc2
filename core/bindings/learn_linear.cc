// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "learn/linear.h"
#include "learn/metrics.h"

namespace commute::bindings {
namespace nb = nanobind;
namespace {

// Python has checked the arrays: contiguous, of these types, and as long as the offsets say.
float* floats(uintptr_t address) {
  return reinterpret_cast<float*>(address);
}

const uint32_t* numbers(uintptr_t address) {
  return reinterpret_cast<const uint32_t*>(address);
}

MetricSums& metric_sums(uintptr_t address) {
  return *reinterpret_cast<MetricSums*>(address);
}

Places places(uintptr_t offsets, uintptr_t index, uintptr_t values, size_t count) {
  return {numbers(offsets), numbers(index), floats(values), count};
}

}  // namespace

void bind_linear(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "linear_scores",
      [](uintptr_t offsets, uintptr_t index, uintptr_t values, size_t count, uintptr_t weights,
         uintptr_t scores) {
        linear_scores(places(offsets, index, values, count), floats(weights), floats(scores));
      },
      nb::arg("offsets"), nb::arg("index"), nb::arg("values"), nb::arg("count"), nb::arg("weights"),
      nb::arg("scores"), Release());
  module.def(
      "linear_learn",
      [](int loss, uintptr_t offsets, uintptr_t index, uintptr_t values, size_t count,
         uintptr_t labels, uintptr_t importances, uintptr_t weights, size_t size, uintptr_t sums) {
        linear_learn(Loss(loss), places(offsets, index, values, count), floats(labels),
                     floats(importances), {floats(weights), size}, metric_sums(sums));
      },
      nb::arg("loss"), nb::arg("offsets"), nb::arg("index"), nb::arg("values"), nb::arg("count"),
      nb::arg("labels"), nb::arg("importances"), nb::arg("weights"), nb::arg("size"),
      nb::arg("sums"), Release());
  module.def(
      "metrics_add",
      [](int loss, uintptr_t scores, uintptr_t labels, uintptr_t weights, size_t count,
         uintptr_t sums) {
        metric_sums(sums).add(Loss(loss), floats(scores), floats(labels), floats(weights), count);
      },
      nb::arg("loss"), nb::arg("scores"), nb::arg("labels"), nb::arg("weights"), nb::arg("count"),
      nb::arg("sums"), Release());
}

}  // namespace commute::bindings
