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
for it. Links to neighbours are dialled here too, later, when they are first used: the dialer
passes 1 byte with the segment of the link, then the connector decides as on any dial. Runs on the
connector's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from commute.cluster.auth import HandshakeError, Introduction, Purpose, Role, dial_handshake
from commute.cluster.control import Member
from commute.cluster.gate import HANDSHAKE_SECONDS, Gate

__all__ = ["Neighbours", "dial_name", "name_of", "pass_descriptors"]

_EXCHANGE: Final = b"o"
_log = logging.getLogger("commute.cluster")

# attach(peer, segment descriptor, eventfd): owns both descriptors; raises OSError or RuntimeError.
Attach = Callable[[int, int, int], None]
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
                    await self._take(connection, member.rank)
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
            await self._opened.wait()
            if self._attach is None:
                raise HandshakeError("this member shares no memory")
            wanted = (Role.MEMBER, Purpose.OUTBOX, self._rank, self._epoch)
            got = (introduction.role, introduction.purpose, introduction.target, introduction.epoch)
            if got != wanted or introduction.rank <= self._rank:
                raise HandshakeError("it is no neighbour of this member")
            await self._take(connection, introduction.rank)
            pass_descriptors(connection, self._own)
        connection.close()

    async def _take(self, connection: socket.socket, peer: int) -> None:
        assert self._attach is not None
        segment, event = await take_descriptors(connection, 2)
        try:
            self._attach(peer, segment, event)
        except RuntimeError as error:
            raise HandshakeError(str(error)) from None


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


def pass_descriptors(connection: socket.socket, descriptors: Iterable[int]) -> None:
    # One byte into an empty socket buffer: this does not wait.
    socket.send_fds(connection, [_EXCHANGE], list(descriptors))


async def take_descriptors(connection: socket.socket, count: int) -> list[int]:
    """As many descriptors as the other end must pass; they are the caller's."""
    await _readable(connection)
    said, descriptors, _, _ = socket.recv_fds(connection, 1, count, socket.MSG_CMSG_CLOEXEC)
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
