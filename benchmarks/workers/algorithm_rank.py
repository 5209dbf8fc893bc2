# SPDX-License-Identifier: Apache-2.0
"""One rank of commute that does a call by any of its algorithms. Argument: socket.

A turn's variant is the name of the algorithm. Calls of a sample share their arrays. Those that have
a root begin at rank 0 and move on by one rank with every call: otherwise ranks that need not wait
for the others would run ahead, and a sample would tell how often a call can be begun, not how long
it takes. After a sample its last result is checked.
"""

import time
from functools import partial
from typing import Any

import numpy as np

import commute
from benchmarks.workers.calls import bytes_given, bytes_left, values_given, values_left
from benchmarks.workers.turns import Call, buffers, take_turns

ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Calls:
    """The calls of a sample, bound to their arrays."""

    def __init__(
        self, world: commute.Group, *, call: str, bytes: int, batch: int, algorithm: str
    ) -> None:
        self._world, self._call, self._algorithm = world, call, algorithm
        rank, ranks = world.rank, world.size
        (self._source,) = buffers(bytes_given(call, bytes, ranks), 1)
        (self._result,) = buffers(bytes_left(call, bytes, ranks), 1)
        if call == "broadcast":  # in place
            self._result = self._source
        self._given = values_given(call, rank, ranks)
        roots = [number % ranks if call in ROOTED else 0 for number in range(batch)]
        self._expected = self._left(roots[-1])
        self._calls = [self._bind(root) for root in roots]
        self.sample()  # opens every link and touches every page

    def sample(self) -> float:
        self._result.fill(0)
        if self._given:
            parts = self._source.reshape(len(self._given), -1)
            parts[:] = np.array(self._given, np.float32)[:, np.newaxis]
        self._world.barrier()
        start = time.perf_counter()
        for call in self._calls:
            call()
        seconds = time.perf_counter() - start
        self._check()
        return seconds / len(self._calls)

    def _bind(self, root: int) -> Call:
        function: Any = partial(getattr(self._world, self._call), algorithm=self._algorithm)
        is_root, by_rank = self._world.rank == root, (self._world.size, -1)
        source, result = self._source, self._result
        match self._call:
            case "barrier":
                return partial(function)
            case "broadcast":
                return partial(function, source, root)
            case "reduce":
                return partial(function, source, root, out=result if is_root else None)
            case "gather":
                out = result.reshape(by_rank) if is_root else None
                return partial(function, source, root, out=out)
            case "scatter":
                given = source.reshape(by_rank) if is_root else None
                return partial(function, given, root, out=result)
            case "allreduce":
                return partial(function, source, out=result)
            case "allgather":
                return partial(function, source, out=result.reshape(by_rank))
            case "reduce_scatter":
                return partial(function, source.reshape(by_rank), out=result)
            case "alltoall":
                return partial(function, source.reshape(by_rank), out=result.reshape(by_rank))
        raise ValueError(f"there is no {self._call} to measure")

    def _left(self, root: int) -> list[float]:
        """What the last call leaves, one value for each part; nothing where it leaves nothing."""
        rank, ranks = self._world.rank, self._world.size
        match self._call:
            case "reduce":
                return values_left("allreduce", rank, ranks) if rank == root else []
            case "gather":
                return values_left("allgather", rank, ranks) if rank == root else []
            case "scatter":
                return [float((root + 1) * (rank + 1))]
        return values_left(self._call, rank, ranks)

    def _check(self) -> None:
        if not self._expected:
            return
        for part, value in zip(
            self._result.reshape(len(self._expected), -1), self._expected, strict=True
        ):
            if not bool((part == np.float32(value)).all()):
                raise AssertionError(
                    f"{self._call} by {self._algorithm}: expected {value}, got {part[:4]}"
                )


class World:
    """Who takes turns."""

    def __init__(self, world: commute.Group) -> None:
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {commute.__version__}"
        self.barrier = world.barrier


def bind(world: commute.Group, turn: dict[str, Any]) -> Calls:
    return Calls(
        world,
        call=turn["call"],
        bytes=turn["bytes"],
        batch=turn["batch"],
        algorithm=turn["variant"],
    )


if __name__ == "__main__":
    with commute.init() as joined:
        take_turns(World(joined), partial(bind, joined))
