// SPDX-License-Identifier: Apache-2.0
// Arrays in memory that local peers reach. What Python gets is an array of bytes; when the last
// array that views it goes, its block goes back to the arena.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "bindings.h"
#include "engine.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

struct Block {
  std::shared_ptr<Arena> arena;
  size_t at;
  size_t bytes;
};

// The array, and where in the segment it begins; nothing when there is no memory for it.
std::optional<std::pair<Bytes, size_t>> take_array(Engine& engine, size_t bytes) {
  const std::shared_ptr<Arena>& arena = engine.outboxes().arena();
  std::optional<size_t> at;
  {
    const nb::gil_scoped_release release;  // new pages take their time
    at = arena->take(bytes);
  }
  if (!at) return std::nullopt;
  const nb::capsule owner(new Block{arena, *at, bytes}, [](void* block) noexcept {
    const std::unique_ptr<Block> mine(static_cast<Block*>(block));
    mine->arena->give(mine->at, mine->bytes);
  });
  return std::pair(Bytes(arena->data(*at), {bytes}, owner), *at);
}

std::shared_ptr<SharedArray> share_array(Engine& engine, uint64_t number,
                                         const std::vector<size_t>& places, size_t bytes) {
  auto array = std::make_shared<SharedArray>();
  array->number = number;
  const nb::gil_scoped_release release;
  for (size_t rank = 0; rank < places.size(); ++rank)
    array->at.push_back(engine.outboxes().array(int(rank), places[rank], bytes));
  return array;
}

}  // namespace

void bind_arrays(nb::module_& module) {
  nb::class_<SharedArray>(module, "SharedArray");
  module.def("take_array", &take_array, nb::arg("engine"), nb::arg("nbytes"),
             nb::sig("def take_array(engine: Engine, nbytes: int) -> "
                     "tuple[typing.Any, int] | None"));
  module.def("share_array", &share_array, nb::arg("engine"), nb::arg("number"), nb::arg("places"),
             nb::arg("nbytes"));
}

}  // namespace commute::bindings
