# SPDX-License-Identifier: Apache-2.0
"""Connections that carry control frames, as asyncio sees them, and who keeps them.

A keeper has a pure machine: what happens on its connections, and the passing of time, are events
for it; what it answers is carried out. All methods of a keeper belong to one event loop.

What could not be written yet is held by asyncio's transport, so a slow client never blocks another;
one that lets more than UNSENT_BYTES_MAX pile up is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import msgspec

from commute.cluster.control import ControlError, Decoder, Frame, encode, encode_message
from commute.cluster.coordinator import Close, Closed, Received, Send, Tick

__all__ = ["ControlConnection", "Keeper"]

# A member reads its frames or is stopped; a stopped one is declared lost long before this.
UNSENT_BYTES_MAX: Final = 32 << 20
# How long a connection that is closed may take to carry away what was sent before.
FLUSH_SECONDS: Final = 2.0

_log = logging.getLogger("commute.cluster")


class Machine(Protocol):
    """Pure logic, as coordinator.py and observers.py have it."""

    def step(self, event: Any, now: float, /) -> Iterable[Any]: ...


_M = TypeVar("_M", bound=Machine)


class Keeper(Generic[_M]):
    """Sockets and time for a machine.

    Attributes:
        machine: it decides.
    """

    def __init__(self, machine: _M) -> None:
        self.machine = machine
        self._connections: dict[int, ControlConnection] = {}
        self._count = 0

    async def _keep(self, raw: socket.socket, event_of: Callable[[int], Any]) -> None:
        """From here on it carries control frames; the machine hears `event_of(its number)`."""
        _keep_alive(raw)
        self._count += 1
        number = self._count
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: ControlConnection(self, number, event_of(number)), raw
        )

    async def _tick_forever(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.step(Tick())

    def step(self, event: Any) -> None:
        """Give an event to the machine and carry out what it answers."""
        for effect in self.machine.step(event, asyncio.get_running_loop().time()):
            self._carry_out(effect)

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case Send(number, message):
                if (connection := self._connections.get(number)) is not None:
                    connection.send(message)
            case Close(number):
                if (connection := self._connections.pop(number, None)) is not None:
                    connection.finish()
            case _:
                self._do(effect)

    def _do(self, effect: Any) -> None:
        """Carry out what is not about a connection."""
        raise NotImplementedError

    def arrived(self, connection: ControlConnection, event: Any) -> None:
        """A connection is ready; nothing was read from it yet, so nothing can be missed."""
        self._connections[connection.number] = connection
        self.step(event)

    def gone(self, number: int, cause: str) -> None:
        """A connection ended by itself."""
        if self._connections.pop(number, None) is not None:
            self.step(Closed(number, cause))


class ControlConnection(asyncio.Protocol):
    """One member, launcher or observer, after the handshake.

    Args:
        event: what the keeper is told when it is there.
    """

    def __init__(self, server: Keeper[Any], number: int, event: Any) -> None:
        self.number = number
        self._server = server
        self._event = event
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.arrived(self, self._event)

    def data_received(self, received: bytes) -> None:
        try:
            frames = self._decoder.feed(received)
        except ControlError as error:
            _log.info("connection %d sent garbage: %s", self.number, error)
            self._cut(f"it sent garbage: {error}")
            return
        for frame in frames:
            self._server.step(Received(self.number, frame))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._read_rest()
        self._server.gone(self.number, _reason(error))

    def _read_rest(self) -> None:
        """A write failed: the member has closed, and its goodbye may not have been read yet."""
        assert self._transport is not None
        descriptor = self._transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            while descriptor >= 0 and (received := os.read(descriptor, 65536)):
                self.data_received(received)

    def send(self, message: Frame | msgspec.Struct) -> None:
        assert self._transport is not None
        encoded = encode(message) if isinstance(message, Frame) else encode_message(message)
        self._transport.write(encoded)
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            # Not from within the effects of a step: the loss is an event of its own.
            asyncio.get_running_loop().call_soon(self._cut, "it does not read")

    def finish(self) -> None:
        """Close once everything is out, or after FLUSH_SECONDS."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._transport.abort)

    def _cut(self, cause: str) -> None:
        assert self._transport is not None
        self._transport.abort()
        self._server.gone(self.number, cause)


def _reason(error: Exception | None) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if error is not None else ""


def _keep_alive(raw: socket.socket) -> None:
    """Let the kernel notice when the other host is gone."""
    # Only for those who send no heartbeat: launchers, and processes whose world still forms.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
