// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#define COMMUTE_KERNELS avx2
#include "kernels_body.h"
#endif
