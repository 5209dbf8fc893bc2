# SPDX-License-Identifier: Apache-2.0
"""Who opens links: the seam between a group and the network, with a twin for tests.

A group asks for links to the peers of a plan before it first runs it. Between
processes they are dialled or awaited then (_member); between threads they are there from the
beginning. Its first store asks for links to the servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from commute._group import Group
    from commute.store.links import StoreLinks


class Wiring(Protocol):
    """What a group needs of the network."""

    place: str  # for plan.choose

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that collectives can talk to this peer."""

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that send and recv can talk to this peer."""

    def stores(self, group: Group) -> StoreLinks:
        """Start or find the servers of the group's stores; all ranks call this."""

    def close(self) -> None: ...


class ReadyWiring:
    """Links that are there from the beginning: in memory, or a group of one.

    Args:
        stores: makes the links to the servers of the group's stores.
    """

    def __init__(self, place: str, stores: Callable[[Group], StoreLinks]) -> None:
        self.place = place
        self._stores = stores

    def stores(self, group: Group) -> StoreLinks:
        return self._stores(group)

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def close(self) -> None:
        return None
