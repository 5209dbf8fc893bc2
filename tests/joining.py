# SPDX-License-Identifier: Apache-2.0
"""Members, a coordinator and clients that may break the protocol, for tests of joining.

Members and the coordinator are made by threads of this process.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from commute.cluster.auth import (
    GREETING_BYTES,
    PROOF_BYTES,
    Introduction,
    Purpose,
    Role,
    acceptor_proof,
    check_token,
    introduce,
    mint_token,
)
from commute.cluster.connector import Connector
from commute.cluster.control import Decoder, Frame, Hello, Kind
from commute.cluster.coordinator import Failed
from commute.cluster.join import Membership, join
from commute.cluster.serve import CoordinatorServer

RUN = "run-1"
T = TypeVar("T")
HELLO = Hello(
    name="world",
    rank=0,
    size=2,
    host="hosta",
    pid=7,
    addresses=(("127.0.0.1", 4000),),
    commute_version="1",
    python_version="3",
    peer_timeout=5.0,
    join_timeout=300.0,
)


class Serving:
    """A coordinator that serves until close()."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self.token = token or mint_token()
        self.failures: list[Failed] = []
        self.notices: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = CoordinatorServer(
            self.token,
            RUN,
            on_failure=self.failures.append,
            on_notice=self.notices.append,
            handshake_seconds=handshake_seconds,
        )
        self.host, self.port = self.run(self.server.start(host, port))

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def join(self, rank: int, size: int, **options: Any) -> tuple[Membership, Connector]:
        options = {"join_timeout": 20.0, **options}
        token, run = options.pop("token", self.token), options.pop("run", RUN)
        address = options.pop("coordinator", self.address)
        return join(rank, size, rank, size, address, token, run, **options)

    def close(self) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class World(list[tuple[Membership, Connector]]):
    """The members of a world, all in this process."""

    def close(self) -> None:
        for membership, connector in self:
            connector.close()
            with contextlib.suppress(OSError):  # some tests close it themselves
                os.close(membership.coordinator_fd)


@contextlib.contextmanager
def world_of(serving: Serving, size: int, **options: Any) -> Iterator[World]:
    """A formed world; its members join at once."""
    world = World(at_once([partial(serving.join, r, size, **options) for r in range(size)]))
    try:
        yield world
    finally:
        world.close()


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same time; raises what the first of them raised."""
    barrier = threading.Barrier(len(calls))

    def call(made: Callable[[], T]) -> T:
        barrier.wait(10)
        return made()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call, made) for made in calls]]


def eventually(condition: Callable[[], bool], *, within: float = 10.0) -> None:
    """Wait for a condition, never longer than needed; fails after the deadline."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


class Client:
    """A blocking client that knows the protocol and may break it."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read(self, count: int) -> bytes:
        received = b""
        while len(received) < count and (part := self.socket.recv(count - len(received))):
            received += part
        return received

    def introduce(
        self,
        token: str,
        *,
        role: int = Role.MEMBER,
        purpose: int = Purpose.JOIN,
        rank: int = 0,
        target: int = -1,
        epoch: int = 0,
        run: str = RUN,
    ) -> bytes:
        """The introduction that was sent; the acceptor's proof is checked if it comes."""
        greeting = self.read(GREETING_BYTES)
        claim = Introduction(role, purpose, rank, target, epoch, run)  # type: ignore[arg-type]
        sent = introduce(check_token(token), greeting, claim)
        self.socket.sendall(sent)
        proof = self.read(PROOF_BYTES)
        assert proof in (b"", acceptor_proof(check_token(token), greeting, sent))
        return sent

    @property
    def ended(self) -> bool:
        """Whether the other end closes the connection; waits for it."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def frame(self) -> Frame:
        """The next frame that is no beat."""
        while not self._frames:
            received = self.socket.recv(1 << 16)
            assert received, "the connection ended"
            self._frames += [f for f in self._decoder.feed(received) if f.kind is not Kind.BEAT]
        return self._frames.pop(0)


class ControlLink(Client):
    """A member's connection to the coordinator, as its health thread would use it."""

    def __init__(self, membership: Membership) -> None:
        self.socket = socket.socket(fileno=os.dup(membership.coordinator_fd))
        self.socket.settimeout(10)
        self._decoder = Decoder()
        self._frames = []
