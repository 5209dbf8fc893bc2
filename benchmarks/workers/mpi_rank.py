# SPDX-License-Identifier: Apache-2.0
"""One rank of mpi4py, on whichever MPI its environment holds. Argument: socket."""

from functools import partial

import mpi4py
from mpi4py import MPI

from benchmarks.workers.turns import Array, Call, serve, sum_of_ranks


class Mpi:
    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
        library = " ".join(library.split(",")[0].split())
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def barrier(self) -> None:
        self._comm.Barrier()

    def bind(self, source: Array, result: Array) -> Call:
        if source is result:
            return partial(self._comm.Allreduce, MPI.IN_PLACE, result)
        return partial(self._comm.Allreduce, source, result)

    def expected(self) -> float:
        return sum_of_ranks(self.size)


if __name__ == "__main__":
    serve(Mpi())
