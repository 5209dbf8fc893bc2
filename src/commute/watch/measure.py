# SPDX-License-Identifier: Apache-2.0
"""Quick measurements on the live system, for `commute doctor` and the demo.

Not a benchmark: benchmarks/ compares with peers, interleaved and guarded against noise.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from commute.group import Group

_COPIES = 20
_SMALL_BYTES = 1 << 20  # below, several calls per barrier


def allreduce_seconds(
    world: Group, nbytes: int, seconds: float, algorithm: str | None = None
) -> float:
    """The median time of an allreduce of float32; collective, lasts about `seconds`."""
    x = np.ones(nbytes // 4, dtype=np.float32)
    # Without other arguments a call takes the compiled path.
    options: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
    samples: list[float] = []
    # All ranks must make as many calls: rank 0 says when it is enough.
    more = np.ones(1, dtype=np.uint8)
    begun = time.perf_counter()
    while more[0]:
        world.barrier()
        for _ in range(10 if nbytes < _SMALL_BYTES else 1):
            x.fill(1)
            before = time.perf_counter()
            world.allreduce(x, **options)
            samples.append(time.perf_counter() - before)
        more[0] = time.perf_counter() - begun < seconds
        world.broadcast(more)
    return statistics.median(samples)


def copy_seconds(nbytes: int) -> float:
    """The median time of a memory copy: the physical limit to compare with."""
    source, target = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    samples = []
    for _ in range(_COPIES):
        before = time.perf_counter()
        np.copyto(target, source)
        samples.append(time.perf_counter() - before)
    return statistics.median(samples)
