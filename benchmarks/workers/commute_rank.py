# SPDX-License-Identifier: Apache-2.0
"""One rank of commute, through its public interface. Argument: socket."""

from functools import partial

import commute
from benchmarks.workers.calls import values_left
from benchmarks.workers.turns import Array, Call, serve


class Commute:
    def __init__(self, world: commute.Group) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {commute.__version__}"

    def barrier(self) -> None:
        self._world.barrier()

    def bind(self, call: str, source: Array, result: Array) -> Call:
        world, by_rank = self._world, (self.size, -1)
        match call:
            case "allreduce" if source is result:
                return partial(world.allreduce, source)
            case "allreduce":
                return partial(world.allreduce, source, out=result)
            case "broadcast" if source is result:
                return partial(world.broadcast, source)
            case "allgather":
                return partial(world.allgather, source, out=result.reshape(by_rank))
            case "reduce_scatter":
                return partial(world.reduce_scatter, source.reshape(by_rank), out=result)
            case "gather":
                out = result.reshape(by_rank) if self.rank == 0 else None
                return partial(world.gather, source, out=out)
            case "scatter":
                given = source.reshape(by_rank) if self.rank == 0 else None
                return partial(world.scatter, given, out=result)
            case "alltoall":
                return partial(world.alltoall, source.reshape(by_rank), out=result.reshape(by_rank))
            case "barrier":
                return world.barrier
        raise ValueError(f"commute has no {call} of this variant")

    def bind_persistent(self, call: str, source: Array, result: Array) -> Call:
        assert call == "allreduce" and source is result
        operation = self._world.allreduce_init(source)

        def start_and_wait() -> None:
            operation.start()
            operation.wait()

        return start_and_wait

    def empty(self, bytes: int, count: int) -> list[Array]:
        """Buffers that all ranks reach."""
        return [self._world.empty(bytes // 4) for _ in range(count)]

    def expected(self, call: str) -> list[float]:
        return values_left(call, self.rank, self.size)


if __name__ == "__main__":
    with commute.init() as world:
        serve(Commute(world))
