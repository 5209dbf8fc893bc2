// SPDX-License-Identifier: Apache-2.0
// The store's two machines by themselves, for the simulator: messages are bytes, header and
// payload.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings.h"
#include "bindings/store.h"
#include "store/encoding.h"
#include "store/replay.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

nb::object as_message(const StoreMessage* message) {
  if (message == nullptr) return nb::none();
  std::string bytes(sizeof(StoreHeader) + message->payload.size(), '\0');
  std::memcpy(bytes.data(), &message->header, sizeof(StoreHeader));
  if (!message->payload.empty())
    std::memcpy(bytes.data() + sizeof(StoreHeader), message->payload.data(),
                message->payload.size());
  return nb::bytes(bytes.data(), bytes.size());
}

template <class Machine>
void give(Machine& machine, int link, const nb::bytes& bytes) {
  StoreHeader header;
  if (bytes.size() < sizeof header) throw std::invalid_argument("a message has a header");
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto* payload = static_cast<const std::byte*>(bytes.data()) + sizeof header;
  machine.on_message(link, header, {payload, bytes.size() - sizeof header});
}

// The keys of a sparse table on a shard, and their values in the same order.
nb::tuple rows_of(const Shard& self, uint32_t table) {
  std::vector<std::byte> keys, values;
  for (const auto& [number, slot] : self.slots()) {
    const Slot::Part* const part = slot.part(table);
    if (part == nullptr || !part->rows) continue;
    part->rows->each([&](uint64_t key, const std::byte* row) {
      put(keys, key);
      put_bytes(values, row, part->spec.bytes());
    });
  }
  return nb::make_tuple(as_bytes(keys), as_bytes(values));
}

void bind_shard_machine(nb::module_& module) {
  nb::class_<Shard>(module, "ShardMachine")
      .def(
          "__init__",
          [](Shard* self, uint32_t workers, uint32_t index, uint32_t shards, uint32_t slots,
             int planted, std::shared_ptr<Replay> replay, size_t remembered_max) {
            new (self) Shard(
                {workers, index, shards, slots, static_cast<Planted>(planted), remembered_max},
                Replay::recorder(replay));
          },
          nb::arg("workers"), nb::arg("index"), nb::arg("shards"), nb::arg("slots"),
          nb::arg("planted"), nb::arg("replay"),
          nb::arg("remembered_max") = RowDesk::kRememberedMax)
      .def("on_message", &give<Shard>, nb::arg("link"), nb::arg("message"))
      .def("on_link_down", &Shard::on_link_down, nb::arg("link"))
      .def("on_lost", &Shard::on_lost, nb::arg("worker"))
      .def("on_left", &Shard::on_left, nb::arg("worker"))
      .def("on_came", &Shard::on_came, nb::arg("observer"))
      .def("on_gone", &Shard::on_gone, nb::arg("observer"))
      .def(
          "next", [](Shard& self, int link) { return as_message(self.next(link)); },
          nb::arg("link"), nb::sig("def next(self, link: int) -> bytes | None"))
      .def("sent", &Shard::sent, nb::arg("link"))
      .def("wants", &Shard::wants, nb::arg("link"))
      .def(
          "value",
          [](const Shard& self, uint32_t slot, uint32_t table) {
            return as_bytes(self.slots().at(slot).part(table)->value);
          },
          nb::arg("slot"), nb::arg("table"))
      .def("rows", &rows_of, nb::arg("table"),
           nb::sig("def rows(self, table: int) -> tuple[bytes, bytes]"))
      .def("compare", [](const Shard& self, Replay& replay) { replay.compare(self); });
}

void bind_client_messages(nb::class_<Client>& client) {
  client.def("leave", &Client::leave, nb::arg("store"))
      .def("tick", &Client::tick, nb::arg("table"))
      .def("catch_up", &Client::catch_up, nb::arg("table"), nb::arg("clock"))
      .def("on_message", &give<Client>, nb::arg("shard"), nb::arg("message"))
      .def("on_link", &Client::on_link, nb::arg("shard"), nb::arg("up"))
      .def(
          "next", [](Client& self, int shard) { return as_message(self.next(shard)); },
          nb::arg("shard"), nb::sig("def next(self, shard: int) -> bytes | None"))
      .def("sent", &Client::sent, nb::arg("shard"))
      .def("done", &Client::done, nb::arg("call"))
      .def("refused", &Client::refused, nb::arg("call"))
      .def(
          "outcome", [](Client& self, uint64_t call) { return as_tuple(self.outcome(call)); },
          nb::arg("call"), nb::sig(kOutcome))
      .def("flushed", &Client::flushed)
      .def("quiet", &Client::quiet)
      .def("kept_bytes", &Client::kept_bytes)
      .def("clock", &Client::clock, nb::arg("table"));
}

// Of rows. Keys are given as bytes, and `out` may be 0.
void bind_client_rows(nb::class_<Client>& client) {
  const auto order = [](const Client& self, const nb::bytes& keys) {
    return self.order_of(
        {static_cast<const uint64_t*>(keys.data()), keys.size() / sizeof(uint64_t)});
  };
  client
      .def(
          "push_rows",
          [order](Client& self, uint32_t table, const nb::bytes& keys, const nb::bytes& rows,
                  uintptr_t out, bool piece, int remember) {
            const auto* given = static_cast<const std::byte*>(rows.data());
            return self.push_rows(
                table,
                {order(self, keys), given, into(out), piece, Client::Remember(remember), true},
                [] {});
          },
          nb::arg("table"), nb::arg("keys"), nb::arg("rows"), nb::arg("out"), nb::arg("piece"),
          nb::arg("remember"))
      .def(
          "pull_rows",
          [order](Client& self, uint32_t table, const nb::bytes& keys, uintptr_t out,
                  int remember) {
            return self.pull_rows(
                table,
                {order(self, keys), nullptr, into(out), false, Client::Remember(remember), true},
                [] {});
          },
          nb::arg("table"), nb::arg("keys"), nb::arg("out"), nb::arg("remember"))
      .def(
          "drop_rows",
          [order](Client& self, uint32_t table, const nb::bytes& keys) {
            return self.drop_rows(
                table, {order(self, keys), nullptr, nullptr, false, Client::Remember::kNo, true});
          },
          nb::arg("table"), nb::arg("keys"))
      .def("reserve", &Client::reserve, nb::arg("table"), nb::arg("rows"));
}

void bind_client_machine(nb::module_& module) {
  nb::class_<Client> client(module, "ClientMachine");
  client
      .def(
          "__init__",
          [](Client* self, uint32_t worker, uint32_t incarnation, uint32_t shards, int planted,
             uint32_t slots, size_t message_bytes) {
            new (self) Client(
                {worker, incarnation, shards, static_cast<Planted>(planted), slots, message_bytes});
          },
          nb::arg("worker"), nb::arg("incarnation"), nb::arg("shards"), nb::arg("planted"),
          nb::arg("slots") = kSlots, nb::arg("message_bytes") = 0)
      .def("declare_table", &Client::declare_table, nb::arg("name"), nb::arg("spec"),
           nb::arg("declaration"), nb::arg("instead_of") = -1)
      .def(
          "table_of",
          [](const Client& self, const std::string& name) -> int64_t {
            const TableEntry* entry = self.table_of(name);
            return entry == nullptr ? -1 : int64_t{entry->table};
          },
          nb::arg("name"))
      .def(
          "slots_of",
          [](const Client& self, const std::string& name) {
            const TableEntry* entry = self.table_of(name);
            return entry == nullptr ? std::vector<uint32_t>() : entry->slots;
          },
          nb::arg("name"))
      .def(
          "declare",
          [](Client& self, const std::string& name, const TableSpec& spec, uintptr_t first,
             size_t bytes) { return self.declare(name, spec, {at(first), bytes}); },
          nb::arg("name"), nb::arg("spec"), nb::arg("first"), nb::arg("bytes"))
      .def(
          "push",
          [](Client& self, uint32_t table, const nb::bytes& gradient, bool piece) {
            const auto* from = static_cast<const std::byte*>(gradient.data());
            auto owner =
                std::make_shared<const std::vector<std::byte>>(from, from + gradient.size());
            return self.push(table, Bytes(*owner), owner, piece);
          },
          nb::arg("table"), nb::arg("gradient"), nb::arg("piece"))
      .def(
          "push_pull",
          [](Client& self, uint32_t table, const nb::bytes& gradient, uintptr_t out) {
            const auto* from = static_cast<const std::byte*>(gradient.data());
            auto owner =
                std::make_shared<const std::vector<std::byte>>(from, from + gradient.size());
            return self.push_pull(table, Bytes(*owner), owner, into(out));
          },
          nb::arg("table"), nb::arg("gradient"), nb::arg("out"))
      .def(
          "pull",
          [](Client& self, uint32_t table, uintptr_t out, bool fresh) {
            return self.pull(table, into(out), fresh);
          },
          nb::arg("table"), nb::arg("out"), nb::arg("fresh"));
  bind_client_rows(client);
  bind_client_messages(client);
}

}  // namespace

void bind_store_machines(nb::module_& module) {
  bind_shard_machine(module);
  bind_client_machine(module);
}

}  // namespace commute::bindings
