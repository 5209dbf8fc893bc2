# SPDX-License-Identifier: Apache-2.0
"""One rank of mpi4py, on whichever MPI its environment holds. Argument: socket."""

from functools import partial

import mpi4py
from mpi4py import MPI

from benchmarks.workers.calls import values_left
from benchmarks.workers.turns import Array, Call, serve


class Mpi:
    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
        library = " ".join(library.split(",")[0].split())
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def barrier(self) -> None:
        self._comm.Barrier()

    def bind(self, call: str, source: Array, result: Array) -> Call:
        comm = self._comm
        match call:
            case "allreduce" if source is result:
                return partial(comm.Allreduce, MPI.IN_PLACE, result)
            case "allreduce":
                return partial(comm.Allreduce, source, result)
            case "broadcast" if source is result:
                return partial(comm.Bcast, source)
            case "allgather" if source is not result:
                return partial(comm.Allgather, source, result)
            case "reduce_scatter" if source is not result:
                return partial(comm.Reduce_scatter_block, source, result)
            case "gather" if source is not result:
                return partial(comm.Gather, source, result if self.rank == 0 else None)
            case "scatter" if source is not result:
                return partial(comm.Scatter, source if self.rank == 0 else None, result)
            case "alltoall" if source is not result:
                return partial(comm.Alltoall, source, result)
            case "barrier":
                return comm.Barrier
        raise ValueError(f"mpi4py is not measured with a {call} of this variant")

    def expected(self, call: str) -> list[float]:
        return values_left(call, self.rank, self.size)


if __name__ == "__main__":
    serve(Mpi())
