# SPDX-License-Identifier: Apache-2.0
"""Channels between a worker and the shards of a store's servers.

Only workers dial, as often as they like: a channel that breaks is dialled again. After the
handshake (and, through shared memory, the segment) the dialer says the number of the shard, u4; the
server answers 1 and hands the connection to its shard, or 2: it has no such shard. Runs on the
connector's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from commute._errors import JoinError, OperationTimeoutError
from commute.cluster.auth import HandshakeError, Introduction, Purpose, read_exactly
from commute.cluster.control import Member
from commute.cluster.gate import HANDSHAKE_SECONDS
from commute.cluster.neighbours import pass_descriptors

__all__ = ["STORE_PURPOSES", "Channels", "Connected"]

STORE_PURPOSES: Final = frozenset({Purpose.STORE, Purpose.SHARED_STORE})
_ACCEPTED: Final = b"\1"
_NO_SHARD: Final = b"\2"
_RETRY_SECONDS_MAX: Final = 0.5
_NO_SEGMENT: Final = -1


class Connected(NamedTuple):
    """A link or channel, ready for the core; both descriptors are the caller's."""

    socket: int
    segment: int  # of one in shared memory, else -1
    dialled: bool  # by this side


# dial(introduction, on_connected=...) makes one attempt.
_Dial = Callable[..., Awaitable[socket.socket]]
_Take = Callable[[int, int, int, int], None]


class Channels:
    """Opens channels, and takes those that are dialled.

    Args:
        introduce: what this member says to a peer.
        routes: where a peer can be dialled, in words and in deed.
    """

    def __init__(
        self,
        introduce: Callable[[int, Purpose], Introduction],
        routes: Callable[[tuple[int, Purpose]], list[tuple[str, _Dial]]],
    ) -> None:
        self._introduce = introduce
        self._routes = routes
        self._take: _Take | None = None
        self._shards = range(0)
        self._serving = asyncio.Event()

    def serve(self, take: _Take, shards: range) -> None:
        """From now on channels go to take(shard, socket, segment, rank of the dialer).

        It owns the descriptors.
        """
        self._take = take
        self._shards = shards
        self._serving.set()

    async def open(
        self, member: Member, shard: int, deadline: float, make_segment: Callable[[], int] | None
    ) -> Connected:
        """A channel to a shard: through shared memory where that works, else TCP."""
        failure, pause = "no attempt was made", 0.02
        shared = [] if make_segment is None else [Purpose.SHARED_STORE]
        while True:
            for purpose in (*shared, Purpose.STORE):
                for where, dial in self._routes((member.rank, purpose)):
                    try:
                        async with asyncio.timeout(HANDSHAKE_SECONDS):
                            introduction = self._introduce(member.rank, purpose)
                            return await _dial(dial, introduction, shard, make_segment)
                    except (HandshakeError, OSError) as error:
                        failure = f"{where}: {error}"
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(
                    f"no channel to the server with rank {member.rank} (pid {member.pid} on"
                    f" {member.host}) before the deadline: {failure}; check that this host can"
                    " reach that address"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS_MAX)

    async def admit(
        self, connection: socket.socket, introduction: Introduction, segment: int
    ) -> None:
        """Take a channel that a worker dials; raising HandshakeError refuses it."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._serving.wait()
                if (introduction.purpose is Purpose.SHARED_STORE) != (segment != _NO_SEGMENT):
                    raise HandshakeError("a channel came without its memory, or with too much")
                shard = int.from_bytes(await read_exactly(connection, 4), "little")
        except BaseException:
            _close(segment)
            raise
        known = shard in self._shards
        with contextlib.suppress(OSError):
            answer = _ACCEPTED if known else _NO_SHARD
            await asyncio.get_running_loop().sock_sendall(connection, answer)
        if not known:
            _close(segment)
            raise HandshakeError(f"it asked for shard {shard}, which is not here")
        assert self._take is not None
        try:
            self._take(shard, connection.detach(), segment, introduction.rank)
        except RuntimeError as error:
            raise HandshakeError(str(error)) from None


async def _dial(
    dial: _Dial, introduction: Introduction, shard: int, make_segment: Callable[[], int] | None
) -> Connected:
    connection = await dial(introduction, on_connected=lambda: None)
    segment = _NO_SEGMENT
    try:
        if introduction.purpose is Purpose.SHARED_STORE and make_segment is not None:
            segment = make_segment()
            pass_descriptors(connection, [segment])
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, shard.to_bytes(4, "little"))
        answer = await read_exactly(connection, 1)
        if answer == _NO_SHARD:
            raise JoinError(
                f"the server with rank {introduction.target} has no shard {shard}: it was started"
                " with another --shards than this worker's COMMUTE_SHARDS"
            )
        if answer != _ACCEPTED:
            raise HandshakeError("it refused the channel")
    except BaseException:
        connection.close()
        _close(segment)
        raise
    return Connected(connection.detach(), segment, True)


def _close(segment: int) -> None:
    if segment != _NO_SEGMENT:
        os.close(segment)
