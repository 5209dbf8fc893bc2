// SPDX-License-Identifier: Apache-2.0
// The store for Python: a worker's end and a server. Addresses are plain integers: the wrapper
// checks arrays and keeps them alive until the call is done. The GIL is released where a call may
// move bytes or wait.
#include <malloc.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "bindings.h"
#include "bindings/store.h"
#include "health.h"
#include "store/endpoint.h"
#include "store/query.h"
#include "store/server.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
constexpr const char* kTrouble = "def trouble(self, table: int) -> tuple[int, int, str, bytes]";

// A contribution without a copy where it is one plain array that the caller keeps.
struct Gradient {
  Bytes bytes;
  Client::Owner owner;
};

Gradient gradient(const TableSpec& spec, const std::vector<uintptr_t>& addresses, uintptr_t scale,
                  bool copy, bool reject_nan) {
  Gradient made{{at(addresses.front()), spec.bytes()}, nullptr};
  if (addresses.size() > 1 || scale != 0 || copy) {
    std::vector<const std::byte*> arrays;
    for (const uintptr_t address : addresses) arrays.push_back(at(address));
    made.owner = gather(spec, arrays, at(scale));
    made.bytes = Bytes(*made.owner);
  }
  if (reject_nan && has_nan(spec.dtype, made.bytes.data(), spec.count))
    throw std::invalid_argument("NaN");
  return made;
}

uint64_t push(Endpoint& self, uint32_t table, const std::vector<uintptr_t>& addresses,
              uintptr_t scale, bool piece, bool asked, bool copy, bool reject_nan, Kept kept,
              nb::object arrays) {
  return run(self, -1, kept, arrays, [&] {
    const TableSpec spec = self.look([&](const Client& client) { return client.spec(table); });
    Gradient given = gradient(spec, addresses, scale, copy, reject_nan);
    return self.call(then(asked, -1), [&](Client& client) {
      return client.push(table, given.bytes, std::move(given.owner), piece, asked);
    });
  });
}

uint64_t push_pull(Endpoint& self, uint32_t table, const std::vector<uintptr_t>& addresses,
                   uintptr_t scale, uintptr_t out, double seconds, bool reject_nan, Kept kept,
                   nb::object arrays) {
  return run(self, seconds, kept, arrays, [&] {
    const TableSpec spec = self.look([&](const Client& client) { return client.spec(table); });
    Gradient given = gradient(spec, addresses, scale, false, reject_nan);
    return self.call(then(true, seconds), [&](Client& client) {
      return client.push_pull(table, given.bytes, std::move(given.owner), into(out));
    });
  });
}

uint64_t pull(Endpoint& self, uint32_t table, uintptr_t out, bool fresh, double seconds, Kept kept,
              nb::object arrays) {
  return run(self, seconds, kept, arrays, [&] {
    return self.call(then(true, seconds),
                     [&](Client& client) { return client.pull(table, into(out), fresh); });
  });
}

void bind_specs(nb::module_& module) {
  nb::class_<Update>(module, "Update")
      .def(
          "__init__",
          [](Update* self, int kind, bool nesterov, bool semiring, int times,
             const std::vector<double>& numbers) {
            std::array<double, Update::kNumbers> all{};
            std::copy_n(numbers.begin(), std::min(numbers.size(), all.size()), all.begin());
            new (self) Update(Update::of(static_cast<UpdateKind>(kind), nesterov, semiring,
                                         static_cast<ReduceOp>(times), all));
          },
          nb::arg("kind"), nb::arg("nesterov") = false, nb::arg("semiring") = false,
          nb::arg("times") = static_cast<int>(ReduceOp::kProd),
          nb::arg("numbers") = std::vector<double>{})
      .def_prop_ro("kind", [](const Update& self) { return static_cast<int>(self.kind); })
      .def("describe", &Update::describe);
  nb::class_<TableSpec>(module, "TableSpec")
      .def(
          "__init__",
          [](TableSpec* self, int dtype, uint64_t count, const Update& update, int staleness,
             bool mean, bool deterministic, bool continues) {
            TableSpec spec;
            spec.dtype = spec.wire = static_cast<Dtype>(dtype);
            spec.mean = mean;
            spec.deterministic = deterministic;
            spec.continues = continues;
            spec.staleness = staleness;
            spec.count = count;
            spec.update = update;
            new (self) TableSpec(spec);
          },
          nb::arg("dtype"), nb::arg("count"), nb::arg("update"), nb::arg("staleness"),
          nb::arg("mean") = false, nb::arg("deterministic") = false, nb::arg("continues") = false)
      .def(
          "with_rows",
          [](const TableSpec& self, int wire, int initial, double a, double b, uint64_t seed,
             uint32_t admit, uint64_t expire_after, uint32_t slots) {
            TableSpec spec = self;
            spec.sparse = true;
            spec.wire = static_cast<Dtype>(wire);
            spec.initial = {static_cast<Initial::Kind>(initial), a, b, seed};
            spec.admit = admit;
            spec.expire_after = expire_after;
            spec.slots = slots;
            return spec;
          },
          nb::arg("wire"), nb::arg("initial"), nb::arg("a"), nb::arg("b"), nb::arg("seed"),
          nb::arg("admit") = 1, nb::arg("expire_after") = 0, nb::arg("slots") = kSlots)
      .def_prop_ro(
          "layout",
          [](const TableSpec& self) {
            const RowLayout layout = self.layout();
            return nb::make_tuple(layout.value_bytes, layout.states, layout.step_at,
                                  layout.touched_at, layout.bytes);
          },
          nb::sig("def layout(self) -> tuple[int, int, int, int, int]"))
      .def("describe", &TableSpec::describe);
}

void bind_declarations(nb::class_<Endpoint>& endpoint) {
  endpoint
      .def(
          "declare_table",
          [](Endpoint& self, const std::string& name, const TableSpec& spec,
             const std::string& declaration, int64_t instead_of) {
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              return client.declare_table(name, spec, declaration, instead_of);
            });
          },
          nb::arg("name"), nb::arg("spec"), nb::arg("declaration"), nb::arg("instead_of") = -1,
          Release())
      .def(
          "declare",
          [](Endpoint& self, const std::string& name, const TableSpec& spec, uintptr_t first,
             size_t bytes) {
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              return client.declare(name, spec, {at(first), bytes});
            });
          },
          nb::arg("name"), nb::arg("spec"), nb::arg("first"), nb::arg("bytes"), Release());
}

void bind_calls(nb::class_<Endpoint>& endpoint) {
  endpoint
      .def("push", &push, nb::arg("table"), nb::arg("addresses"), nb::arg("scale"),
           nb::arg("piece"), nb::arg("asked"), nb::arg("copy"), nb::arg("reject_nan"),
           nb::arg("kept"), nb::arg("arrays").none())
      .def("push_pull", &push_pull, nb::arg("table"), nb::arg("addresses"), nb::arg("scale"),
           nb::arg("out"), nb::arg("seconds"), nb::arg("reject_nan"), nb::arg("kept"),
           nb::arg("arrays").none())
      .def("pull", &pull, nb::arg("table"), nb::arg("out"), nb::arg("fresh"), nb::arg("seconds"),
           nb::arg("kept"), nb::arg("arrays").none())
      .def(
          "ask",
          [](Endpoint& self, uint32_t table, uint64_t top, bool sizes) {
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              if (sizes) return client.ask(table, kStoreSummary, kStoreSizes);
              return client.ask(table, top == 0 ? kStoreSummary : kStoreTop, top);
            });
          },
          nb::arg("table"), nb::arg("top"), nb::arg("sizes") = false, Release())
      .def(
          "set",
          [](Endpoint& self, uint32_t table, const Update& update) {
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.set(table, update); });
          },
          nb::arg("table"), nb::arg("update"), Release())
      .def(
          "who",
          [](Endpoint& self, uint32_t table) {
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.who(table); });
          },
          nb::arg("table"), Release())
      .def(
          "leave",
          [](Endpoint& self, const std::string& store) {
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.leave(store); });
          },
          nb::arg("store"), Release())
      .def(
          "tick",
          [](Endpoint& self, const std::vector<uint32_t>& tables) {
            self.call(Endpoint::Then::kReturn, [&](Client& client) {
              for (const uint32_t table : tables) client.tick(table);
            });
          },
          nb::arg("tables"), Release());
}

void bind_questions(nb::class_<Endpoint>& endpoint) {
  endpoint
      .def(
          "wait",
          [](Endpoint& self, uint64_t call, double seconds) {
            return self.wait(call, after(Clock::now(), seconds));
          },
          nb::arg("call"), nb::arg("seconds"), Release())
      .def(
          "wait_flushed",
          [](Endpoint& self, double seconds) {
            return self.wait_flushed(after(Clock::now(), seconds));
          },
          nb::arg("seconds"), Release())
      .def(
          "done",
          [](Endpoint& self, uint64_t call) {
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              return client.done(call);
            }) || self.look([&](const Client& client) { return client.done(call); });
          },
          nb::arg("call"), Release())
      .def(
          "go_on",
          [](Endpoint& self) {
            try {
              self.call(Endpoint::Then::kBackground, [](Client&) {});
            } catch (const Error&) {
              // There is nothing to go on with.
            }
          },
          Release())
      .def(
          "outcome",
          [](Endpoint& self, uint64_t call) {
            Client::Outcome outcome;
            self.look([&](Client& client) { outcome = client.outcome(call); });
            return as_tuple(outcome);
          },
          nb::arg("call"), nb::sig(kOutcome))
      .def(
          "trouble",
          [](Endpoint& self, uint32_t table) {
            Client::Outcome outcome;
            self.look([&](Client& client) { outcome = client.trouble(table); });
            return as_tuple(outcome);
          },
          nb::arg("table"), nb::sig(kTrouble));
}

void bind_state(nb::class_<Endpoint>& endpoint) {
  endpoint
      .def(
          "table_of",
          [](Endpoint& self, const std::string& name) {
            return self.look([&](const Client& client) {
              return static_cast<int64_t>(client.table_of(name)->table);
            });
          },
          nb::arg("name"))
      .def(
          "maker_of",
          [](Endpoint& self, const std::string& name) {
            return self.look([&](const Client& client) {
              return static_cast<int64_t>(client.table_of(name)->maker);
            });
          },
          nb::arg("name"))
      .def(
          "shards_of",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.shards_of(table); });
          },
          nb::arg("table"))
      .def("sent_bytes",
           [](Endpoint& self) {
             return self.look([](const Client& client) { return client.sent_bytes(); });
           })
      .def("kept_bytes",
           [](Endpoint& self) {
             return self.look([](const Client& client) { return client.kept_bytes(); });
           })
      .def(
          "ahead",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.ahead(table); });
          },
          nb::arg("table"))
      .def(
          "clock",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.clock(table); });
          },
          nb::arg("table"))
      .def(
          "cache_hits",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.cache_hits(table); });
          },
          nb::arg("table"));
}

void bind_endpoint(nb::module_& module) {
  nb::class_<Endpoint> endpoint(module, "StoreEndpoint");
  endpoint
      .def(
          "__init__",
          [](Endpoint* self, uint32_t worker, uint32_t shards) {
            new (self) Endpoint({worker, 1, shards, Planted::kNone});
          },
          nb::arg("worker"), nb::arg("shards"))
      .def(
          "embed",
          [](Endpoint& self, uint32_t slots, std::shared_ptr<Replay> replay) {
            self.embed(slots, std::move(replay));
          },
          nb::arg("slots"), nb::arg("replay").none() = nb::none())
      .def("add_channel", &Endpoint::add_channel, nb::arg("shard"), nb::arg("socket"),
           nb::arg("segment"), Release())
      .def("may_spin", &Endpoint::may_spin, nb::arg("yes"))
      .def("broken", &Endpoint::broken)
      .def("close", &Endpoint::close, Release());
  bind_declarations(endpoint);
  bind_calls(endpoint);
  bind_questions(endpoint);
  bind_state(endpoint);
  bind_rows(endpoint, module);
}

void bind_server(nb::module_& module) {
  nb::class_<Replay>(module, "Replay").def(nb::init<>()).def("report", &Replay::report);
  nb::class_<Server>(module, "StoreServer")
      .def(
          "__init__",
          [](Server* self, uint32_t workers, uint32_t first_shard, uint32_t shards,
             uint32_t all_shards, uint32_t slots, bool may_spin, std::shared_ptr<Replay> replay) {
            new (self) Server({workers, first_shard, shards, all_shards, slots, may_spin},
                              std::move(replay));
          },
          nb::arg("workers"), nb::arg("first_shard"), nb::arg("shards"), nb::arg("all_shards"),
          nb::arg("slots"), nb::arg("may_spin"), nb::arg("replay").none() = nb::none())
      .def("add_channel", &Server::add_channel, nb::arg("shard"), nb::arg("socket"),
           nb::arg("segment"), nb::arg("worker") = -1, Release())
      .def("on_lost", &Server::on_lost, nb::arg("worker"), Release())
      .def("on_left", &Server::on_left, nb::arg("worker"), Release())
      .def("on_came", &Server::on_came, nb::arg("observer"), Release())
      .def("on_gone", &Server::on_gone, nb::arg("observer"), Release())
      .def(
          "wait_until_over",
          [](Server& self, double seconds) {
            return self.wait_until_over(std::chrono::milliseconds(int64_t(seconds * 1000)));
          },
          nb::arg("seconds"), Release())
      .def(
          "counts",
          [](const Server& self) {
            const auto counts = self.counts();
            return nb::make_tuple(counts.pushes, counts.channels, counts.refused);
          },
          nb::sig("def counts(self) -> tuple[int, int, int]"))
      .def("lost", &Server::lost)
      .def("close", &Server::close, Release());
}

// A server's messages take and free memory all the time; given back to the system every time, its
// pages would have to be made anew, which takes longer than all else that is done with them.
void keep_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// Health threads that tell the store, instead of a group's engine, what they hear.
std::shared_ptr<Health> watch_server(Server& server, int rank, double peer_timeout) {
  return std::make_shared<Health>(
      rank, peer_timeout,
      Health::Callbacks{[&server](const Failure& failure) {
                          if (failure.code == FailureCode::kPeerLost && failure.rank >= 0)
                            server.on_lost(uint32_t(failure.rank));
                        },
                        [&server](int left) { server.on_left(uint32_t(left)); }});
}

// Of the members only servers matter to a worker, and itself when it was taken for lost; other
// workers are the shards' business.
std::shared_ptr<Health> watch_endpoint(Endpoint& endpoint, int rank, int workers,
                                       double peer_timeout) {
  return std::make_shared<Health>(
      rank, peer_timeout,
      Health::Callbacks{[&endpoint, workers, rank](Failure failure) {
                          if (failure.rank >= workers || failure.rank == rank)
                            endpoint.fail(std::move(failure));
                        },
                        [](int) {}});
}

}  // namespace

void bind_store(nb::module_& module) {
  bind_specs(module);
  bind_server(module);
  bind_endpoint(module);
  bind_plain_table(module);
  bind_store_machines(module);
  bind_saving_files(module);
  module.def("keep_memory", &keep_memory);
  bind_store_status(module);
  module.def("channel_segment", [] { return new_segment(SharedChannel::segment_bytes()); });
  module.def("watch_server", &watch_server, nb::arg("server"), nb::arg("rank"),
             nb::arg("peer_timeout"), nb::keep_alive<0, 1>());
  module.def("watch_endpoint", &watch_endpoint, nb::arg("endpoint"), nb::arg("rank"),
             nb::arg("workers"), nb::arg("peer_timeout"), nb::keep_alive<0, 1>());
}

}  // namespace commute::bindings
