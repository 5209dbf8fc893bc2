// SPDX-License-Identifier: Apache-2.0
// Models for Python. Arrays are checked for what costs nothing: type, one piece, one dimension;
// that lengths agree is the caller's duty.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings.h"
#include "learn/linear.h"
#include "learn/metrics.h"

namespace commute::bindings {
namespace nb = nanobind;
namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float>;
using Numbers = Array<const uint32_t>;
using Sums = nb::ndarray<double, nb::shape<MetricSums::kCount>, nb::c_contig, nb::device::cpu>;

MetricSums& metric_sums(const Sums& sums) {
  return *reinterpret_cast<MetricSums*>(sums.data());
}

// Of as many examples as there are offsets, without the last.
Places places(const Numbers& offsets, const Numbers& index, const std::optional<Floats>& values) {
  return {offsets.data(), index.data(), values ? values->data() : nullptr, offsets.size() - 1};
}

void scores(const Numbers& offsets, const Numbers& index, const std::optional<Floats>& values,
            const Floats& weights, const Array<float>& scores) {
  const nb::gil_scoped_release released;
  linear_scores(places(offsets, index, values), weights.data(), scores.data());
}

void learn(int loss, const Numbers& offsets, const Numbers& index,
           const std::optional<Floats>& values, const Floats& labels, const Floats& importances,
           const Array<float>& weights, const Sums& sums) {
  const nb::gil_scoped_release released;
  linear_learn(Loss(loss), places(offsets, index, values), labels.data(), importances.data(),
               {weights.data(), weights.size()}, metric_sums(sums));
}

void add(int loss, const Floats& scores, const Floats& labels, const Floats& weights,
         const Sums& sums) {
  const nb::gil_scoped_release released;
  metric_sums(sums).add(Loss(loss), scores.data(), labels.data(), weights.data(), scores.size());
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("linear_scores", &scores, nb::arg("offsets").noconvert(), nb::arg("index").noconvert(),
             nb::arg("values").noconvert().none(), nb::arg("weights").noconvert(),
             nb::arg("scores").noconvert());
  module.def("linear_learn", &learn, nb::arg("loss"), nb::arg("offsets").noconvert(),
             nb::arg("index").noconvert(), nb::arg("values").noconvert().none(),
             nb::arg("labels").noconvert(), nb::arg("importances").noconvert(),
             nb::arg("weights").noconvert(), nb::arg("sums").noconvert());
  module.def("metrics_add", &add, nb::arg("loss"), nb::arg("scores").noconvert(),
             nb::arg("labels").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("sums").noconvert());
}

}  // namespace commute::bindings
