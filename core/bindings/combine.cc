// SPDX-License-Identifier: Apache-2.0
// Reductions that the caller brings along: a compiled function by its address, or a function of
// Python, for which the GIL is taken.
#include "combine.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

class CompiledCombine : public Combine {
 public:
  explicit CompiledCombine(uintptr_t address) : function_(reinterpret_cast<Function>(address)) {}

  void apply(const void* a, const void* b, void* out, size_t count) const override {
    function_(a, b, out, count);
  }

 private:
  using Function = void (*)(const void* a, const void* b, void* out, size_t count);
  Function function_;
};

class PythonCombine : public Combine {
 public:
  PythonCombine(nb::object function, size_t item_bytes, uint32_t fingerprint)
      : function_(std::move(function)), item_bytes_(item_bytes), fingerprint_(fingerprint) {}

  void apply(const void* a, const void* b, void* out, size_t count) const override {
    const nb::gil_scoped_acquire held;
    std::string trouble;
    try {
      const auto bytes = static_cast<Py_ssize_t>(count * item_bytes_);
      trouble = nb::cast<std::string>(function_(
          view(a, bytes, PyBUF_READ), view(b, bytes, PyBUF_READ), view(out, bytes, PyBUF_WRITE)));
    } catch (const std::exception& error) {  // raised past its own care, or no text
      trouble = error.what();
    }
    if (!trouble.empty()) throw CombineFailed(trouble);
  }

  uint32_t fingerprint() const override { return fingerprint_; }

 private:
  static nb::object view(const void* array, Py_ssize_t bytes, int flags) {
    auto* const data = static_cast<char*>(const_cast<void*>(array));
    return nb::steal(PyMemoryView_FromMemory(data, bytes, flags));
  }

  nb::object function_;
  size_t item_bytes_;
  uint32_t fingerprint_;
};

}  // namespace

void bind_combine(nb::module_& module) {
  nb::class_<Combine>(module, "Combine");
  nb::class_<CompiledCombine, Combine>(module, "CompiledCombine")
      .def(nb::init<uintptr_t>(), nb::arg("address"));
  // `function` is given a, b and out as memoryviews; it returns what went wrong, or an empty text.
  nb::class_<PythonCombine, Combine>(module, "PythonCombine")
      .def(nb::init<nb::object, size_t, uint32_t>(), nb::arg("function"), nb::arg("item_bytes"),
           nb::arg("fingerprint"));
}

}  // namespace commute::bindings
