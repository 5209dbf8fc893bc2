// SPDX-License-Identifier: Apache-2.0
// The parser for Python. Text and keys are given by address, arrays share memory with `Examples`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "learn/parser.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
using ColumnTuple = std::tuple<std::string, std::string, bool, double, double, std::vector<double>>;
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// Of a line that could not be read.
constexpr Py_ssize_t kShownCharacters = 80;

std::string_view text_at(uintptr_t address, size_t size) {
  return {reinterpret_cast<const char*>(address), size};
}

// Of any bytes: what is no UTF-8 is replaced.
nb::str decoded(const std::string& bytes) {
  PyObject* const text = PyUnicode_DecodeUTF8(bytes.data(), std::ssize(bytes), "replace");
  if (text == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(text);
}

nb::str beginning(const nb::str& text) {
  PyObject* const first = PyUnicode_Substring(text.ptr(), 0, kShownCharacters);
  if (first == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(first);
}

Recipe recipe_of(const std::string& format, const std::string& separator,
                 const std::vector<ColumnTuple>& columns,
                 std::vector<std::vector<std::string>> crosses, std::vector<std::string> positive,
                 bool binary, bool constant, bool labels_needed) {
  Recipe recipe{.format = text_format(format),
                .separator = ',',
                .columns = {},
                .crosses = std::move(crosses),
                .positive = std::move(positive),
                .binary = binary,
                .constant = constant,
                .labels_needed = labels_needed};
  if (recipe.format != TextFormat::kCsv) return recipe;
  if (separator.size() != 1)
    throw nb::value_error("a separator is one character of ASCII, for instance ',' or a tab");
  recipe.separator = separator.front();
  for (const auto& [name, kind, log, shift, scale, edges] : columns)
    recipe.columns.push_back({name, column_kind(kind), log, shift, scale, edges});
  return recipe;
}

template <class T>
Array<T> shared(nb::handle_t<Examples> self, std::vector<T> Examples::* member) {
  std::vector<T>& values = nb::cast<Examples&>(self).*member;
  return Array<T>(values.data(), {values.size()}, self);
}

nb::list bad_lines(const Examples& self) {
  nb::list bad;
  for (const BadLine& line : self.bad)
    bad.append(nb::make_tuple(line.line, decoded(line.what), beginning(decoded(line.text))));
  return bad;
}

nb::dict names(const Parser& self, uintptr_t address, size_t size, uintptr_t keys, size_t count) {
  std::unordered_map<uint64_t, std::string> found;
  {
    const nb::gil_scoped_release released;
    found = self.names(text_at(address, size), {reinterpret_cast<const uint64_t*>(keys), count});
  }
  nb::dict named;
  for (const auto& [key, name] : found) named[nb::int_(key)] = decoded(name);
  return named;
}

void bind_examples(nb::module_& module) {
  using Self = nb::handle_t<Examples>;
  nb::class_<Examples>(module, "Examples")
      .def_ro("consumed", &Examples::consumed)
      .def_ro("lines", &Examples::lines)
      .def_prop_ro("count", &Examples::count)
      .def_prop_ro("labels", [](Self self) { return shared(self, &Examples::labels); })
      .def_prop_ro("weights", [](Self self) { return shared(self, &Examples::weights); })
      .def_prop_ro("offsets", [](Self self) { return shared(self, &Examples::offsets); })
      .def_prop_ro("keys", [](Self self) { return shared(self, &Examples::keys); })
      .def_prop_ro("values",
                   [](Self self) -> std::optional<Array<float>> {
                     if (nb::cast<Examples&>(self).plain) return std::nullopt;
                     return shared(self, &Examples::values);
                   })
      .def_prop_ro("bad", &bad_lines, nb::sig("def bad(self) -> list[tuple[int, str, str]]"));
}

}  // namespace

void bind_learn(nb::module_& module) {
  bind_examples(module);
  nb::class_<Parser>(module, "Parser")
      .def(
          "__init__",
          [](Parser* self, const std::string& format, const std::string& separator,
             const std::vector<ColumnTuple>& columns, std::vector<std::vector<std::string>> crosses,
             std::vector<std::string> positive, bool binary, bool constant, bool labels_needed) {
            new (self) Parser(recipe_of(format, separator, columns, std::move(crosses),
                                        std::move(positive), binary, constant, labels_needed));
          },
          nb::arg("format"), nb::arg("separator"), nb::arg("columns"), nb::arg("crosses"),
          nb::arg("positive"), nb::arg("binary"), nb::arg("constant"),
          nb::arg("labels_needed") = true)
      .def(
          "parse",
          [](const Parser& self, uintptr_t address, size_t size, size_t most, bool last) {
            return self.parse(text_at(address, size), most, last);
          },
          nb::arg("address"), nb::arg("size"), nb::arg("most"), nb::arg("last"), Release())
      .def("names", &names, nb::arg("address"), nb::arg("size"), nb::arg("keys"), nb::arg("count"),
           nb::sig("def names(self, address: int, size: int, keys: int, count: int) "
                   "-> dict[int, str]"));
}

}  // namespace commute::bindings
