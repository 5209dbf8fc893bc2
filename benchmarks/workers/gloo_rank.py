# SPDX-License-Identifier: Apache-2.0
"""One rank of torch.distributed over gloo. Arguments: socket, rank, size, rendezvous file.

The interface is chosen by GLOO_SOCKET_IFNAME, which the driver sets.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.workers.calls import values_left
from benchmarks.workers.turns import Array, Call, serve


class Gloo:
    def __init__(self, *, rank: int, size: int, rendezvous: str) -> None:
        # One thread per rank: the ranks already fill the cores.
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
        )
        self.rank, self.size = rank, size
        self.version = f"torch {torch.__version__}"

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, call: str, source: Array, result: Array) -> Call:
        if call != "allreduce" or source is not result:
            raise ValueError("gloo is measured with an allreduce in place only")
        return partial(dist.all_reduce, torch.from_numpy(source))

    def expected(self, call: str) -> list[float]:
        return values_left(call, self.rank, self.size)


if __name__ == "__main__":
    serve(Gloo(rank=int(sys.argv[2]), size=int(sys.argv[3]), rendezvous=sys.argv[4]))
    dist.destroy_process_group()
