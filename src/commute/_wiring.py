# SPDX-License-Identifier: Apache-2.0
"""Who opens links: the seam between a group and the network, with a twin for tests.

A group asks for links to the peers of a plan before it first runs it. Between
processes they are dialled or awaited then (_member); between threads they are there from the
beginning. Its first store asks for links to the servers. A group that is made of another has a
wiring of its own, which the world's gives out, and an engine that is made when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from commute._errors import CommuteError

if TYPE_CHECKING:
    from commute import _core
    from commute._runner import Watcher
    from commute.group import Group
    from commute.group.family import Identity
    from commute.store.links import StoreLinks


class Wiring(Protocol):
    """What a group needs of the network."""

    place: str  # for plan.choose
    fetches: bool  # likewise: ranks can read each other's memory, wherever it is

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that collectives can talk to this peer."""

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that send and recv can talk to this peer."""

    def share(self, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that all ranks can read each other's outboxes, where the place is memory."""

    def stores(self, group: Group) -> StoreLinks:
        """Start or find the servers of the group's stores; all ranks call this."""

    def part(self, identity: Identity, rank: int) -> Part:
        """What a group of the world needs; local. rank: this process's in it, or -1."""

    def close(self) -> None: ...


class Part(NamedTuple):
    """What a group that is made of the world needs of the network.

    Attributes:
        open: gives its engine; asked once.
    """

    open: Callable[[], _core.Engine]
    wiring: Wiring
    health: Watcher | None


class ReadyWiring:
    """Links that are there from the beginning: in memory, or a group of one.

    Args:
        stores: makes the links to the servers of the group's stores.
        open_part: gives the engine of a group that is made of the world, for a rank of it.
    """

    def __init__(
        self,
        place: str,
        stores: Callable[[Group], StoreLinks],
        open_part: Callable[[Identity, int], _core.Engine],
    ) -> None:
        self.place = place
        self.fetches = place == "memory"  # all are in this process
        self._stores = stores
        self._open_part = open_part

    def stores(self, group: Group) -> StoreLinks:
        return self._stores(group)

    def part(self, identity: Identity, rank: int) -> Part:
        place = self.place if len(identity.ranks) > 1 else "loopback"
        wiring = ReadyWiring(place, no_stores, self._open_part)
        return Part(lambda: self._open_part(identity, rank), wiring, None)

    def share(self, timeout: float, check: Callable[[], None]) -> None:
        return None

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        return None

    def close(self) -> None:
        return None


def no_stores(group: Group) -> StoreLinks:
    """Stores are the whole world's."""
    raise CommuteError(
        f"a store belongs to the world, and rank {group.rank} asked for one of {group!r}; call"
        " store() on what commute.init() returned"
    )
