// SPDX-License-Identifier: Apache-2.0
// What saving a store takes beside its tables: checksums, and two folders changing places.
#include <fcntl.h>
#include <linux/fs.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bindings/store.h"
#include "store/checksum.h"

namespace nb = nanobind;

namespace commute::bindings {

void bind_saving_files(nb::module_& module) {
  nb::class_<Checksum>(module, "Checksum")
      .def(nb::init<>())
      .def(
          "add",
          [](Checksum& self, uintptr_t address, size_t bytes) { self.add(at(address), bytes); },
          nb::arg("address"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def("value", &Checksum::value);
  // Whether it was done: some file systems cannot.
  module.def(
      "exchange_paths",
      [](const std::string& a, const std::string& b) {
        return ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(),
                         RENAME_EXCHANGE) == 0;
      },
      nb::arg("a"), nb::arg("b"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace commute::bindings
