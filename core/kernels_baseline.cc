// SPDX-License-Identifier: Apache-2.0
// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
#define COMMUTE_KERNELS baseline
#include "kernels_body.h"
