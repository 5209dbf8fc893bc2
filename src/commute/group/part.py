# SPDX-License-Identifier: Apache-2.0
"""A group of some members of a world of processes: its engine, its outboxes, its links.

Nothing is agreed upon, because everything follows from what all members know. Who shares memory
with whom was found out when the world started, so all know at once whether a group can work in
shared memory: if every two of its members can. It then has outboxes of its own, made and exchanged
at the group's first collective (or, where only some members are near, with the first link to one of
them, which rings the doorbell in it). Rejected: using the world's outboxes, which have one line of
operations, so that groups would wait for each other; a meeting of the members as at the world's
start, for which a group that nobody uses would have to wait.

A core, the engine with its outbox, is made by whoever needs it first: this process, with the first
call on the group, or a neighbour that asks for its outbox, perhaps before the program here has made
the group. So opening a group never waits for a call of another rank, and groups may be first used
in any order.

Links go through the world's connector under the group's id; losses, goodbyes and failures through
the world's control links (core/groups.h). A group fails alone: neither the world nor other groups
are broken by what happens in it, but the loss of a process breaks every group it is in.

Threads: any. `Parts` and `Core` have a lock each, held for moments; `Links` has one that is held
while a link is opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commute import _core
from commute._errors import CommuteError
from commute._runner import PEER_LOST
from commute._wiring import Part, no_stores
from commute.cluster.auth import HandshakeError, Purpose
from commute.group.family import Identity, tag_of
from commute.group.shared_arrays import GROUP_BYTES, room_bytes
from commute.plan.choose import SLOT_BYTES

if TYPE_CHECKING:
    from commute.cluster.connector import Connector
    from commute.group.group import Group
    from commute.store.links import StoreLinks

_SHARED = {Purpose.COLLECTIVE: Purpose.SHARED_COLLECTIVE, Purpose.PAIR: Purpose.SHARED_PAIR}


class Links:
    """Opens the links of one group, each at its first use.

    Attributes:
        near: the ranks of the group to which links go through shared memory.
    """

    def __init__(
        self,
        connector: Connector,
        engine: Callable[[], _core.Engine],
        ranks: Sequence[int],
        group: int = 0,
    ) -> None:
        self.near: frozenset[int] = frozenset()
        self._connector = connector
        self._engine = engine
        self._ranks = ranks  # of the world
        self._group = group
        self._opened: set[tuple[int, Purpose]] = set()
        self._lock = threading.Lock()

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        self._open(peer, Purpose.COLLECTIVE, timeout, check)

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        self._open(peer, Purpose.PAIR, timeout, check)

    def _meet(self, peer: int, deadline: float, check: Callable[[], None]) -> None:
        """Have the outbox of a near rank: links to it ring its doorbell. The world has them all."""

    def _open(self, peer: int, purpose: Purpose, timeout: float, check: Callable[[], None]) -> None:
        through = _SHARED[purpose] if peer in self.near else purpose
        if (peer, through) in self._opened:
            return
        deadline = time.monotonic() + timeout
        check = self._watching(peer, check)
        with self._lock:
            if (peer, through) in self._opened:  # another thread was quicker
                return
            # The control link first: from here on the peer's death is noticed.
            self._connector.connect_control(self._ranks[peer], deadline, check)
            self._add(peer, purpose, through, deadline, check)
            self._opened.add((peer, through))

    def _watching(self, peer: int, check: Callable[[], None]) -> Callable[[], None]:
        """As check, and the peer must not have left: nobody would answer, however long we wait."""
        engine = self._engine()

        def watching() -> None:
            if engine.has_left(peer):
                engine.fail(PEER_LOST, peer, engine.rank, 0, "it had left")
            check()

        return watching

    def _add(
        self,
        peer: int,
        purpose: Purpose,
        through: Purpose,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        engine, member = self._engine(), self._ranks[peer]
        pair = purpose is Purpose.PAIR
        if through is purpose:
            add = engine.add_tcp_pair_link if pair else engine.add_tcp_link
            add(peer, self._connector.connect(member, purpose, deadline, check, self._group))
            return
        self._meet(peer, deadline, check)
        found = self._connector.connect_shared(member, through, deadline, check, self._group)
        engine.add_shared_link(peer, found.socket, found.segment, found.dialled, pair)


class Core:
    """The engine of a group in this process, and its outbox where a member is near.

    Raises OSError when there is no memory to share.
    """

    def __init__(self, engine: _core.Engine, ranks: Sequence[int], *, shares: bool) -> None:
        self.engine = engine
        # Before the engine is first used: whoever sleeps in it must know where it is woken.
        self.outbox = (-1, -1)
        if shares:
            room = room_bytes(len(ranks), GROUP_BYTES)
            self.outbox = (engine.share_memory(SLOT_BYTES, room), engine.event_fd)
        self._ranks = ranks
        self._met: set[int] = set()
        self._lock = threading.Lock()

    def met(self, peer: int) -> bool:
        with self._lock:
            return peer in self._met

    def attach(self, member: int, segment: int, event: int) -> None:
        """Take a neighbour's outbox; member is its rank in the world. Owns both descriptors."""
        peer = self._ranks.index(member)
        with self._lock:
            if peer in self._met:  # both have dialled
                os.close(segment)
                os.close(event)
                return
            self.engine.attach_outbox(peer, segment, event)
            self._met.add(peer)


@dataclass(frozen=True)
class Surroundings:
    """What groups take over from their world.

    Attributes:
        near: of each rank, those that share memory with it.
        on_loopback: the ranks all of whose addresses are within the host.
        fetches: those that share memory can read each other's, wherever it is.
    """

    rank: int
    epoch: int
    may_spin: bool
    near: tuple[frozenset[int], ...]
    on_loopback: frozenset[int]
    fetches: bool


class Parts:
    """The cores of all groups in this process, by id."""

    def __init__(
        self,
        around: Surroundings,
        connector: Connector,
        health: _core.Health,
        groups: _core.Groups,
    ) -> None:
        self.around = around
        self.connector = connector
        self.health = health
        self._groups = groups
        self._cores: dict[int, Core] = {}
        self._closed: set[int] = set()
        self._lock = threading.Lock()
        connector.on_group(self._outbox_of)

    def core(self, group: int, ranks: Sequence[int]) -> Core:
        """The core of a group, made now if there is none; raises OSError."""
        with self._lock:
            if group not in self._cores:
                self._cores[group] = self._make(group, ranks)
            return self._cores[group]

    def remove(self, group: int) -> None:
        with self._lock:
            self._cores.pop(group, None)
            self._closed.add(group)
        self._groups.remove(group)
        self.connector.forget_group(group)

    def close(self) -> None:
        """Close engines that neighbours asked for and the program here never used."""
        with self._lock:
            cores, self._cores = self._cores, {}
        for core in cores.values():
            core.engine.close(0.0)

    def place(self, ranks: Sequence[int]) -> str:
        """What all members have between them, for plan.choose; all members find the same."""
        others = set(ranks)
        if len(ranks) > 1 and all(others - {rank} <= self.around.near[rank] for rank in ranks):
            return "memory"
        return "loopback" if others <= self.around.on_loopback else "tcp"

    def _make(self, group: int, ranks: Sequence[int]) -> Core:
        around = self.around
        mine = ranks.index(around.rank)
        engine = _core.Engine(mine, len(ranks), tag_of(group), around.epoch)
        engine.may_spin(around.may_spin)
        core = Core(engine, ranks, shares=not around.near[around.rank].isdisjoint(ranks))
        self._groups.add(group, list(ranks), engine)
        return core

    def _outbox_of(
        self, group: int, ranks: Sequence[int]
    ) -> tuple[tuple[int, int], Callable[[int, int, int], None]]:
        if group in self._closed:
            raise HandshakeError("that group is closed")
        core = self.core(group, ranks)
        return core.outbox, core.attach


class PartWiring(Links):
    """The wiring of one group."""

    def __init__(self, parts: Parts, identity: Identity) -> None:
        super().__init__(parts.connector, self.open, identity.ranks, identity.id)
        self.place = parts.place(identity.ranks)
        self.fetches = parts.around.fetches
        self._parts = parts
        mine = parts.around.near[parts.around.rank]
        self.near = frozenset(place for place, rank in enumerate(identity.ranks) if rank in mine)

    def open(self) -> _core.Engine:
        """The engine of this process."""
        try:
            return self._parts.core(self._group, self._ranks).engine
        except OSError as error:
            members = ", ".join(map(str, self._ranks))
            raise CommuteError(
                f"rank {self._parts.around.rank} has no memory to share in the group of ranks"
                f" {members} ({error}); free some memory or file descriptors, or set"
                " COMMUTE_SHARED_MEMORY=0"
            ) from None

    def share(self, timeout: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout
        for peer in sorted(self.near):
            self._meet(peer, deadline, check)

    def stores(self, group: Group) -> StoreLinks:
        return no_stores(group)

    def part(self, identity: Identity, rank: int) -> Part:
        return part_of(self._parts, identity, rank)

    def close(self) -> None:
        self._parts.remove(self._group)

    def _meet(self, peer: int, deadline: float, check: Callable[[], None]) -> None:
        if not self._parts.core(self._group, self._ranks).met(peer):
            check = self._watching(peer, check)
            self._connector.meet_in_group(
                self._ranks[peer], self._group, self._ranks, deadline, check
            )


class PartWatcher:
    """The world's health thread, for the runner of one group."""

    def __init__(self, health: _core.Health, identity: Identity) -> None:
        self._health = health
        self._identity = identity

    def silent_for(self, rank: int) -> float:
        return self._health.silent_for(self._identity.ranks[rank])

    def close(self, failed: bool, why: str, linger_seconds: float) -> None:
        """Tell the other members; frames leave by themselves, as the world's links stay open."""
        self._health.leave(self._identity.id, failed, why)


def part_of(parts: Parts, identity: Identity, rank: int) -> Part:
    """What a group needs; rank is this process's in it, -1 when it is no member."""
    wiring = PartWiring(parts, identity)
    watcher = PartWatcher(parts.health, identity) if rank >= 0 else None
    return Part(wiring.open, wiring, watcher)
