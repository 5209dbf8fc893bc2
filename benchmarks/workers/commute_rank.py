# SPDX-License-Identifier: Apache-2.0
"""One rank of commute, through its public interface. Argument: socket."""

from functools import partial
from importlib.metadata import version

import commute
from benchmarks.workers.turns import Array, Call, serve, sum_of_ranks


class Commute:
    def __init__(self, world: commute.Group) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {version('commute')}"

    def barrier(self) -> None:
        self._world.barrier()

    def bind(self, source: Array, result: Array) -> Call:
        if source is result:
            return partial(self._world.allreduce, source)
        return partial(self._world.allreduce, source, out=result)

    def expected(self) -> float:
        return sum_of_ranks(self.size)


if __name__ == "__main__":
    with commute.init() as world:
        serve(Commute(world))
