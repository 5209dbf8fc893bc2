# SPDX-License-Identifier: Apache-2.0
"""The physical limit beside the libraries: every rank copies its array once, all at the same time.

Nothing that hands each rank a new array of this size on this host can be faster than the memory
itself. The ranks do not talk; the driver starts their turns within microseconds of each other.
Arguments: socket, rank, size.
"""

import sys
from functools import partial

import numpy as np

from benchmarks.workers.turns import Array, Call, serve


class Copy:
    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.version = f"numpy {np.__version__}"

    def barrier(self) -> None:
        pass

    def bind(self, source: Array, result: Array) -> Call:
        return partial(np.copyto, result, source)

    def expected(self) -> float:
        return self.rank + 1


if __name__ == "__main__":
    serve(Copy(rank=int(sys.argv[2]), size=int(sys.argv[3])))
