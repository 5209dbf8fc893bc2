// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "bindings.h"
#include "chunk.h"

namespace nb = nanobind;

namespace commute::bindings {
namespace {

Plan make_plan(int collective, std::string algorithm, int rank, int ranks, int root, uint64_t hash,
               uint32_t chunks, std::array<uint32_t, kSpaces> blocks, nb::bytes code,
               std::vector<uint32_t> signals_per_tile, bool settled, bool direct) {
  Plan plan;
  plan.collective = static_cast<Collective>(collective);
  plan.algorithm = std::move(algorithm);
  plan.rank = rank;
  plan.ranks = ranks;
  plan.root = root;
  plan.hash = hash;
  plan.chunks = chunks;
  std::copy(blocks.begin(), blocks.end(), plan.blocks);
  plan.code.resize(code.size() / sizeof(Instruction));
  std::memcpy(plan.code.data(), code.c_str(), plan.code.size() * sizeof(Instruction));
  plan.signals_per_tile = std::move(signals_per_tile);
  plan.settled = settled;
  plan.direct = direct;
  return plan;
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan");
  module.def("make_plan", &make_plan, nb::arg("collective"), nb::arg("algorithm"), nb::arg("rank"),
             nb::arg("ranks"), nb::arg("root"), nb::arg("hash"), nb::arg("chunks"),
             nb::arg("blocks"), nb::arg("code"), nb::arg("signals_per_tile"), nb::arg("settled"),
             nb::arg("direct"));
  module.def("chunk_bound", &chunk_bound, nb::arg("elements"), nb::arg("item_bytes"),
             nb::arg("chunks"), nb::arg("chunk"));
  module.attr("SIGNALS") = kSignals;
}

}  // namespace commute::bindings
