# SPDX-License-Identifier: Apache-2.0
"""The coordinator as a server: sockets and time for the logic in coordinator.py.

A connection: gate (handshake) -> a member says Hello, a launcher nothing -> control frames (see
connection).

All methods belong to one event loop. `CoordinatorServer` is for a launcher that runs one; under
other launchers rank 0 starts this module as a process of its own:

    python -m commute.cluster.serve --size N [--bind HOST] [--port PORT] [--join-timeout SECONDS]
    stdin    one line {"token": "...", "run": "..."}; then it stays open while the starter lives
    stdout   one line {"host": "...", "port": ...}; then it is closed
    exit     0 when every member of every world has gone; 1 when nobody joined in time, or the
             starter went away before anybody joined; 2 for unusable arguments
The process is a session of its own: what the terminal signals to the job does not reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Final, TypeVar

from commute._errors import AuthenticationError, JoinError
from commute.cluster.addresses import format_address
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    check_run,
    check_token,
    read_exactly,
)
from commute.cluster.connection import Keeper
from commute.cluster.control import (
    HELLO_BYTES_MAX,
    LENGTH_BYTES,
    ControlError,
    Hello,
    decode_hello,
    decode_length,
)
from commute.cluster.coordinator import (
    Coordinator,
    Effect,
    Failed,
    Joined,
    Notice,
    Watched,
)
from commute.cluster.gate import HANDSHAKE_SECONDS, Gate, listen

__all__ = ["CoordinatorServer", "main"]

# A quarter of the shortest useful peer_timeout (1 s), and rarely enough to cost nothing.
TICK_SECONDS: Final = 0.2

_T = TypeVar("_T")

_log = logging.getLogger("commute.cluster")


def _print_notice(text: str) -> None:
    # Nobody may be reading any more; a line that cannot be shown is no reason to stop.
    with contextlib.suppress(OSError, ValueError):
        print(f"commute: {text}", file=sys.stderr, flush=True)


class CoordinatorServer(Keeper[Coordinator]):
    """Serves the worlds of one run; use it from one event loop.

    Attributes:
        on_failure: called with the first failure of each world.
        on_notice: called with each line for the terminal, the roster above all.
    """

    def __init__(
        self,
        token: str,
        run: str,
        *,
        on_failure: Callable[[Failed], None] | None = None,
        on_notice: Callable[[str], None] = _print_notice,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        super().__init__(Coordinator())
        check_run(run)
        self.on_failure = on_failure
        self.on_notice = on_notice
        self._key = check_token(token)
        self._run = run
        self._handshake_seconds = handshake_seconds
        self._gate: Gate | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, bind_host: str, port: int = 0) -> tuple[str, int]:
        """Listen; returns the address, with the port that port 0 became.

        Raises:
            JoinError: the address cannot be listened on.
        """
        try:
            listener = listen(bind_host, port)
        except OSError as error:
            where = format_address(bind_host, port)
            raise JoinError(
                f"the coordinator cannot listen on {where}: {error.strerror or error}; choose"
                " another address or port, port 0 takes a free one"
            ) from None
        self._gate = Gate(
            listener, self._key, self._run, self._admit, handshake_seconds=self._handshake_seconds
        )
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(TICK_SECONDS))
        host, bound = listener.getsockname()[:2]
        return str(host), int(bound)

    async def close(self) -> None:
        """Stop: every connection sees its end. Idempotent."""
        gate, self._gate = self._gate, None
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
        if gate is not None:
            self._refused_before = gate.refused
            await gate.close()
        for connection in list(self._connections.values()):
            connection.finish()
        self._connections.clear()
        # One turn of the loop, for the sockets to be closed in.
        await asyncio.sleep(0)

    _refused_before = 0

    @property
    def refused(self) -> int:
        """How many connections were not let in."""
        return self._gate.refused if self._gate is not None else self._refused_before

    @property
    def launchers(self) -> int:
        """How many launchers are connected."""
        return len(self.machine.launchers)

    @property
    def pending(self) -> int:
        """How many connections are on their way in."""
        return self._gate.pending if self._gate is not None else 0

    @property
    def busy(self) -> bool:
        """Whether there is a member of any world, or somebody on the way to become one."""
        return self.machine.populated or self.pending > 0

    async def _admit(self, raw: socket.socket, introduction: Introduction) -> None:
        if introduction.target != -1:
            raise HandshakeError(f"it dialled rank {introduction.target}, this is the coordinator")
        hello: Hello | None = None
        match introduction.role, introduction.purpose:
            case Role.MEMBER, Purpose.JOIN:
                hello = await self._read_hello(raw, introduction)
            case Role.LAUNCHER, Purpose.CONTROL:
                pass
            case role, purpose:
                raise HandshakeError(f"role {role:d} has no purpose {purpose:d} here")
        await self._keep(raw, lambda number: Joined(number, hello) if hello else Watched(number))

    async def _read_hello(self, raw: socket.socket, introduction: Introduction) -> Hello:
        try:
            async with asyncio.timeout(self._handshake_seconds):
                prefix = await read_exactly(raw, LENGTH_BYTES)
                length = decode_length(prefix, limit=HELLO_BYTES_MAX)
                hello = decode_hello(await read_exactly(raw, length))
        except ControlError as error:
            raise HandshakeError(str(error)) from None
        if hello.rank != introduction.rank:
            raise HandshakeError(f"rank {introduction.rank} said it is rank {hello.rank}")
        return hello

    def _do(self, effect: Effect) -> None:
        match effect:
            case Notice(text):
                self._call_back(self.on_notice, text)
            case Failed():
                self._call_back(self.on_failure, effect)

    def _call_back(self, callback: Callable[[_T], None] | None, argument: _T) -> None:
        # By the loop, which logs what a callback raises: it must not cut the step short.
        if callback is not None:
            asyncio.get_running_loop().call_soon(callback, argument)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m commute.cluster.serve", description="The coordinator of one job."
    )
    parser.add_argument("--size", type=int, required=True, help="how many ranks the job has")
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one")
    parser.add_argument("--join-timeout", type=float, default=300.0, help="seconds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a coordinator until its job is over; see the top of this file."""
    arguments = _arguments(argv)
    with contextlib.suppress(PermissionError):  # already the leader of a session
        os.setsid()
    try:
        given = json.loads(_read_line(0))
        server = CoordinatorServer(str(given["token"]), str(given["run"]))
        return asyncio.run(_serve(server, arguments))
    except (AuthenticationError, JoinError, ValueError, KeyError, TypeError) as error:
        _print_notice(f"the coordinator cannot start: {error}")
        return 2


def _read_line(fd: int, limit: int = 4096) -> bytes:
    # Byte by byte: what follows the line stays in the pipe, for its end to be noticed there.
    line = b""
    while len(line) < limit and not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return line


async def _serve(server: CoordinatorServer, arguments: argparse.Namespace) -> int:
    host, port = await server.start(arguments.bind, arguments.port)
    # If the starter is gone already, its end of stdin says so too.
    with contextlib.suppress(OSError):
        print(json.dumps({"host": host, "port": port}), flush=True)
    # Whoever waits for the end of stdout must not wait for the end of the job.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    try:
        joined = await _somebody_joined(server, arguments)
        if joined:
            await _everybody_gone(server)
        return 0 if joined else 1
    finally:
        await server.close()
        # Refusals and goodbyes are still on their way out.
        await asyncio.sleep(TICK_SECONDS)


async def _somebody_joined(server: CoordinatorServer, arguments: argparse.Namespace) -> bool:
    starter_gone = await _watch_stdin()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + arguments.join_timeout
    while not server.machine.ever_joined:
        if starter_gone.is_set():
            return False
        if loop.time() >= deadline:
            _print_notice(
                f"none of the {arguments.size} ranks joined within {arguments.join_timeout:g} s;"
                " the coordinator ends"
            )
            return False
        await asyncio.sleep(TICK_SECONDS)
    return True


async def _everybody_gone(server: CoordinatorServer) -> None:
    # Somebody may be in the middle of joining. A stranger at the gate looks the same, so the
    # wait for those is bounded.
    loop = asyncio.get_running_loop()
    empty_since = loop.time()
    while True:
        if server.machine.populated:
            empty_since = loop.time()
        elif not server.pending or loop.time() - empty_since > HANDSHAKE_SECONDS:
            return
        await asyncio.sleep(TICK_SECONDS)


async def _watch_stdin() -> asyncio.Event:
    """An event that is set once stdin has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stdin(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            ended.set()

    # A file or /dev/null has no end to wait for: then nobody watches over this process.
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        await loop.connect_read_pipe(Stdin, os.fdopen(os.dup(0), "rb", buffering=0))
    return ended


if __name__ == "__main__":
    sys.exit(main())
