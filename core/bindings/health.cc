// SPDX-License-Identifier: Apache-2.0
#include "health.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "engine.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

// Health tells the engine what it hears, the engine tells health what broke; neither owns a Python
// object.
std::shared_ptr<Health> watch(const std::shared_ptr<Engine>& engine, int rank,
                              double peer_timeout) {
  auto health = std::make_shared<Health>(
      rank, peer_timeout,
      Health::Callbacks{[engine](Failure failure) { engine->fail(std::move(failure)); },
                        [engine](int left) { engine->peer_left(left); }});
  engine->on_failure([weak = std::weak_ptr(health)](const Failure& failure) {
    if (const auto strong = weak.lock()) strong->spread(failure);
  });
  return health;
}

}  // namespace

void bind_health(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Health>(module, "Health")
      .def("add", &Health::add, nb::arg("fd"), nb::arg("rank"))
      .def("watches", &Health::watches, nb::arg("rank"))
      .def("silent_for", &Health::silent_for, nb::arg("rank"))
      .def_prop_ro("refused", &Health::refused)
      .def(
          "close",
          [](Health& self, bool failed, const std::string& why, double linger_seconds) {
            self.close(failed, why,
                       std::chrono::milliseconds(static_cast<int64_t>(linger_seconds * 1000)));
          },
          nb::arg("failed"), nb::arg("why"), nb::arg("linger_seconds"), Release());
  module.def("watch", &watch, nb::arg("engine"), nb::arg("rank"), nb::arg("peer_timeout"));
}

}  // namespace commute::bindings
