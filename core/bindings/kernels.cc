// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace commute::bindings {

void bind_kernels(nb::module_& module) {
  module.def("kernel_set", [] { return std::string(kernels().name); });
  module.def("kernel_sets", [] {
    std::vector<std::string> names;
    for (const KernelSet* set : supported_kernel_sets()) names.emplace_back(set->name);
    return names;
  });
}

}  // namespace commute::bindings
