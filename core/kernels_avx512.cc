// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#define COMMUTE_KERNELS avx512
#include "kernels_body.h"
#endif
