# SPDX-License-Identifier: Apache-2.0
"""A process as a member of a job of several: joining over the network, links over TCP.

Apart from _init because it brings asyncio along, which a world of one and `import commute` need
not pay for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from commute import _core
from commute._group import Group
from commute._runner import Peer, Runner
from commute._settings import Settings
from commute.cluster.addresses import is_loopback
from commute.cluster.auth import Purpose
from commute.cluster.connector import Connector
from commute.cluster.environment import Place
from commute.cluster.join import Membership, join
from commute.cluster.rendezvous import find_coordinator


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
    engine = _core.Engine(membership.rank, membership.size, 0, membership.epoch)
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
    return Group(
        runner,
        TcpWiring(engine, health, connector, "loopback" if _on_one_host(membership) else "tcp"),
        rank=membership.rank,
        size=membership.size,
        local_rank=membership.local_rank,
        local_size=membership.local_size,
        host=membership.host,
        timeout=settings.timeout,
    )


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
