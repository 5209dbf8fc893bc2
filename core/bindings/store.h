// SPDX-License-Identifier: Apache-2.0
// What the bindings of the store share.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings.h"
#include "store/endpoint.h"

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

// `asked`: somebody will ask about the call; with seconds from 0 up at once.
inline Endpoint::Then then(bool asked, double seconds) {
  if (seconds >= 0) return Endpoint::Then::kWait;
  return asked ? Endpoint::Then::kBackground : Endpoint::Then::kReturn;
}

// 0 when it is done and was not refused, else the call, to be waited for; its arrays are kept then.
template <class Begin>
uint64_t run(Endpoint& endpoint, double seconds, Kept& kept, nanobind::handle arrays, Begin begin) {
  uint64_t call = 0;
  bool done = false;
  {
    const nanobind::gil_scoped_release released;
    call = begin();
    try {
      done =
          call == 0 || (seconds >= 0 && endpoint.wait(call, after(Clock::now(), seconds)) &&
                        !endpoint.look([&](const Client& client) { return client.refused(call); }));
    } catch (const Error&) {
      // Whoever finishes the call hears of it.
    }
  }
  if (!done && !arrays.is_none()) keep_until_done(kept, call, arrays);
  return done ? 0 : call;
}

void bind_rows(nanobind::class_<Endpoint>& endpoint, nanobind::module_& module);

}  // namespace commute::bindings
