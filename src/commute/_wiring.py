# SPDX-License-Identifier: Apache-2.0
"""Who opens links: the seam between a group and the network, with a twin for tests.

A group asks for links to the peers of a plan before it first runs it. Over TCP the connector dials
or awaits them and the core takes the descriptors; in memory they are there from the beginning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from commute import _core
from commute.cluster.auth import Purpose
from commute.cluster.connector import Connector


class Wiring(Protocol):
    """What a group needs of the network."""

    place: str  # for plan.choose

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that collectives can talk to this peer."""

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that send and recv can talk to this peer."""

    def close(self) -> None: ...


class TcpWiring:
    """Links through a connector; each peer's control link goes to the health thread."""

    place = "tcp"

    def __init__(self, engine: _core.Engine, health: _core.Health, connector: Connector) -> None:
        self._engine = engine
        self._health = health
        self._connector = connector
        self._lock = threading.Lock()
        connector.on_control(health.add)

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        if not self._engine.has_link(peer):
            self._open(peer, Purpose.COLLECTIVE, timeout, check)

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        if not self._engine.has_pair_link(peer):
            self._open(peer, Purpose.PAIR, timeout, check)

    def _open(
        self, peer: int, purpose: Purpose, timeout: float, check: Callable[[], None]
    ) -> None:
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


class ReadyWiring:
    """Links that are there from the beginning: in memory, or a group of one."""

    def __init__(self, place: str) -> None:
        self.place = place

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def close(self) -> None:
        return None
