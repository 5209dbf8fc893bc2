# SPDX-License-Identifier: Apache-2.0
"""One worker of Redis. Arguments: socket, rank, size, folder of the servers' sockets, servers.

Redis cannot add arrays, so this is less than the others' work: the bytes go to the server and come
back, SET and GET in one go, with no sum at all and under a key of each worker's own. It is measured
as it is fastest here: Unix sockets, the connection itself rather than the client around it, hiredis
(which copies what is sent, so for small arrays only, when sending), values of 256 KB (16 MB in one
take half as long again), and all servers at the same time. The answer stays in these pieces; making
one array of them would be one more copy.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis  # type: ignore[import-not-found, unused-ignore]
from redis._parsers import Encoder  # type: ignore[import-not-found, unused-ignore]
from redis.connection import (  # type: ignore[import-not-found, unused-ignore]
    PythonRespSerializer,
)

from benchmarks.workers.exchanges import Exchange, Keeps, pieces, serve
from benchmarks.workers.meeting import Meeting
from benchmarks.workers.turns import Array

VALUE_BYTES_MAX = 256 << 10
SMALL_BYTES_MAX = 64 << 10
START_SECONDS_MAX = 30.0


class Redis:
    keeps = Keeps.LAST

    def __init__(self, *, rank: int, size: int, folder: Path, servers: int) -> None:
        self.rank, self.size = rank, size
        self._paths = [folder / f"server{i}" for i in range(servers)]
        self.barrier = Meeting(rank=rank, size=size, path=folder / "meeting").barrier
        self._clients = [client_of(path) for path in self._paths]
        server = self._clients[0].info("server")["redis_version"]
        self.version = f"Redis {server}, redis-py {redis.__version__}"
        self._connections: list[Any] = []

    def declare(self, table: str, bytes: int) -> None:
        for connection in self._connections:
            connection.disconnect()
        self._connections = [_connection(path, bytes) for path in self._paths]
        for client in self._clients:
            client.flushall()  # no worker is past the barrier that follows

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        key = f"{table}/{self.rank}"
        commands = [_commands(key, piece) for piece in pieces(source, len(self._paths))]
        work = list(zip(self._connections, commands, strict=True))

        def exchange() -> list[Array]:
            for connection, asked in work:
                connection.send_packed_command(connection.pack_commands(asked))
            answers = [connection.read_response() for connection, asked in work for _ in asked]
            return [np.frombuffer(answer, np.float32) for answer in answers[1::2]]

        return exchange

    def end_servers(self) -> None:
        for client in self._clients:
            # Not client.shutdown(), which takes the end of the connection for a failure to mend.
            client.connection_pool.get_connection().send_command("SHUTDOWN", "NOSAVE")


def _commands(key: str, piece: Array) -> list[tuple[Any, ...]]:
    """SET and GET of each value in turn."""
    view = piece.view(np.uint8).data
    starts = range(0, len(view), VALUE_BYTES_MAX)
    return [
        command
        for start in starts
        for command in (
            ("SET", f"{key}/{start}", view[start : start + VALUE_BYTES_MAX]),
            ("GET", f"{key}/{start}"),
        )
    ]


def _connection(path: Path, bytes: int) -> Any:
    if bytes <= SMALL_BYTES_MAX:
        return redis.UnixDomainSocketConnection(path=str(path), socket_read_size=SMALL_BYTES_MAX)
    encoder = Encoder("utf-8", "strict", False)
    return redis.UnixDomainSocketConnection(
        path=str(path),
        socket_read_size=VALUE_BYTES_MAX,
        command_packer=PythonRespSerializer(SMALL_BYTES_MAX, encoder.encode),
    )


def client_of(path: Path) -> Any:
    """A client of a server that listens; the server was started at the same time as we were."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            client = redis.Redis(unix_socket_path=str(path))
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    worker = Redis(
        rank=int(sys.argv[2]),
        size=int(sys.argv[3]),
        folder=Path(sys.argv[4]),
        servers=int(sys.argv[5]),
    )
    serve(worker)
    worker.barrier()
    if worker.rank == 0:
        worker.end_servers()
