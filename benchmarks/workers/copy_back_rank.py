# SPDX-License-Identifier: Apache-2.0
"""The physical limit of an exchange: an array is copied into another and that into a third.

These are the bytes both ways, without a server: nothing that carries an array out of a process and
a new one back through this memory can be faster. Arguments: socket, rank, size.
"""

import sys

import numpy as np

from benchmarks.workers.exchanges import Exchange, Keeps, serve
from benchmarks.workers.turns import Array


class CopyBack:
    keeps = Keeps.LAST

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.version = f"numpy {np.__version__}"

    def barrier(self) -> None:
        pass

    def declare(self, table: str, bytes: int) -> None:
        pass

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        middle = np.zeros_like(source)

        def exchange() -> Array:
            np.copyto(middle, source)
            np.copyto(result, middle)
            return result

        return exchange


if __name__ == "__main__":
    serve(CopyBack(rank=int(sys.argv[2]), size=int(sys.argv[3])))
