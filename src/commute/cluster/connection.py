# SPDX-License-Identifier: Apache-2.0
"""A connection that carries control frames, as asyncio sees it; who keeps it decides.

What could not be written yet is held by asyncio's transport, so a slow client never blocks another;
one that lets more than UNSENT_BYTES_MAX pile up is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any, Final, Protocol, cast

import msgspec

from commute.cluster.control import ControlError, Decoder, Frame, encode, encode_message
from commute.cluster.coordinator import Received

__all__ = ["ControlConnection", "Keeper", "keep_alive"]

# A member reads its frames or is stopped; a stopped one is declared lost long before this.
UNSENT_BYTES_MAX: Final = 32 << 20
# How long a connection that is closed may take to carry away what was sent before.
FLUSH_SECONDS: Final = 2.0

_log = logging.getLogger("commute.cluster")


class Keeper(Protocol):
    """Who is told what happens on a connection."""

    def arrived(self, connection: ControlConnection, event: Any) -> None: ...

    def step(self, event: Any) -> None: ...

    def gone(self, number: int, cause: str) -> None: ...


class ControlConnection(asyncio.Protocol):
    """One member, launcher or observer, after the handshake.

    Args:
        event: what the keeper is told when it is there.
    """

    def __init__(self, server: Keeper, number: int, event: Any) -> None:
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


def keep_alive(raw: socket.socket) -> None:
    """Let the kernel notice when the other host is gone."""
    # Only for those who send no heartbeat: launchers, and processes whose world still forms.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
