# SPDX-License-Identifier: Apache-2.0
"""A barrier for the workers of libraries that have none: over Unix sockets, through worker 0.

A worker that waits is blocked in recv, and costs nothing. The last to be woken starts some 50 us
after the first, which is little beside the calls of those libraries.
"""

import contextlib
import socket
import time
from pathlib import Path

MEET_SECONDS_MAX = 60.0


class Meeting:
    """All workers make one, with the same path."""

    def __init__(self, *, rank: int, size: int, path: Path) -> None:
        self._is_host = rank == 0
        self._others: list[socket.socket] = []
        if self._is_host and size > 1:
            self._others = _accept(path, size - 1)
        elif size > 1:
            self._others = [_connect(path)]

    def barrier(self) -> None:
        if self._is_host:
            for other in self._others:
                _hear(other)
        for other in self._others:
            other.sendall(b".")
        if not self._is_host:
            _hear(self._others[0])


def _accept(path: Path, count: int) -> list[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Renamed when it listens: a path that is there can be connected to.
        listener.bind(f"{path}.new")
        listener.listen(count)
        listener.settimeout(MEET_SECONDS_MAX)
        Path(f"{path}.new").rename(path)
        found = [listener.accept()[0] for _ in range(count)]
    for connection in found:
        connection.settimeout(None)
    return found


def _connect(path: Path) -> socket.socket:
    deadline = time.monotonic() + MEET_SECONDS_MAX
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            connection.connect(str(path))
            return connection
        time.sleep(0.02)
    raise TimeoutError(f"worker 0 did not come to {path} in {MEET_SECONDS_MAX:.0f} s")


def _hear(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise ConnectionError("a worker has left the meeting")
