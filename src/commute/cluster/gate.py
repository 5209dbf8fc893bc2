# SPDX-License-Identifier: Apache-2.0
"""Both ends of a connection up to the end of the handshake: `dial`, and `Gate` for a listener.

A gate accepts, runs the handshake (see auth) and hands on what passed. Whatever a stranger does
at it costs the gate one socket for at most HANDSHAKE_SECONDS:

    1. A connection that fails the handshake is closed and counted, and nothing else happens. One
       that the other end gives up by itself, before it said anything, is not counted.
    2. At most PENDING_MAX connections are between accept and the end of the handshake. One more
       pushes the oldest out: an honest dialer needs milliseconds, so the oldest is a stranger.
    3. The accept loop never ends by an error; without file descriptors left it pauses.
    4. The gate runs on one event loop; only `refused` may be read from other threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from commute.cluster.addresses import format_address
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    accept_handshake,
    dial_handshake,
)

__all__ = ["HANDSHAKE_SECONDS", "PENDING_MAX", "Gate", "describe_failure", "dial", "listen"]

HANDSHAKE_SECONDS: Final = 10.0
PENDING_MAX: Final = 256
# The kernel caps it at net.core.somaxconn; a whole job dials at once when it starts.
_BACKLOG: Final = 1024
_PAUSE_SECONDS: Final = 0.1

_log = logging.getLogger("commute.cluster")

# Takes over the socket, and closes it; runs under the handshake's slot, not under its deadline.
Admit = Callable[[socket.socket, Introduction], Awaitable[None]]


async def dial(
    host: str,
    port: int,
    key: bytes,
    introduction: Introduction,
    *,
    on_connected: Callable[[], None] | None = None,
) -> socket.socket:
    """A connected, authenticated, non-blocking socket; tries every address of a name in turn.

    The caller sets the deadline. Raises HandshakeError or OSError; asyncio.CancelledError leaves
    no socket behind.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, proto, _, address in await _resolve(host, port):
        connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connection, address)
            _refuse_self_connection(connection)
            if on_connected is not None:
                on_connected()
            await dial_handshake(connection, key, introduction)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
    raise failure or OSError(f"{host} has no address")


def describe_failure(error: OSError) -> str:
    """What a dial met, in the words of the system; asyncio's hide it behind the address."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error) or "no answer"


_Resolved = list[
    tuple[
        socket.AddressFamily,
        socket.SocketKind,
        int,
        str,
        tuple[str, int] | tuple[str, int, int, int],
    ]
]


async def _resolve(host: str, port: int) -> _Resolved:
    try:
        # A numeric address needs no resolver, and so no thread.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found  # type: ignore[return-value]


def _refuse_self_connection(connection: socket.socket) -> None:
    # Dialling a free port of the ephemeral range on this host, TCP can connect to itself.
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError(111, "Connection refused")


def listen(host: str, port: int = 0) -> socket.socket:
    """A non-blocking listening socket on the first address of the host; raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Gate:
    """Accepts on a listener and passes what proved itself to `admit`."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        run: str,
        admit: Admit,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self.refused = 0
        self._listener = listener
        self._key = key
        self._run = run
        self._admit = admit
        self._handshake_seconds = handshake_seconds
        # In order of arrival, as dicts are.
        self._pending: dict[asyncio.Task[None], None] = {}
        self._admitted: set[asyncio.Task[None]] = set()
        self._loop_task = asyncio.get_running_loop().create_task(self._accept_forever())

    @property
    def pending(self) -> int:
        """How many connections are on their way in."""
        return len(self._pending) + len(self._admitted)

    def refuse(self, who: str, reason: str) -> None:
        """Count a connection that is not let in; the caller closes it."""
        self.refused += 1
        _log.info("refused a connection from %s: %s", who, reason)

    async def close(self) -> None:
        """Stop accepting and end what is under way; sockets that `admit` kept are not touched."""
        tasks = [self._loop_task, *self._pending, *self._admitted]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                # The dialer hung up already, or no file descriptors are left.
                _log.info("cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._pending) >= PENDING_MAX:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                oldest.cancel()
            who = format_address(str(peer[0]), int(peer[1])) if peer else "this host"
            task = loop.create_task(self._receive(connection, who))
            self._pending[task] = None
            task.add_done_callback(functools.partial(self._ended, connection, who))

    def _ended(self, connection: socket.socket, who: str, task: asyncio.Task[None]) -> None:
        self._pending.pop(task, None)
        self._admitted.discard(task)
        # A task that is cancelled before its first step never runs, so this is done here.
        if task.cancelled():
            self.refuse(who, "pushed out by newer connections, or this process is closing")
            connection.close()

    async def _receive(self, connection: socket.socket, who: str) -> None:
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._handshake_seconds):
                introduction = await accept_handshake(connection, self._key, self._run)
        except (HandshakeError, OSError) as error:
            # A member that dialled us while we dialled it drops its attempt without a word.
            hung_up = isinstance(error, HandshakeError) and error.hung_up
            if not hung_up and not isinstance(error, ConnectionError):
                self.refuse(who, str(error) or "no handshake in time")
            connection.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._pending.pop(task, None)
        self._admitted.add(task)
        try:
            await self._admit(connection, introduction)
        except (HandshakeError, OSError) as error:
            self.refuse(who, str(error) or "too slow")
            connection.close()
        except Exception:
            # A mistake of ours, met by one connection, must not end the others.
            self.refuse(who, "internal error")
            connection.close()
            _log.exception("while admitting %s", who)
