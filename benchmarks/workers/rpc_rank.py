# SPDX-License-Identifier: Apache-2.0
"""A worker or a server of torch.distributed.rpc over TensorPipe.

    rpc_rank.py SOCKET worker RANK SIZE FOLDER SERVERS        the socket is only the workers'
    rpc_rank.py SOCKET server RANK SIZE FOLDER SERVERS

What a user would write: a function on the server adds the tensor to its own and returns that. It is
returned as it is, without a copy; with two workers it may change while it is sent, which makes
torch faster and the answer no snapshot. TensorPipe chooses its transports; of six settings tried,
its own choice was the fastest or within noise of it.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed import rpc

from benchmarks.workers.exchanges import Exchange, Keeps, pieces, serve
from benchmarks.workers.meeting import Meeting
from benchmarks.workers.turns import Array

_tables: dict[str, torch.Tensor] = {}


def declare(table: str, count: int) -> None:
    _tables.setdefault(table, torch.zeros(count))


def push_pull(table: str, contribution: torch.Tensor) -> torch.Tensor:
    return _tables[table].add_(contribution)


class TorchRpc:
    keeps = Keeps.ARRIVALS

    def __init__(self, *, rank: int, size: int, folder: Path, servers: int) -> None:
        self.rank, self.size = rank, size
        self._servers = [f"server{i}" for i in range(servers)]
        self.barrier = Meeting(rank=rank, size=size, path=folder / "meeting").barrier
        self.version = f"torch {torch.__version__}"

    def declare(self, table: str, bytes: int) -> None:
        for server in self._servers:
            rpc.rpc_sync(server, declare, args=(table, bytes // 4 // len(self._servers)))

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        tensors = [torch.from_numpy(piece) for piece in pieces(source, len(self._servers))]
        if len(tensors) == 1:
            call = partial(rpc.rpc_sync, self._servers[0], push_pull, args=(table, tensors[0]))
            return lambda: [call().numpy()]

        def exchange() -> list[Array]:
            futures = [
                rpc.rpc_async(server, push_pull, args=(table, tensor))
                for server, tensor in zip(self._servers, tensors, strict=True)
            ]
            return [future.wait().numpy() for future in futures]

        return exchange


def main() -> None:
    role, rank, size, folder, servers = (
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        Path(sys.argv[5]),
        int(sys.argv[6]),
    )
    torch.set_num_threads(1)  # workers and servers already fill the cores
    rpc.init_rpc(
        f"{role}{rank}",
        rank=rank if role == "server" else servers + rank,
        world_size=servers + size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc"),
    )
    if role == "worker":
        serve(TorchRpc(rank=rank, size=size, folder=folder, servers=servers))
    rpc.shutdown()  # everybody waits here for everybody


if __name__ == "__main__":
    main()
