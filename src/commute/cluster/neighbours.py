# SPDX-License-Identifier: Apache-2.0
"""Which members share memory with this one: found out by trying, never by a name or a variable.

Every member listens on an abstract Unix socket whose name follows from the token, the run, the
world, its rank and the port of its TCP listener. Such a socket can be reached within one host and
one network namespace only. After `open` each member dials those with lower ranks; where that
succeeds the two run the same handshake as over TCP and pass each other the descriptors of their
outboxes:

    dialer to acceptor   1 byte, with (segment, eventfd)
    acceptor to dialer   1 byte, with (segment, eventfd)      both have attached the other's now

A member that cannot be dialled, or whose memory cannot be attached, is not a neighbour; TCP does
for it.

A group of neighbours has outboxes of its own, which are exchanged when one of them first needs
another's: it dials, says who is in the group, and goes on as above. The other answers by itself,
also when its program has not made the group yet, so nobody waits for a call of the other's. Both
may dial at once; whoever attaches what it has already lets go of the second.

    dialer to acceptor   count u4 | rank i4 of each member, in the group's order
    acceptor to dialer   "o" with (segment, eventfd), or "-": no memory is left

Links to neighbours are dialled here too, later, when they are first used: the dialer
passes 1 byte with the segment of the link, then the connector decides as on any dial. Runs on the
connector's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from commute._errors import CommuteError, OperationTimeoutError
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    dial_handshake,
    read_exactly,
)
from commute.cluster.control import SIZE_MAX, Member
from commute.cluster.gate import HANDSHAKE_SECONDS, Gate

__all__ = ["Neighbours", "dial_name", "name_of", "pass_descriptors"]

_EXCHANGE: Final = b"o"
_NO_MEMORY: Final = b"-"
_RETRY_SECONDS_MAX: Final = 0.5
_log = logging.getLogger("commute.cluster")

# attach(peer, segment descriptor, eventfd): owns both descriptors; raises OSError or RuntimeError.
Attach = Callable[[int, int, int], None]
# outbox_of(group, ranks): the descriptors that are passed, and what attaches a peer's. May raise
# OSError.
OutboxOf = Callable[[int, Sequence[int]], tuple[tuple[int, int], Attach]]
# admit(connection, introduction, segment descriptor) decides on a link that a neighbour dials.
Admit = Callable[[socket.socket, Introduction, int], Awaitable[None]]

SHARED_PURPOSES: Final = frozenset(
    {Purpose.SHARED_COLLECTIVE, Purpose.SHARED_PAIR, Purpose.SHARED_STORE}
)


class Neighbours:
    """The members on this host, and the exchange of outboxes with them."""

    def __init__(
        self, *, key: bytes, run: str, world: str, rank: int, port: int, admit: Admit
    ) -> None:
        self._key = key
        self._run = run
        self._world = world
        self._rank = rank
        self._opened = asyncio.Event()
        self._own: tuple[int, int] = (-1, -1)
        self._attach: Attach | None = None
        self._groups_opened = asyncio.Event()
        self._outbox_of: OutboxOf | None = None
        self._epoch = 0
        self._admit_link = admit
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._name(rank, port))
            listener.listen(1024)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._gate = Gate(listener, key, run, self._admit)

    def open(self, epoch: int, own: tuple[int, int], attach: Attach) -> None:
        """From now on outboxes are exchanged; own: the descriptors that are passed."""
        self._epoch = epoch
        self._own = own
        self._attach = attach
        self._opened.set()

    def decline(self) -> None:
        """This member shares no memory: those who dial are told at once."""
        self._opened.set()

    async def meet(self, members: Iterable[Member]) -> set[int]:
        """Dial all members with lower ranks; those that turned out to be neighbours."""
        lower = [member for member in members if member.rank < self._rank]
        met = await asyncio.gather(*(self._dial(member) for member in lower))
        return {member.rank for member, found in zip(lower, met, strict=True) if found}

    def open_groups(self, outbox_of: OutboxOf) -> None:
        """From now on outboxes of groups are exchanged."""
        self._outbox_of = outbox_of
        self._groups_opened.set()

    async def meet_in_group(
        self, member: Member, group: int, ranks: Sequence[int], deadline: float
    ) -> None:
        """Exchange the outboxes of a group with one neighbour; again until the deadline.

        Raises:
            OperationTimeoutError, CommuteError: it did not answer, or there is no memory left.
        """
        failure, pause = "no attempt was made", 0.02
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    return await self._meet_in_group(member, group, ranks)
            except _NoMemoryError as error:
                raise CommuteError(
                    f"{error} for the group of ranks {', '.join(map(str, ranks))}; free some memory"
                    " or file descriptors, or set COMMUTE_SHARED_MEMORY=0"
                ) from None
            except (HandshakeError, OSError) as error:  # it is still starting, or is gone
                failure = str(error) or "no answer"
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS_MAX)
        raise OperationTimeoutError(
            f"rank {member.rank} (pid {member.pid} on {member.host}) has not shared memory for the"
            f" group of ranks {', '.join(map(str, ranks))} before the deadline: {failure}; see"
            " whether it is stopped"
        )

    async def _meet_in_group(self, member: Member, group: int, ranks: Sequence[int]) -> None:
        own, attach = self._group_outbox(group, ranks)
        introduction = Introduction(
            Role.MEMBER, Purpose.OUTBOX, self._rank, member.rank, self._epoch, self._run, group
        )
        with await self.dial(member, introduction, lambda: None) as connection:
            said = struct.pack(f"<I{len(ranks)}i", len(ranks), *ranks)
            await asyncio.get_running_loop().sock_sendall(connection, said)
            pass_descriptors(connection, own)
            try:
                await _take(connection, member.rank, attach)
            except _NoMemoryError:
                raise _NoMemoryError(f"rank {member.rank} has no memory to share") from None

    async def _exchange_in_group(
        self, connection: socket.socket, introduction: Introduction
    ) -> None:
        await self._groups_opened.wait()
        (count,) = struct.unpack("<I", await read_exactly(connection, 4))
        if count > SIZE_MAX:
            raise HandshakeError(f"a group of {count} ranks")
        ranks = struct.unpack(f"<{count}i", await read_exactly(connection, 4 * count))
        if not {self._rank, introduction.rank} <= set(ranks) or len(set(ranks)) != count:
            raise HandshakeError(f"no group of both: {ranks}")
        try:
            own, attach = self._group_outbox(introduction.group, ranks)
        except _NoMemoryError:
            await asyncio.get_running_loop().sock_sendall(connection, _NO_MEMORY)
            raise
        await _take(connection, introduction.rank, attach)
        pass_descriptors(connection, own)

    def _group_outbox(self, group: int, ranks: Sequence[int]) -> tuple[tuple[int, int], Attach]:
        assert self._outbox_of is not None
        try:
            return self._outbox_of(group, ranks)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise _NoMemoryError(f"rank {self._rank} has no memory to share ({why})") from None

    async def close(self) -> None:
        await self._gate.close()

    def _name(self, rank: int, port: int) -> bytes:
        return name_of(self._key, self._run, self._world, rank, port)

    async def dial(
        self, member: Member, introduction: Introduction, on_connected: Callable[[], None]
    ) -> socket.socket:
        """An authenticated connection to a neighbour; raises HandshakeError or OSError."""
        name = self._name(member.rank, member.addresses[0][1])
        return await dial_name(name, self._key, introduction, on_connected)

    async def _dial(self, member: Member) -> bool:
        introduction = Introduction(
            Role.MEMBER, Purpose.OUTBOX, self._rank, member.rank, self._epoch, self._run
        )
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                with await self.dial(member, introduction, lambda: None) as connection:
                    pass_descriptors(connection, self._own)
                    assert self._attach is not None
                    await _take(connection, member.rank, self._attach)
            return True
        except ConnectionRefusedError:
            return False  # nobody of that name on this host
        except (HandshakeError, OSError, RuntimeError, TimeoutError) as error:
            _log.info("no shared memory with rank %d: %s", member.rank, error)
            return False

    async def _admit(self, connection: socket.socket, introduction: Introduction) -> None:
        if introduction.purpose in SHARED_PURPOSES:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                (segment,) = await take_descriptors(connection, 1)
            await self._admit_link(connection, introduction, segment)
            return
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await self._exchange(connection, introduction)
        connection.close()

    async def _exchange(self, connection: socket.socket, introduction: Introduction) -> None:
        await self._opened.wait()
        if self._attach is None:
            raise HandshakeError("this member shares no memory")
        wanted = (Role.MEMBER, Purpose.OUTBOX, self._rank, self._epoch)
        got = (introduction.role, introduction.purpose, introduction.target, introduction.epoch)
        if got != wanted:
            raise HandshakeError("it is no neighbour of this member")
        if introduction.group:
            return await self._exchange_in_group(connection, introduction)
        if introduction.rank <= self._rank:
            raise HandshakeError("a lower rank does not dial")
        await _take(connection, introduction.rank, self._attach)
        pass_descriptors(connection, self._own)


class _NoMemoryError(HandshakeError):
    """One of the two has no memory to share."""


def name_of(key: bytes, run: str, world: str, rank: int, port: int) -> bytes:
    """The name of the abstract Unix socket on which a member listens to its neighbours."""
    text = f"{run}/{world}/{rank}/{port}".encode()
    return b"\0commute-" + hashlib.blake2b(text, key=key[:64], digest_size=16).digest()


async def dial_name(
    name: bytes, key: bytes, introduction: Introduction, on_connected: Callable[[], None]
) -> socket.socket:
    """An authenticated connection by such a name; raises HandshakeError or OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, name)
        on_connected()
        await dial_handshake(connection, key, introduction)
        return connection
    except BaseException:
        connection.close()
        raise


async def _take(connection: socket.socket, peer: int, attach: Attach) -> None:
    segment, event = await take_descriptors(connection, 2)
    try:
        attach(peer, segment, event)
    except RuntimeError as error:
        raise HandshakeError(str(error)) from None


def pass_descriptors(connection: socket.socket, descriptors: Iterable[int]) -> None:
    # One byte into an empty socket buffer: this does not wait.
    socket.send_fds(connection, [_EXCHANGE], list(descriptors))


async def take_descriptors(connection: socket.socket, count: int) -> list[int]:
    """As many descriptors as the other end must pass; they are the caller's."""
    await _readable(connection)
    said, descriptors, _, _ = socket.recv_fds(connection, 1, count, socket.MSG_CMSG_CLOEXEC)
    if said == _NO_MEMORY:
        raise _NoMemoryError("it has no memory to share")
    if said != _EXCHANGE or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandshakeError("it passed no memory")
    return descriptors


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
