# SPDX-License-Identifier: Apache-2.0
"""A process as a member of a job of several: joining over the network, links to the others.

Links between ranks of one host go through shared memory, all others over TCP. Which ranks share
memory is found out once, by trying, when the group starts; all ranks then know of all pairs.

Apart from _init because it brings asyncio along, which a world of one and `import commute` need
not pay for.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commute import _core
from commute._cores import usable_cores
from commute._runner import Peer, Runner
from commute._settings import Settings
from commute._wiring import Part
from commute.cluster.addresses import is_loopback
from commute.cluster.connector import Connector
from commute.cluster.environment import Place
from commute.cluster.join import Membership, join
from commute.cluster.rendezvous import find_coordinator
from commute.group import Group
from commute.group.family import Identity
from commute.group.part import Links, Parts, Surroundings, part_of
from commute.group.shared_arrays import room_bytes
from commute.plan.choose import SLOT_BYTES
from commute.store.gather import Invitation, gather
from commute.store.links import StoreLinks

_log = logging.getLogger("commute")

FETCHES = 2  # what a rank says of itself: it has memory to share, and reads others'


def member_group(place: Place, name: str, settings: Settings) -> Group:
    """Find the coordinator, join the world `name`, and make its group."""
    deadline = time.monotonic() + settings.join_timeout
    address, token = find_coordinator(place, name, deadline)
    membership, connector = join(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        address,
        token,
        place.run,
        name=name,
        join_timeout=max(0.1, deadline - time.monotonic()),
        peer_timeout=settings.peer_timeout,
        bind=settings.bind,
        advertise=settings.advertise,
    )
    invitation = Invitation(address, token, place.run, name, settings)
    return _assemble(membership, connector, invitation)


def _assemble(membership: Membership, connector: Connector, invitation: Invitation) -> Group:
    """Engine, health thread and wiring: a group."""
    settings = invitation.settings
    # The ranks meet in an epoch of their own, so that the first call of the program is operation 1.
    meeting = 2 * membership.epoch
    engine = _core.Engine(membership.rank, membership.size, 0, meeting)
    # With fewer cores than ranks, whoever spins keeps the one it waits for from running.
    may_spin = usable_cores() >= membership.local_size
    engine.may_spin(may_spin)
    health, groups = _core.watch(engine, membership.rank, settings.peer_timeout)
    health.add(membership.coordinator_fd, -1)
    name = f"commute-{membership.run}-{membership.name}-rank{membership.rank}-{os.getpid()}"
    runner = Runner(
        lambda: engine,
        membership.rank,
        [Peer(member.rank, member.host, member.pid) for member in membership.members],
        health=health,
        records=(settings.records, name.replace("/", "_")),
    )
    # All ranks see the same addresses, so all agree.
    place = "loopback" if len(_on_loopback(membership)) == membership.size else "tcp"
    wiring = MemberWiring(engine, health, connector, place, invitation, membership.size)
    group = Group(
        runner,
        wiring,
        rank=membership.rank,
        size=membership.size,
        local_rank=membership.local_rank,
        local_size=membership.local_size,
        host=membership.host,
        timeout=settings.timeout,
    )
    try:
        near = _meet_in_memory(group, engine, connector, wanted=settings.shared_memory)
        wiring.near = near.of(group.rank)
        wiring.fetches = near.fetches
        around = Surroundings(
            rank=group.rank,
            epoch=meeting + 1,
            may_spin=may_spin,
            near=tuple(near.of(rank) for rank in range(group.size)),
            on_loopback=_on_loopback(membership),
            fetches=near.fetches,
        )
        wiring.parts = Parts(around, connector, health, groups)
        if near.all_together:
            group._share_memory()
        if group.rank == 0 and near.trouble:
            _log.warning("%s", near.trouble)
        group._forget_plans()  # the meeting's were bound to links that are let go now
        engine.begin_anew(meeting + 1, sorted(wiring.near))
    except BaseException as error:  # another rank died meanwhile, or Ctrl-C
        group._close(f"it could not start: {error}")
        raise
    return group


class Near:
    """Who shares memory with whom; the same on all ranks.

    Attributes:
        fetches: all can read the memory of those they share some with, wherever it is.
        trouble: why some share none although they should, for one warning; empty for no trouble.
    """

    def __init__(
        self, met: NDArray[np.uint8], errors: NDArray[np.uint8], machines: NDArray[np.uint8]
    ) -> None:
        # A rank has met those below it; what one has not met, none counts on.
        self.fetches = bool((met.diagonal() == FETCHES).all())
        met = np.minimum(met, 1)
        self._met = np.tril(met, -1) | np.tril(met, -1).T
        has_memory = met.diagonal() == 1
        one_machine = (machines[:, None] == machines).all(axis=2)
        lower, higher = np.triu_indices(len(met), 1)
        cut = has_memory[lower] & has_memory[higher] & one_machine[lower, higher]
        cut &= self._met[lower, higher] == 0
        apart = list(zip(lower[cut].tolist(), higher[cut].tolist(), strict=True))
        without = np.flatnonzero(errors).tolist()
        reasons = [_no_memory_on(without, int(errors[without[0]]))] if without else []
        reasons += [_no_memory_between(apart)] if apart else []
        self.trouble = "; ".join(reasons)

    def of(self, rank: int) -> frozenset[int]:
        return frozenset(np.flatnonzero(self._met[rank]).tolist())

    @property
    def all_together(self) -> bool:
        return int(self._met.sum()) == self._met.size - len(self._met)


def _meet_in_memory(
    group: Group, engine: _core.Engine, connector: Connector, *, wanted: bool
) -> Near:
    """Exchange outboxes with the ranks of this host; all ranks call this and agree."""
    met = np.zeros(group.size, dtype=np.uint8)
    own, error = _outbox(engine, group.size) if wanted else (None, 0)
    if own is None:
        connector.decline_neighbours()
    else:
        found = connector.meet_neighbours(
            own, engine.attach_outbox, _core.link_segment, group._runner.check
        )
        met[list(found)] = 1
        met[group.rank] = FETCHES if engine.can_fetch() else 1
    everyone = group.allgather(np.concatenate([met, np.array([error], dtype=np.uint8), _machine()]))
    return Near(everyone[:, : group.size], everyone[:, group.size], everyone[:, group.size + 1 :])


def _outbox(engine: _core.Engine, ranks: int) -> tuple[tuple[int, int] | None, int]:
    """The descriptors that neighbours get, or none and the error number."""
    try:
        return (engine.share_memory(SLOT_BYTES, room_bytes(ranks)), engine.event_fd), 0
    except OSError as error:
        return None, min(error.errno or errno.ENOMEM, 255)


def _machine() -> NDArray[np.uint8]:
    """Equal on two ranks if they run on one kernel, whatever their host names."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = os.uname().nodename.encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype=np.uint8)


def _no_memory_on(ranks: list[int], error: int) -> str:
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return f"{who} no memory to share ({os.strerror(error)}); TCP is used, which is slower"


def _no_memory_between(apart: list[tuple[int, int]]) -> str:
    (one, other), more = apart[0], len(apart) - 1
    others = f" (and {more} more pair{'s' * (more > 1)})" if more else ""
    return (
        f"ranks {one} and {other}{others} run on one machine but share no memory, most often"
        " because they are in different network namespaces or containers (the log at level INFO has"
        " the reason); TCP is used between them, which is slower"
    )


def _on_loopback(membership: Membership) -> frozenset[int]:
    """The ranks that can be reached within their host only."""
    return frozenset(
        member.rank
        for member in membership.members
        if all(is_loopback(address) for address, _ in member.addresses)
    )


class MemberWiring(Links):
    """Links through a connector; each peer's control link goes to the health thread.

    Attributes:
        near: as in Links. Until it is set, to find out, ranks talk over TCP; the plans and links of
            that time are let go.
        parts: what groups that are made of the world have; set when it has started.
    """

    def __init__(
        self,
        engine: _core.Engine,
        health: _core.Health,
        connector: Connector,
        place: str,
        invitation: Invitation,
        size: int,
    ) -> None:
        super().__init__(connector, lambda: engine, range(size))
        self.place = place
        self.fetches = False
        self._invitation = invitation
        self.parts: Parts | None = None
        connector.on_control(health.add)

    def share(self, timeout: float, check: Callable[[], None]) -> None:
        return None  # done when the world started

    def stores(self, group: Group) -> StoreLinks:
        return gather(group, self._invitation)

    def part(self, identity: Identity, rank: int) -> Part:
        assert self.parts is not None
        return part_of(self.parts, identity, rank)

    def close(self) -> None:
        self._connector.close()
        if self.parts is not None:
            self.parts.close()
