// SPDX-License-Identifier: Apache-2.0
// What the bindings of the store share.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "store/client.h"

namespace commute::bindings {

inline constexpr const char* kOutcome =
    "def outcome(self, call: int) -> tuple[int, int, str, bytes]";

inline const std::byte* at(uintptr_t address) {
  return reinterpret_cast<const std::byte*>(address);
}

inline std::byte* into(uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

// Arrays that the core reads or writes must live until their call is done, also when the caller is
// interrupted as soon as it is back in Python: so they are kept here, before that.
using Kept = nanobind::typed<nanobind::dict, nanobind::int_, nanobind::object>;

inline void keep_until_done(Kept& kept, uint64_t call, nanobind::handle arrays) {
  kept[nanobind::cast(call)] = arrays;
}

inline nanobind::bytes as_bytes(const std::vector<std::byte>& bytes) {
  return nanobind::bytes(bytes.data(), bytes.size());
}

inline nanobind::tuple as_tuple(const Client::Outcome& outcome) {
  return nanobind::make_tuple(static_cast<int>(outcome.code), outcome.about, outcome.why,
                              as_bytes(outcome.answers));
}

}  // namespace commute::bindings
