# SPDX-License-Identifier: Apache-2.0
"""One worker of Ray: a driver that calls actors. Arguments: socket, rank, size, folder, servers.

Worker 0 starts Ray on this host and the actors; it all ends with it. An array over 100 KB goes
through Ray's shared memory, and the sum comes back as a view of it, without a copy.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found, unused-ignore]

from benchmarks.workers.exchanges import Exchange, Keeps, pieces, serve
from benchmarks.workers.meeting import Meeting
from benchmarks.workers.turns import Array

# A contribution and a sum of 64 MB for each of two workers, several times over.
OBJECT_STORE_BYTES = 2 << 30


class Server:
    def __init__(self) -> None:
        self._tables: dict[str, Array] = {}

    def declare(self, table: str, count: int) -> None:
        self._tables.setdefault(table, np.zeros(count, np.float32))

    def push_pull(self, table: str, contribution: Array) -> Array:
        value = self._tables[table]
        value += contribution
        return value


class Ray:
    keeps = Keeps.ARRIVALS

    def __init__(self, *, rank: int, size: int, folder: Path, servers: int) -> None:
        self.rank, self.size = rank, size
        names = [f"server{i}" for i in range(servers)]
        options: dict[str, Any] = {"namespace": "bench", "log_to_driver": False}
        address = folder / "address"
        if rank == 0:
            ray.init(
                _temp_dir=str(folder / "ray"),
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **options,
            )
            address.write_text(ray.get_runtime_context().gcs_address)
            actor = ray.remote(Server)
            self._servers = [actor.options(name=name, num_cpus=0).remote() for name in names]
        self.barrier = Meeting(rank=rank, size=size, path=folder / "meeting").barrier
        if rank > 0:
            ray.init(address=address.read_text(), **options)
            self._servers = [ray.get_actor(name) for name in names]
        self.version = f"ray {ray.__version__}"

    def declare(self, table: str, bytes: int) -> None:
        count = bytes // 4 // len(self._servers)
        ray.get([server.declare.remote(table, count) for server in self._servers])

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        work = list(zip(self._servers, pieces(source, len(self._servers)), strict=True))

        def exchange() -> list[Array]:
            sums: list[Array] = ray.get([s.push_pull.remote(table, piece) for s, piece in work])
            return sums

        return exchange


if __name__ == "__main__":
    worker = Ray(
        rank=int(sys.argv[2]),
        size=int(sys.argv[3]),
        folder=Path(sys.argv[4]),
        servers=int(sys.argv[5]),
    )
    serve(worker)
    worker.barrier()  # Ray itself ends with worker 0
    ray.shutdown()
