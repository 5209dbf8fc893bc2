# SPDX-License-Identifier: Apache-2.0
"""The one port of `commute serve`: sockets and time for the logic in observers.py.

After the handshake (see auth; run "serve", role observer, target 0) a connection is for one of:

    join        Observe, then Admitted or Refused (see control); from there on control frames
    store       a channel to a shard, over TCP (see channels); rank is the observer's number
    status      one message back: length u4 | msgpack, and the end

Channels through shared memory are dialled on an abstract Unix socket, whose name holds what only
those who were admitted know (see neighbours). So is the epoch of a channel: one who knew a server
that had this port before cannot be taken for another. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, Protocol

from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    check_token,
    read_exactly,
)
from commute.cluster.channels import STORE_PURPOSES, Channels
from commute.cluster.connection import Keeper
from commute.cluster.control import (
    HELLO_BYTES_MAX,
    LENGTH_BYTES,
    ControlError,
    Observe,
    decode_length,
    decode_observe,
)
from commute.cluster.gate import HANDSHAKE_SECONDS, Gate, listen
from commute.cluster.neighbours import Neighbours
from commute.cluster.observers import (
    SERVER,
    Arrived,
    Came,
    Effect,
    Gone,
    Observers,
    Place,
    Stop,
)

__all__ = ["RUN", "Host", "Reception"]

RUN: Final = "serve"
TICK_SECONDS: Final = 0.5

_log = logging.getLogger("commute.cluster")


class Host(Protocol):
    """What the reception serves: the shards, and what is told of them."""

    def on_came(self, observer: int, /) -> None: ...

    def on_gone(self, observer: int, /) -> None: ...

    def add_channel(self, shard: int, socket: int, segment: int, worker: int, /) -> None: ...


class Reception(Keeper[Observers]):
    """Lets clients in, and tells the host who came and went.

    Args:
        status: what a status connection is answered, encoded; called on a thread of its own.
        log: is given a line when a client comes or goes.
    """

    def __init__(
        self,
        token: str,
        place: Place,
        host: Host,
        *,
        status: Callable[[], bytes],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(Observers(place))
        self._key = check_token(token)
        self._place = place
        self._host = host
        self._status = status
        self._log = log
        self._gate: Gate | None = None
        self._neighbours: Neighbours | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._channels = Channels(self._never, lambda key: [])
        self._channels.serve(host.add_channel, range(place.shards))

    async def start(self, bind: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that port 0 became. Raises OSError."""
        listener = listen(bind, port)
        found, bound = listener.getsockname()[:2]
        self._gate = Gate(listener, self._key, RUN, self._admit)
        try:
            self._neighbours = Neighbours(
                key=self._key,
                run=RUN,
                world=self._place.world,
                rank=SERVER,
                port=int(bound),
                admit=self._admit_channel,
            )
            self._neighbours.decline()  # it has no outbox, only channels
        except OSError as error:
            self._log(f"there is no shared memory with clients on this host: {error}")
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(TICK_SECONDS))
        return str(found), int(bound)

    async def close(self, why: str) -> None:
        """Stop: every client is told why."""
        self.step(Stop(why))
        if self._ticker is not None:
            self._ticker.cancel()
        for gate in (self._gate, self._neighbours):
            if gate is not None:
                await gate.close()
        # One turn of the loop, for the sockets to be closed in.
        await asyncio.sleep(0)

    @property
    def refused(self) -> int:
        """How many connections were not let in."""
        return self._gate.refused if self._gate is not None else 0

    async def _admit(self, raw: socket.socket, introduction: Introduction) -> None:
        if introduction.role is not Role.OBSERVER or introduction.target != SERVER:
            raise HandshakeError("this is a server of `commute serve`, for observers only")
        match introduction.purpose:
            case Purpose.JOIN:
                await self._admit_observer(raw)
            case Purpose.STATUS:
                await self._tell_status(raw)
            case Purpose.STORE:
                await self._admit_channel(raw, introduction, -1)
            case purpose:
                raise HandshakeError(f"purpose {purpose:d} is not for observers")

    async def _admit_observer(self, raw: socket.socket) -> None:
        observe = await self._read_observe(raw)
        await self._keep(raw, lambda number: Arrived(number, observe))

    async def _read_observe(self, raw: socket.socket) -> Observe:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                prefix = await read_exactly(raw, LENGTH_BYTES)
                length = decode_length(prefix, limit=HELLO_BYTES_MAX)
                return decode_observe(await read_exactly(raw, length))
        except ControlError as error:
            raise HandshakeError(str(error)) from None

    async def _tell_status(self, raw: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        body = await asyncio.to_thread(self._status)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_sendall(raw, len(body).to_bytes(LENGTH_BYTES, "little") + body)
        raw.close()

    async def _admit_channel(
        self, connection: socket.socket, introduction: Introduction, segment: int
    ) -> None:
        known = (
            introduction.role is Role.OBSERVER
            and introduction.purpose in STORE_PURPOSES
            and introduction.epoch == self._place.epoch
            and self.machine.is_in(introduction.rank)
        )
        if not known:
            if segment >= 0:
                os.close(segment)
            raise HandshakeError(f"client {introduction.rank} is not connected")
        await self._channels.admit(connection, introduction, segment)

    @staticmethod
    def _never(peer: int, purpose: Purpose) -> Introduction:
        raise AssertionError("a server dials nobody")

    def _do(self, effect: Effect) -> None:
        match effect:
            case Came(observer):
                self._host.on_came(observer.number)
                self._log(f"{observer} has come")
            case Gone(observer, why):
                self._host.on_gone(observer.number)
                self._log(f"{observer} {why}")
