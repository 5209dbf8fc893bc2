# SPDX-License-Identifier: Apache-2.0
"""A process as a member of a job of several: joining over the network, links over TCP.

Apart from _init because it brings asyncio along, which a world of one and `import commute` need
not pay for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from commute import _core
from commute._cores import usable_cores
from commute._group import Group
from commute._runner import Peer, Runner
from commute._settings import Settings
from commute.cluster.addresses import is_loopback
from commute.cluster.auth import Purpose
from commute.cluster.connector import Connector
from commute.cluster.environment import Place
from commute.cluster.join import Membership, join
from commute.cluster.rendezvous import find_coordinator
from commute.plan.choose import SLOT_BYTES

_log = logging.getLogger("commute")


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
    return _assemble(membership, connector, settings)


def _assemble(membership: Membership, connector: Connector, settings: Settings) -> Group:
    """Engine, health thread and wiring: a group."""
    # The ranks meet in an epoch of their own, so that the first call of the program is operation 1.
    meeting = 2 * membership.epoch
    engine = _core.Engine(membership.rank, membership.size, 0, meeting)
    # With fewer cores than ranks, whoever spins keeps the one it waits for from running.
    engine.may_spin(usable_cores() >= membership.local_size)
    health = _core.watch(engine, membership.rank, settings.peer_timeout)
    health.add(membership.coordinator_fd, -1)
    name = f"commute-{membership.run}-{membership.name}-rank{membership.rank}-{os.getpid()}"
    runner = Runner(
        engine,
        membership.rank,
        [Peer(member.rank, member.host, member.pid) for member in membership.members],
        health=health,
        records=(settings.records, name.replace("/", "_")),
    )
    wiring = TcpWiring(engine, health, connector, "loopback" if _on_one_host(membership) else "tcp")
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
        if _meet_in_memory(group, engine, connector, wanted=settings.shared_memory):
            group._share_memory()
        engine.begin_anew(meeting + 1)
    except BaseException as error:  # another rank died meanwhile, or Ctrl-C
        group._close(f"it could not start: {error}")
        raise
    return group


def _meet_in_memory(
    group: Group, engine: _core.Engine, connector: Connector, *, wanted: bool
) -> bool:
    """Whether all ranks read each other's outboxes from now on; all ranks agree."""
    met = np.zeros(group.size, dtype=np.uint8)
    if wanted:
        try:
            own = (engine.share_memory(SLOT_BYTES), engine.event_fd)
            found = connector.meet_neighbours(own, engine.attach_outbox)
            met[list(found)] = 1
            met[group.rank] = 1
        except OSError as error:
            _log.warning("rank %d shares no memory (%s); TCP is used", group.rank, error)
    # Who met whom, by rank: a rank has met those below it. What one has not met, none counts on.
    everyone = group.allgather(met)
    below = np.tril(np.ones_like(everyone))
    return bool((everyone >= below).all())


def _on_one_host(membership: Membership) -> bool:
    """Whether all links are within a host; all ranks see the same addresses, so all agree."""
    addresses = [address for member in membership.members for address, _ in member.addresses]
    return all(is_loopback(address) for address in addresses)


class TcpWiring:
    """Links through a connector; each peer's control link goes to the health thread."""

    def __init__(
        self, engine: _core.Engine, health: _core.Health, connector: Connector, place: str
    ) -> None:
        self.place = place
        self._engine = engine
        self._connector = connector
        self._lock = threading.Lock()
        connector.on_control(health.add)

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        if not self._engine.has_link(peer):
            self._open(peer, Purpose.COLLECTIVE, timeout, check)

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        if not self._engine.has_pair_link(peer):
            self._open(peer, Purpose.PAIR, timeout, check)

    def _open(self, peer: int, purpose: Purpose, timeout: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout
        collective = purpose is Purpose.COLLECTIVE
        has = self._engine.has_link if collective else self._engine.has_pair_link
        add = self._engine.add_tcp_link if collective else self._engine.add_tcp_pair_link
        with self._lock:
            if has(peer):  # another thread was quicker
                return
            # The control link first: from here on the peer's death is noticed.
            self._connector.connect_control(peer, deadline, check)
            add(peer, self._connector.connect(peer, purpose, deadline, check))

    def close(self) -> None:
        self._connector.close()
