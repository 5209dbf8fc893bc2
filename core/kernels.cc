// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

namespace commute {

// Defined by the files that include kernels_body.h, each compiled for its instruction set.
namespace baseline {
extern const KernelSet kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelSet kKernels;
}
namespace avx512 {
extern const KernelSet kKernels;
}
#endif

namespace {

struct Supported {
  const KernelSet* sets[3] = {&baseline::kKernels};
  std::size_t count = 1;

  Supported() {
#if defined(__x86_64__)
    // Asks the processor and, by XGETBV, whether the operating system saves the wide registers.
    __builtin_cpu_init();
    // Every processor with AVX2 has F16C, by which clang does not let one ask.
    if (__builtin_cpu_supports("avx2")) {
      sets[count++] = &avx2::kKernels;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets[count++] = &avx512::kKernels;
    }
#endif
  }
};

}  // namespace

std::span<const KernelSet* const> supported_kernel_sets() {
  static const Supported supported;
  return {supported.sets, supported.count};
}

const KernelSet& kernels() {
  static const KernelSet& best = *supported_kernel_sets().back();
  return best;
}

const KernelSet* kernel_set(std::string_view name) {
  for (const KernelSet* set : supported_kernel_sets()) {
    if (set->name == name) return set;
  }
  return nullptr;
}

}  // namespace commute
