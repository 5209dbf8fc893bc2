# SPDX-License-Identifier: Apache-2.0
"""Who opens links: the seam between a group and the network, with a twin for tests.

A group asks for links to the peers of a plan before it first runs it. Between
processes they are dialled or awaited then (_member); between threads they are there from the
beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Wiring(Protocol):
    """What a group needs of the network."""

    place: str  # for plan.choose

    def link(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that collectives can talk to this peer."""

    def pair(self, peer: int, timeout: float, check: Callable[[], None]) -> None:
        """Make sure that send and recv can talk to this peer."""

    def close(self) -> None: ...


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
