// SPDX-License-Identifier: Apache-2.0
#include "health.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "engine.h"
#include "groups.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

// Health tells the engines what it hears, an engine tells health what broke; neither owns a Python
// object.
std::pair<std::shared_ptr<Health>, std::shared_ptr<Groups>> watch(
    const std::shared_ptr<Engine>& engine, int rank, double peer_timeout) {
  auto groups = std::make_shared<Groups>(engine);
  auto health = std::make_shared<Health>(
      rank, peer_timeout,
      Health::Callbacks{[groups](const Failure& failure) { groups->failed(failure); },
                        [groups](int left) { groups->left(left); },
                        [groups](uint64_t id, int left) { groups->left_group(id, left); }});
  const auto spread = [weak = std::weak_ptr(health)](const Failure& failure) {
    if (const auto strong = weak.lock()) strong->spread(failure);
  };
  engine->on_failure(spread);
  groups->on_failure(spread);
  return {std::move(health), std::move(groups)};
}

}  // namespace

void bind_health(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Health>(module, "Health")
      .def("add", &Health::add, nb::arg("fd"), nb::arg("rank"))
      .def("watches", &Health::watches, nb::arg("rank"))
      .def("silent_for", &Health::silent_for, nb::arg("rank"))
      .def_prop_ro("refused", &Health::refused)
      .def("leave", &Health::leave, nb::arg("group"), nb::arg("failed"), nb::arg("why"), Release())
      .def(
          "close",
          [](Health& self, bool failed, const std::string& why, double linger_seconds) {
            self.close(failed, why,
                       std::chrono::milliseconds(static_cast<int64_t>(linger_seconds * 1000)));
          },
          nb::arg("failed"), nb::arg("why"), nb::arg("linger_seconds"), Release());
  nb::class_<Groups>(module, "Groups")
      .def("add", &Groups::add, nb::arg("id"), nb::arg("ranks"), nb::arg("engine"), Release())
      .def("remove", &Groups::remove, nb::arg("id"), Release());
  module.def("watch", &watch, nb::arg("engine"), nb::arg("rank"), nb::arg("peer_timeout"));
}

}  // namespace commute::bindings
