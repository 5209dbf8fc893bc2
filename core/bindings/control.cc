// SPDX-License-Identifier: Apache-2.0
// Only for the test that compares this grammar with the one written in Python.
#include "control.h"

#include <nanobind/stl/string.h>

#include "bindings.h"

namespace nb = nanobind;

namespace commute::bindings {

void bind_control(nb::module_& module) {
  module.def("encode_control", [](int kind, int code, int rank, int by, uint64_t operation,
                                  std::string text, uint64_t group) {
    const std::string bytes = encode({static_cast<ControlKind>(kind), static_cast<uint8_t>(code),
                                      rank, by, operation, std::move(text), group});
    return nb::bytes(bytes.data(), bytes.size());
  });
  module.def("decode_control", [](const nb::bytes& bytes) -> nb::object {
    std::string copy(bytes.c_str(), bytes.size());
    const auto frame = decode(copy);
    if (!frame) return nb::none();
    return nb::make_tuple(static_cast<int>(frame->kind), frame->code, frame->rank, frame->by,
                          frame->operation, frame->text, frame->group);
  });
}

}  // namespace commute::bindings
