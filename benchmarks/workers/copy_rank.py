# SPDX-License-Identifier: Apache-2.0
"""The physical limit beside the libraries: every rank copies its array once, all at the same time.

Nothing that hands each rank a new array of this size on this host can be faster than the memory
itself. The ranks do not talk; the driver starts their turns within microseconds of each other.
Arguments: socket, rank, size.
"""

import sys
from functools import partial

import numpy as np

from benchmarks.workers.calls import values_given
from benchmarks.workers.turns import Array, Call, serve


class Copy:
    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.version = f"numpy {np.__version__}"

    def barrier(self) -> None:
        pass

    def bind(self, call: str, source: Array, result: Array) -> Call:
        if call != "allreduce":
            raise ValueError(f"a copy is no limit of {call}")
        return partial(np.copyto, result, source)

    def expected(self, call: str) -> list[float]:
        return values_given(call, self.rank, self.size)


if __name__ == "__main__":
    serve(Copy(rank=int(sys.argv[2]), size=int(sys.argv[3])))
