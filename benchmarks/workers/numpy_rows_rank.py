# SPDX-License-Identifier: Apache-2.0
"""The limit of the memory for rows: an array of them in this process. Argument: socket.

A pull gathers rows by their number, a push scatters them: no key is looked up, no step is made, and
no byte leaves the process.
"""

import os
from collections.abc import Callable

import numpy as np

from benchmarks.workers.rows import RESIDENT, Chosen, Counts, resident_bytes, serve
from benchmarks.workers.turns import Array


class Rows:
    def __init__(self, width: int) -> None:
        self._rows: Array = np.zeros((RESIDENT, width), np.float32)

    def given(self, patterns: Array, pushes: Counts) -> Array:
        return self.holds(patterns, pushes)

    def holds(self, patterns: Array, pushes: Counts) -> Array:
        return patterns * pushes[:, None].astype(np.float32)

    def pull(self, chosen: Chosen, out: Array) -> Callable[[], Array]:
        # "clip" writes into `out` at once; no number is out of bounds.
        return lambda: np.take(self._rows, chosen.places, axis=0, out=out, mode="clip")

    def push(self, chosen: Chosen, rows: Array, variant: str) -> Callable[[], object]:
        def push() -> None:
            self._rows[chosen.places] = rows

        return push

    def memory(self) -> dict[str, int]:
        return {"in place": resident_bytes(os.getpid())}


class InProcess:
    rank, size = 0, 1
    version = f"numpy {np.__version__}"

    def barrier(self) -> None:
        pass

    def table(self, width: int) -> Rows:
        return Rows(width)


if __name__ == "__main__":
    serve(InProcess())
