# SPDX-License-Identifier: Apache-2.0
"""One rank of torch.distributed over gloo. Arguments: socket, rank, size, rendezvous file.

The interface is chosen by GLOO_SOCKET_IFNAME, which the driver sets.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.workers.turns import Array, Call, serve, sum_of_ranks


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

    def bind(self, source: Array, result: Array) -> Call:
        if source is not result:
            raise ValueError("gloo reduces in place only")
        return partial(dist.all_reduce, torch.from_numpy(source))

    def expected(self) -> float:
        return sum_of_ranks(self.size)


if __name__ == "__main__":
    serve(Gloo(rank=int(sys.argv[2]), size=int(sys.argv[3]), rendezvous=sys.argv[4]))
    dist.destroy_process_group()
