# SPDX-License-Identifier: Apache-2.0
"""The worker of Redis, with rows. Arguments: socket, rank, size, folder of the server's socket.

A row is a string of its bytes under the 8 bytes of its key; a call is one MGET or MSET over a Unix
socket, with hiredis. Redis has no optimizer: a push is the MSET of rows that the worker has made,
without the reading and the steps that would make them (the worker would have to pull them first).
The names of keys are made before; making strings of an array and an array of strings is timed.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import redis  # type: ignore[import-not-found, unused-ignore]

from benchmarks.workers.redis_rank import SMALL_BYTES_MAX, client_of
from benchmarks.workers.rows import Chosen, Counts, resident_bytes, serve
from benchmarks.workers.turns import Array


class Rows:
    def __init__(self, path: Path, width: int, server: int) -> None:
        self._width, self._server = width, server
        self._connection = redis.UnixDomainSocketConnection(
            path=str(path), socket_read_size=SMALL_BYTES_MAX
        )

    def given(self, patterns: Array, pushes: Counts) -> Array:
        return self.holds(patterns, pushes)

    def holds(self, patterns: Array, pushes: Counts) -> Array:
        return patterns * pushes[:, None].astype(np.float32)

    def pull(self, chosen: Chosen, out: Array) -> Callable[[], Array]:
        names, connection = _strings(chosen.keys), self._connection

        def pull() -> Array:
            connection.send_packed_command(connection.pack_command("MGET", *names))
            found = b"".join(connection.read_response())
            return np.frombuffer(found, np.float32).reshape(len(names), self._width)

        return pull

    def push(self, chosen: Chosen, rows: Array, variant: str) -> Callable[[], object]:
        connection = self._connection
        words = _strings(chosen.keys) * 2
        words[::2] = words[: len(words) // 2]

        def push() -> None:
            words[1::2] = _strings(rows)
            connection.send_packed_command(connection.pack_command("MSET", *words))
            connection.read_response()

        return push

    def memory(self) -> dict[str, int]:
        return {"in place": resident_bytes(self._server)}


class Redis:
    rank, size = 0, 1

    def __init__(self, folder: Path) -> None:
        self._path = folder / "server0"
        self._client = client_of(self._path)
        about = self._client.info("server")
        self._server = int(about["process_id"])
        self.version = f"Redis {about['redis_version']}, redis-py {redis.__version__}"

    def barrier(self) -> None:
        pass

    def table(self, width: int) -> Rows:
        return Rows(self._path, width, self._server)

    def end_server(self) -> None:
        self._client.connection_pool.get_connection().send_command("SHUTDOWN", "NOSAVE")


def _strings(rows: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> list[bytes]:
    """Each row, or number, as its bytes."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    found: list[bytes] = flat.view(f"V{flat.shape[1] * flat.itemsize}").ravel().tolist()
    return found


if __name__ == "__main__":
    keeper = Redis(Path(sys.argv[4]))
    serve(keeper)
    keeper.end_server()
