// SPDX-License-Identifier: Apache-2.0
// The call path of a table's plain calls: one contiguous array of the table's dtype and shape with
// the buffer protocol, nothing else asked for. Everything else, and every error, is left to the
// Python method.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "bindings/store.h"
#include "store/endpoint.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

constexpr int64_t kNotTaken = -1;
constexpr std::chrono::milliseconds kSlice{100};

class View {
 public:
  View(nb::handle array, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    held_ =
        PyObject_CheckBuffer(array.ptr()) && PyObject_GetBuffer(array.ptr(), &view_, flags) == 0;
    if (!held_) PyErr_Clear();
  }
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  bool fits(const std::string& format, const std::vector<Py_ssize_t>& shape) const {
    return held_ && format == view_.format && size_t(view_.ndim) == shape.size() &&
           std::equal(shape.begin(), shape.end(), view_.shape) &&
           reinterpret_cast<uintptr_t>(view_.buf) % size_t(view_.itemsize) == 0;
  }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t bytes() const { return size_t(view_.len); }
  // Not the same memory, but some of it.
  bool cuts(const View& other) const {
    return data() != other.data() && data() < other.data() + other.bytes() &&
           other.data() < data() + bytes();
  }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

struct PlainTable {
  Endpoint* endpoint;
  uint32_t table;
  std::string format;
  std::vector<Py_ssize_t> shape;
  Kept kept;

  // 0 done; above 0 a call that Python must finish; kNotTaken.
  int64_t push_pull(nb::handle gradient, nb::handle out) {
    const View from(gradient, false), into(out, true);
    if (!from.fits(format, shape) || !into.fits(format, shape) || from.cuts(into)) return kNotTaken;
    const int64_t call = run([&](Client& client) {
      return client.push_pull(table, {from.data(), from.bytes()}, nullptr, into.data());
    });
    if (call > 0) keep_until_done(kept, uint64_t(call), nb::make_tuple(gradient, out));
    return call;
  }

  int64_t pull(nb::handle out) {
    const View into(out, true);
    if (!into.fits(format, shape)) return kNotTaken;
    const int64_t call = run([&](Client& client) { return client.pull(table, into.data()); });
    if (call > 0) keep_until_done(kept, uint64_t(call), out);
    return call;
  }

 private:
  template <class F>
  int64_t run(F call) const {
    const nb::gil_scoped_release released;
    uint64_t number;
    try {
      number = endpoint->call(Endpoint::Then::kWait, call);
    } catch (const Error&) {
      return kNotTaken;  // the method says what is wrong
    }
    try {
      if (number == 0) return 0;
      if (!endpoint->wait(number, Endpoint::Clock::now() + kSlice)) return int64_t(number);
    } catch (const Error&) {
      return int64_t(number);
    }
    return endpoint->look([&](const Client& client) { return client.refused(number); })
               ? int64_t(number)
               : 0;
  }
};

}  // namespace

void bind_plain_table(nb::module_& module) {
  nb::class_<PlainTable>(module, "PlainTable")
      .def(
          "__init__",
          [](PlainTable* self, Endpoint& endpoint, uint32_t table, std::string format,
             std::vector<Py_ssize_t> shape, Kept kept) {
            new (self)
                PlainTable{&endpoint, table, std::move(format), std::move(shape), std::move(kept)};
          },
          nb::arg("endpoint"), nb::arg("table"), nb::arg("format"), nb::arg("shape"),
          nb::arg("kept"), nb::keep_alive<1, 2>())
      .def("push_pull", &PlainTable::push_pull, nb::arg("gradient"), nb::arg("out"))
      .def("pull", &PlainTable::pull, nb::arg("out"));
}

}  // namespace commute::bindings
