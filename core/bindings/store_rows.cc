// SPDX-License-Identifier: Apache-2.0
// Rows for Python: keys in the order they travel, and the calls of a sparse table.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "bindings/store.h"
#include "store/encoding.h"
#include "store/query.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

// What a ticket holds, and every call makes.
struct Keys {
  Client::Order order;
  size_t given = 0;  // how many, repeated ones included
};

Keys order_of(Endpoint& self, uintptr_t address, size_t count) {
  const nb::gil_scoped_release released;
  return {self.order_of({reinterpret_cast<const uint64_t*>(address), count}), count};
}

Keys distinct_of(Endpoint& self, uintptr_t address, size_t count, uintptr_t index,
                 bool come_again) {
  const nb::gil_scoped_release released;
  const Client::Order order = self.distinct_of({reinterpret_cast<const uint64_t*>(address), count},
                                               reinterpret_cast<uint32_t*>(index), come_again);
  return {order, order->keys.size()};
}

template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using GivenKeys = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
Array<T> array_of(std::vector<T>&& values) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  std::vector<T>& kept_values = *kept;
  const nb::capsule owner(kept.release(),
                          [](void* done) noexcept { delete static_cast<std::vector<T>*>(done); });
  return Array<T>(kept_values.data(), {kept_values.size()}, owner);
}

// Of no store: in the order of the hashes, whatever shards there will be.
std::tuple<Array<uint64_t>, Array<uint32_t>> distinct_keys(const GivenKeys& given) {
  std::vector<uint32_t> index(given.size());
  KeyOrder order;
  {
    const nb::gil_scoped_release released;
    order = KeyOrder::distinct({given.data(), given.size()}, 1, 1, index.data());
  }
  return {array_of(std::move(order.keys)), array_of(std::move(index))};
}

// The table's specification, as if it were dense and as large as the gradient.
TableSpec spec_of(Endpoint& endpoint, uint32_t table, size_t rows) {
  TableSpec spec = endpoint.look([&](const Client& client) { return client.spec(table); });
  spec.count *= rows;
  return spec;
}

// Also where none was given: repeated keys are combined.
bool makes_nan(TableSpec spec, const KeyOrder& order, const std::byte* given) {
  if (has_nan(spec.dtype, given, spec.count)) return true;
  if (!order.repeats()) return false;
  spec.count /= order.sources.size();
  std::vector<std::byte> rows(order.keys.size() * spec.bytes());
  gather_rows(order, spec, 0, order.keys.size(), given, rows.data());
  return has_nan(spec.dtype, rows.data(), order.keys.size() * spec.count);
}

uint64_t push_rows(Endpoint& self, uint32_t table, const Keys& keys,
                   const std::vector<uintptr_t>& given, uintptr_t scale, uintptr_t out, bool piece,
                   int remember, bool asked, bool reject_nan, double seconds, Kept kept,
                   nb::object arrays) {
  return run(self, seconds, kept, arrays, [&] {
    const TableSpec spec = spec_of(self, table, keys.given);
    const std::byte* rows = at(given.front());
    Client::Owner owner;
    if (given.size() > 1 || scale != 0) {
      std::vector<const std::byte*> devices;
      for (const uintptr_t address : given) devices.push_back(at(address));
      owner = gather(spec, devices, at(scale));
      rows = owner->data();
    }
    if (reject_nan && makes_nan(spec, *keys.order, rows)) throw std::invalid_argument("NaN");
    const Client::RowCall call{keys.order, rows, into(out), piece, Client::Remember(remember),
                               asked};
    return self.call(then(asked, seconds), [&](Client& client) {
      return client.push_rows(table, call, [&] { self.move(); });
    });
  });
}

uint64_t pull_rows(Endpoint& self, uint32_t table, const Keys& keys, uintptr_t out, int remember,
                   double seconds, Kept kept, nb::object arrays) {
  return run(self, seconds, kept, arrays, [&] {
    const Client::RowCall call{keys.order, nullptr, into(out), false, Client::Remember(remember),
                               true};
    return self.call(then(true, seconds), [&](Client& client) {
      return client.pull_rows(table, call, [&] { self.move(); });
    });
  });
}

// What is saved, and back.
void bind_saving(nb::class_<Endpoint>& endpoint) {
  endpoint
      .def(
          "items",
          [](Endpoint& self, uint32_t table, uint32_t part, uint64_t start, uintptr_t out,
             Kept kept, nb::object array) {
            return run(self, -1, kept, array, [&] {
              return self.call(Endpoint::Then::kReturn, [&](Client& client) {
                return client.items(table, part, start, into(out));
              });
            });
          },
          nb::arg("table"), nb::arg("part"), nb::arg("start"), nb::arg("out"), nb::arg("kept"),
          nb::arg("array"))
      .def(
          "building",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.building(table); });
          },
          nb::arg("table"))
      .def(
          "parts_of",
          [](Endpoint& self, uint32_t table) {
            return self.look([&](const Client& client) { return client.parts_of(table); });
          },
          nb::arg("table"))
      .def(
          "reset",
          [](Endpoint& self, uint32_t table, uint64_t clock) {
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.reset(table, clock); });
          },
          nb::arg("table"), nb::arg("clock"), Release())
      .def(
          "begin_at",
          [](Endpoint& self, uint32_t table, uint64_t clock) {
            self.call(Endpoint::Then::kReturn,
                      [&](Client& client) { client.begin_at(table, clock); });
          },
          nb::arg("table"), nb::arg("clock"), Release())
      .def(
          "load",
          [](Endpoint& self, uint32_t table, uint32_t part, uint64_t updates, uint64_t which,
             uintptr_t array, size_t bytes) {
            std::vector<std::byte> saved;
            put(saved, SavedArray{updates, which});
            put_bytes(saved, at(array), bytes);
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              return client.load(table, part, std::move(saved));
            });
          },
          nb::arg("table"), nb::arg("part"), nb::arg("updates"), nb::arg("which"), nb::arg("array"),
          nb::arg("bytes"), Release())
      .def(
          "load_rows",
          [](Endpoint& self, uint32_t table, const Keys& keys, uintptr_t rows, uint64_t expected) {
            const Client::RowCall call{keys.order, at(rows)};
            return self.call(Endpoint::Then::kReturn, [&](Client& client) {
              return client.load_rows(table, call, expected);
            });
          },
          nb::arg("table"), nb::arg("keys"), nb::arg("rows"), nb::arg("expected"), Release());
}

}  // namespace

void bind_rows(nb::class_<Endpoint>& endpoint, nb::module_& module) {
  nb::class_<Keys>(module, "Keys")
      .def_ro("given", &Keys::given)
      .def_prop_ro("unique", [](const Keys& self) { return self.order->keys.size(); });
  module.def("distinct_keys", &distinct_keys, nb::arg("keys").noconvert());
  endpoint.def("order_of", &order_of, nb::arg("address"), nb::arg("count"))
      .def("distinct_of", &distinct_of, nb::arg("address"), nb::arg("count"), nb::arg("index"),
           nb::arg("come_again"))
      .def("push_rows", &push_rows, nb::arg("table"), nb::arg("keys"), nb::arg("given"),
           nb::arg("scale"), nb::arg("out"), nb::arg("piece"), nb::arg("remember"),
           nb::arg("asked"), nb::arg("reject_nan"), nb::arg("seconds"), nb::arg("kept"),
           nb::arg("arrays").none())
      .def("pull_rows", &pull_rows, nb::arg("table"), nb::arg("keys"), nb::arg("out"),
           nb::arg("remember"), nb::arg("seconds"), nb::arg("kept"), nb::arg("arrays").none())
      .def(
          "drop_rows",
          [](Endpoint& self, uint32_t table, const Keys& keys) {
            const nb::gil_scoped_release released;
            const Client::RowCall call{keys.order};
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.drop_rows(table, call); });
          },
          nb::arg("table"), nb::arg("keys"))
      .def(
          "reserve",
          [](Endpoint& self, uint32_t table, uint64_t rows) {
            return self.call(Endpoint::Then::kReturn,
                             [&](Client& client) { return client.reserve(table, rows); });
          },
          nb::arg("table"), nb::arg("rows"), nb::call_guard<nb::gil_scoped_release>());
  bind_saving(endpoint);
}

}  // namespace commute::bindings
