// SPDX-License-Identifier: Apache-2.0
#include "store/status.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "store/server.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

std::vector<ShardStatus> status_of_server(Server& server) {
  const nb::gil_scoped_release released;  // the shards' threads answer when they come to it
  return server.status();
}

}  // namespace

void bind_store_status(nb::module_& module) {
  nb::class_<TableStatus>(module, "TableStatus")
      .def_ro("slots", &TableStatus::slots)
      .def_ro("bytes", &TableStatus::bytes)
      .def_ro("rows", &TableStatus::rows)
      .def_ro("state_bytes", &TableStatus::state_bytes)
      .def_ro("updates", &TableStatus::updates)
      .def_ro("dtype", &TableStatus::dtype)
      .def_ro("update", &TableStatus::update)
      .def_ro("staleness", &TableStatus::staleness)
      .def_ro("clocks", &TableStatus::clocks);
  nb::class_<TableEntry>(module, "TableEntry")
      .def_ro("table", &TableEntry::table)
      .def_ro("maker", &TableEntry::maker)
      .def_ro("bytes", &TableEntry::bytes)
      .def_ro("name", &TableEntry::name)
      .def_ro("declaration", &TableEntry::declaration);
  nb::class_<ClientStatus>(module, "ClientStatus")
      .def_ro("worker", &ClientStatus::worker)
      .def_ro("messages", &ClientStatus::messages)
      .def_ro("bytes", &ClientStatus::bytes);
  nb::class_<ShardStatus>(module, "ShardStatus")
      .def_ro("tables", &ShardStatus::tables)
      .def_ro("directory", &ShardStatus::directory)
      .def_ro("clients", &ShardStatus::clients)
      .def_ro("pushes", &ShardStatus::pushes);
  module.def("status_of_server", &status_of_server, nb::arg("server"));
}

}  // namespace commute::bindings
