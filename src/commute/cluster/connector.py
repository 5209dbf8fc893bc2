# SPDX-License-Identifier: Apache-2.0
"""Links to the other members of a world: a listener and a dialer on a thread of their own.

A link is known by (peer, purpose, group) and opened at first use; either side may dial. It is
accepted whether or not this member has made that group yet: it waits here until it has. After the
handshake the acceptor answers one status byte:

    1 ACCEPTED   this connection is the link
    2 YIELD      yours lost: mine is on its way to you
    (closed)     refused: unknown peer, epoch or purpose, or the link exists already

When both dial at once the higher rank's dial wins:

    absent --dial--> dialling --TCP connected--> introduced --ACCEPTED--> ready --asked--> taken
       \\--a dial of the peer is accepted------------------------------->/

    A peer's dial that arrives is accepted when the link is absent or dialling (our own attempt
    is dropped: it has said nothing yet), and when it is introduced and the peer's rank is higher.
    It is answered YIELD when our rank is higher and our own dial is introduced, or has made the
    link already. Otherwise, when ready or taken, it is refused as a duplicate, unless the ready
    one turns out to be dead.

    So a higher rank that has introduced itself never accepts, and a lower rank always does: both
    sides settle on one connection, whatever the timing. A lower rank that was told to yield dials
    again if nothing came (the winner's attempt may have failed).

Between neighbours, which share memory, links are dialled through a Unix socket, and the dialer
passes the memory of the link along; all else is the same.

Channels to the shards of a store are another matter (see channels).

Threads: the loop thread owns the links and the gate; other threads reach them by `run`, and take
a ready socket under `_lock`. The thread is a daemon, so a process can end without close().
Ownership: a socket, and a segment, belong to the connector until `connect` returns them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from commute._errors import (
    AuthenticationError,
    ClosedError,
    CommuteError,
    OperationTimeoutError,
)
from commute.cluster.addresses import format_address
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    check_token,
    read_exactly,
)
from commute.cluster.channels import STORE_PURPOSES, Channels, Connected
from commute.cluster.control import Member
from commute.cluster.gate import HANDSHAKE_SECONDS, Gate, describe_failure, dial, listen
from commute.cluster.link import NO_SEGMENT, Link, State, close_segment
from commute.cluster.loop import LoopThread
from commute.cluster.neighbours import (
    SHARED_PURPOSES,
    Attach,
    Neighbours,
    OutboxOf,
    pass_descriptors,
)

__all__ = ["Connector"]

ACCEPTED: Final = b"\1"
YIELD: Final = b"\2"
RETRY_SECONDS_MAX: Final = 0.5
# A winner's dial takes milliseconds; this long without it, its attempt has failed.
YIELD_SECONDS: Final = 2.0

_LINK_PURPOSES: Final = (
    SHARED_PURPOSES | {Purpose.COLLECTIVE, Purpose.PAIR, Purpose.CONTROL}
) - STORE_PURPOSES
_T = TypeVar("_T")
# The peer, what for, and the id of the group, 0 for the world.
_Key = tuple[int, Purpose, int]
# dial(introduction, on_connected=...) makes one attempt.
_Dial = Callable[..., Awaitable[socket.socket]]


class Connector:
    """The links of one member of one world.

    `join` makes it, in three steps: the thread, then `listen` once the route to the coordinator
    is known, then `admit_members` once the world is formed.
    """

    def __init__(self, *, rank: int, token: str, run: str) -> None:
        self._rank = rank
        self._run = run
        self._key = check_token(token)
        self._members: dict[int, Member] = {}
        self._epoch = 0
        self._links: dict[_Key, Link] = {}
        self._closed_groups: set[int] = set()
        self._gate: Gate | None = None
        self._neighbours: Neighbours | None = None
        self._make_segment: Callable[[], int] | None = None
        self._take_control: Callable[[int, int], None] | None = None
        self._channels = Channels(self._introduction, self._routes)
        # Held to pass a ready socket from the loop thread to a caller.
        self._lock = threading.Lock()
        self._formed = asyncio.Event()
        self._thread = LoopThread(
            f"commute-connector-{rank}",
            self._shut_down,
            ended="the links of this group are closed; make a new group with init()",
        )
        self._loop = self._thread.loop

    @property
    def refused(self) -> int:
        """How many connections to this member were not let in."""
        return self._gate.refused if self._gate is not None else 0

    def run(
        self,
        work: Coroutine[Any, Any, _T],
        *,
        check: Callable[[], None] | None = None,
    ) -> _T:
        """Run on the loop thread and wait for the result, as `LoopThread.run` does."""
        return self._thread.run(work, check=check)

    async def listen(self, host: str) -> tuple[str, int]:
        """Listen for the other members; on the loop thread. Raises OSError."""
        listener = listen(host)
        self._gate = Gate(listener, self._key, self._run, self._admit)
        bound, port = listener.getsockname()[:2]
        return str(bound), int(port)

    async def listen_to_neighbours(self, world: str, port: int) -> None:
        """Let members on this host find this one; on the loop thread. Raises OSError."""
        self._neighbours = Neighbours(
            key=self._key,
            run=self._run,
            world=world,
            rank=self._rank,
            port=port,
            admit=self._admit,
        )

    def meet_neighbours(
        self,
        own: tuple[int, int],
        attach: Attach,
        make_segment: Callable[[], int],
        check: Callable[[], None] | None = None,
    ) -> set[int]:
        """The members with lower ranks that share memory with this one, outboxes exchanged.

        Those with higher ranks come by themselves, any time from now on.

        Args:
            own: the descriptors of this member's outbox and of its eventfd.
            make_segment: makes the memory of a link; the descriptor is the connector's.
        """
        self._make_segment = make_segment

        async def work() -> set[int]:
            assert self._neighbours is not None
            self._neighbours.open(self._epoch, own, attach)
            return await self._neighbours.meet(self._members.values())

        return set() if self._neighbours is None else self.run(work(), check=check)

    def decline_neighbours(self) -> None:
        """Instead of `meet_neighbours`, where there is no memory to share."""
        if self._neighbours is not None:
            self._loop.call_soon_threadsafe(self._neighbours.decline)

    async def admit_members(self, members: tuple[Member, ...], epoch: int) -> None:
        """From now on links to and from these members are made; on the loop thread."""
        self._members = {member.rank: member for member in members}
        self._epoch = epoch
        self._formed.set()

    def connect(
        self,
        peer: int,
        purpose: int,
        deadline: float,
        check: Callable[[], None] | None = None,
        group: int = 0,
    ) -> int:
        """The descriptor of the link to a peer: connected, authenticated, non-blocking.

        It blocks until the link is there. The descriptor belongs to the caller, who gets it only
        once: a link is not opened twice. After an interrupted call it can be asked for again.

        Args:
            deadline: by time.monotonic().
            check: called at least every 100 ms; what it raises ends the wait.

        Raises:
            OperationTimeoutError: the deadline passed; the message says what the last attempt met.
            AuthenticationError: what listens at the peer's address does not hold the token.
            ClosedError: the connector is closed.
        """
        if purpose in SHARED_PURPOSES:
            raise ValueError(f"purpose {purpose} is for links through shared memory")
        return self._connect((peer, Purpose(purpose), group), deadline, check).socket

    def connect_shared(
        self,
        peer: int,
        purpose: Purpose,
        deadline: float,
        check: Callable[[], None] | None = None,
        group: int = 0,
    ) -> Connected:
        """As `connect`, to a neighbour, with the memory of the link.

        Args:
            purpose: one of SHARED_PURPOSES.
        """
        return self._connect((peer, purpose, group), deadline, check)

    def _connect(self, key: _Key, deadline: float, check: Callable[[], None] | None) -> Connected:
        peer, purpose, _ = key
        if peer == self._rank or peer not in self._members:
            raise ValueError(
                f"rank {peer} is no other member of this world of {len(self._members)}"
            )
        if purpose not in _LINK_PURPOSES:
            raise ValueError(f"purpose {purpose} is not for links between members")
        self.run(self._open(key, deadline), check=check)
        with self._lock:
            link = self._links.get(key)
            if self._thread.closed or link is None:
                raise ClosedError("the group was closed while this call waited")
            return link.take()

    def on_control(self, take: Callable[[int, int], None]) -> None:
        """From now on every control link goes to take(descriptor, peer) as soon as it is there.

        A control link must be answered from its first moment, whether or not this member has asked
        for it: the peer that dialled it watches for heartbeats. `take` runs on the loop thread.
        """
        self._take_control = take
        self._loop.call_soon_threadsafe(self._pass_control)

    def connect_control(
        self, peer: int, deadline: float, check: Callable[[], None] | None = None
    ) -> None:
        """Make sure that there is a control link to a peer; it goes where `on_control` says."""
        self.run(self._open((peer, Purpose.CONTROL, 0), deadline), check=check)

    def on_channel(self, take: Callable[[int, int, int, int], None], shards: range) -> None:
        """Channels to these shards go to take(shard, socket, segment, rank), which owns both."""
        self._loop.call_soon_threadsafe(self._channels.serve, take, shards)

    def open_channel(
        self, peer: int, shard: int, deadline: float, make_segment: Callable[[], int] | None
    ) -> Connected:
        """A channel to a shard of a server: through shared memory where that works, else TCP.

        Args:
            make_segment: makes the memory of a channel; None where none is wanted.

        Raises:
            OperationTimeoutError: the server could not be reached; the message says why.
        """
        return self.run(self._channels.open(self._members[peer], shard, deadline, make_segment))

    def on_group(self, outbox_of: OutboxOf) -> None:
        """From now on neighbours that open a group get what outbox_of(group, ranks) gives."""
        if self._neighbours is not None:
            self._loop.call_soon_threadsafe(self._neighbours.open_groups, outbox_of)

    def meet_in_group(
        self,
        peer: int,
        group: int,
        ranks: Sequence[int],
        deadline: float,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Exchange outboxes of a group with a neighbour, whether or not it has made the group yet.

        Args:
            ranks: of the group's members, in its order.

        Raises:
            OperationTimeoutError, CommuteError: it did not answer, or has no memory left.
        """
        assert self._neighbours is not None
        meeting = self._neighbours.meet_in_group(self._members[peer], group, ranks, deadline)
        self.run(meeting, check=check)

    def forget_group(self, group: int) -> None:
        """Drop the links of a group that was closed, and refuse new ones."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all links
            self._loop.call_soon_threadsafe(self._forget_group, group)

    def _forget_group(self, group: int) -> None:
        self._closed_groups.add(group)
        with self._lock:
            for key in [key for key in self._links if key[2] == group]:
                self._links.pop(key).drop()

    def _pass_control(self) -> None:
        for (peer, purpose, _), link in self._links.items():
            if purpose is Purpose.CONTROL and link.state is State.READY and self._take_control:
                with self._lock:
                    self._take_control(link.take().socket, peer)

    def close(self) -> None:
        """End the thread and everything it holds, within 2 s; idempotent.

        Descriptors that `connect` returned are not touched.
        """
        self._thread.close()

    async def _shut_down(self) -> None:
        for gate in (self._gate, self._neighbours):
            if gate is not None:
                await gate.close()
        with self._lock:
            for link in self._links.values():
                link.drop()

    # The peer dials

    async def _admit(
        self, connection: socket.socket, introduction: Introduction, segment: int = NO_SEGMENT
    ) -> None:
        """Decide on a peer's dial; raising HandshakeError refuses it."""
        if introduction.purpose in STORE_PURPOSES:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._formed.wait()
            self._check_introduction(introduction)
            return await self._channels.admit(connection, introduction, segment)
        status = b""
        try:
            # A peer may have heard of the world before we have.
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._formed.wait()
            link = self._link_of(introduction, shared=segment != NO_SEGMENT)
            with self._lock:
                status = self._decide(link, introduction.rank)
                if status == ACCEPTED:
                    link.settle(connection, segment, dialled=False)
        finally:
            if status != ACCEPTED:
                close_segment(segment)
        # One byte into an empty socket buffer: this does not wait.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(connection, status)
        if status == YIELD:
            connection.close()
        self._pass_control()

    def _link_of(self, introduction: Introduction, *, shared: bool) -> Link:
        known = introduction.purpose in _LINK_PURPOSES
        if (
            introduction.role is not Role.MEMBER
            or not known
            or ((introduction.purpose in SHARED_PURPOSES) != shared)
        ):
            raise HandshakeError(f"purpose {introduction.purpose:d} is not for members")
        self._check_introduction(introduction)
        if introduction.group in self._closed_groups:
            raise HandshakeError("that group is closed")
        return self._link((introduction.rank, introduction.purpose, introduction.group))

    def _check_introduction(self, introduction: Introduction) -> None:
        if introduction.role is not Role.MEMBER:
            raise HandshakeError("it is no member")
        if introduction.target != self._rank:
            raise HandshakeError(f"it dialled rank {introduction.target}, not {self._rank}")
        if introduction.epoch != self._epoch:
            raise HandshakeError(f"epoch {introduction.epoch}, not {self._epoch}")
        if introduction.rank == self._rank or introduction.rank not in self._members:
            raise HandshakeError(f"rank {introduction.rank} is no other member")

    def _decide(self, link: Link, peer: int) -> bytes:
        if link.state is State.READY and link.dead:
            link.drop()
        if self._rank > peer and (link.state is State.INTRODUCED or link.dialled):
            return YIELD
        if link.state in (State.READY, State.TAKEN):
            raise HandshakeError(f"the link of rank {peer} exists already")
        return ACCEPTED

    def _link(self, key: _Key) -> Link:
        return self._links.setdefault(key, Link())

    # We dial

    async def _open(self, key: _Key, deadline: float) -> None:
        """Return once the link is ready; give up at the deadline."""
        link = self._link(key)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())), link.opening:
                if link.state is State.TAKEN:
                    if key[1] is Purpose.CONTROL:
                        return
                    name = key[1].name.lower()
                    raise ValueError(f"the {name} link to rank {key[0]} is taken already")
                await self._until_ready(key, link)
                self._pass_control()
        except TimeoutError:
            raise OperationTimeoutError(self._describe_failure(key, link)) from None

    async def _until_ready(self, key: _Key, link: Link) -> None:
        pause = 0.02
        while not link.ready.is_set():
            attempt = asyncio.ensure_future(self._attempt(key, link))
            arrival = asyncio.ensure_future(link.ready.wait())
            try:
                await asyncio.wait({attempt, arrival}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel(attempt, arrival)
            if link.ready.is_set():
                return
            yielded = attempt.result()
            # Whatever we wait for now, a dial of the peer ends the wait.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(YIELD_SECONDS if yielded else pause):
                    await link.ready.wait()
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def _attempt(self, key: _Key, link: Link) -> bool:
        """Dial once, every address of the peer in turn; True when told to yield."""
        peer, purpose, group = key
        introduction = self._introduction(peer, purpose, group)

        def connected() -> None:
            # The peer's dial may have come first, and this attempt not have been stopped yet.
            if link.state is not State.DIALLING:
                raise HandshakeError("the peer's dial came first")
            link.state = State.INTRODUCED

        for where, dial_there in self._routes((peer, purpose)):
            if link.state is not State.ABSENT:
                break
            link.state = State.DIALLING
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    dialling = dial_there(introduction, on_connected=connected)
                    if await self._dial(link, dialling, shared=purpose in SHARED_PURPOSES):
                        return True
            except HandshakeError as error:
                link.failure = f"{where}: {error}"
                if error.impostor:
                    raise AuthenticationError(_impostor(peer, where)) from None
            except OSError as error:
                link.failure = f"{where}: {describe_failure(error)}"
            finally:
                # Unless the link was settled meanwhile, there is no attempt any more.
                if link.state in (State.DIALLING, State.INTRODUCED):
                    link.state = State.ABSENT
        return False

    def _introduction(self, peer: int, purpose: Purpose, group: int = 0) -> Introduction:
        return Introduction(Role.MEMBER, purpose, self._rank, peer, self._epoch, self._run, group)

    def _routes(self, key: tuple[int, Purpose]) -> list[tuple[str, _Dial]]:
        """Where a peer can be dialled, in words and in deed."""
        member = self._members[key[0]]
        if key[1] in SHARED_PURPOSES:
            assert self._neighbours is not None
            return [("shared memory", functools.partial(self._neighbours.dial, member))]
        return [
            (format_address(host, port), functools.partial(dial, host, port, self._key))
            for host, port in member.addresses
        ]

    async def _dial(self, link: Link, dialling: Awaitable[socket.socket], *, shared: bool) -> bool:
        connection = await dialling
        segment = NO_SEGMENT
        try:
            if shared:
                segment = self._new_segment()
                pass_descriptors(connection, [segment])
            status = await read_exactly(connection, 1)
            if status == ACCEPTED and link.state is State.INTRODUCED:
                with self._lock:
                    link.settle(connection, segment, dialled=True)
                return False
        except HandshakeError:
            _drop(connection, segment)
            raise HandshakeError("it refused the link") from None
        except BaseException:
            _drop(connection, segment)
            raise
        _drop(connection, segment)
        return status == YIELD

    def _new_segment(self) -> int:
        assert self._make_segment is not None
        try:
            return self._make_segment()
        except OSError as error:  # not the peer's fault: dialling again would not help
            raise CommuteError(
                f"there is no shared memory for a link ({error.strerror}); free some memory or file"
                " descriptors, or set COMMUTE_SHARED_MEMORY=0"
            ) from None

    def _describe_failure(self, key: _Key, link: Link) -> str:
        member = self._members[key[0]]
        return (
            f"no link to rank {member.rank} (pid {member.pid} on {member.host}) before the"
            f" deadline: {link.failure}; check that this host can reach that address"
        )


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _drop(connection: socket.socket, segment: int) -> None:
    connection.close()
    close_segment(segment)


def _impostor(peer: int, where: str) -> str:
    return (
        f"what listens on {where} is not rank {peer} of this job; check that"
        " the address it advertises is its own"
    )
