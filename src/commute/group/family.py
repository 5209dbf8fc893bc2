# SPDX-License-Identifier: Apache-2.0
"""The groups of one world in this process: what each is called, and who closes them.

A group is known by its parent, its ranks in the world, and a number: the how-manieth group of these
ranks that was made of this parent. Every member counts for itself. So all agree about which group a
link or a message belongs to without having said a word, as long as each of them makes the groups
of one parent and the same ranks in the same order; those of other ranks do not matter. The id, 64
bits of a hash of the three, is what travels; 0 is the world.

A group costs an object until it is used. From then on the family holds its runner: an operation may
be under way when the program has let go of the group itself.
"""

from __future__ import annotations

import struct
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commute._runner import Peer, Runner
    from commute._wiring import Wiring


@dataclass(frozen=True)
class Identity:
    """What a group is called, the same on all its members.

    Attributes:
        parent: the id of the group it was made of; None of the world, which was made of none.
        ranks: of the world, in the group's order.
        number: how many groups of these ranks were made of this parent before.
    """

    parent: int | None
    ranks: tuple[int, ...]
    number: int = 0

    @cached_property
    def id(self) -> int:
        if self.parent is None:
            return 0
        import hashlib  # it loads OpenSSL, which `import commute` need not wait for

        words = (self.parent, self.number, *self.ranks)
        digest = hashlib.blake2b(struct.pack(f"<{len(words)}Q", *words), digest_size=8)
        return int.from_bytes(digest.digest(), "little")

    @property
    def tag(self) -> int:
        return tag_of(self.id)

    def __str__(self) -> str:
        if self.parent is None:
            return "the world"
        again = f", number {self.number}" if self.number else ""
        return f"the group of ranks {', '.join(map(str, self.ranks)) or 'none'}{again}"


def tag_of(group: int) -> int:
    """What of a group's id goes into the frames of its links, which are nobody else's anyway."""
    return group & 0xFFFF_FFFF


class Family:
    """Gives groups their numbers, and closes them with the world. Any thread.

    Attributes:
        rank: of this process in the world.
        peers: the members of the world, this process among them.
        wiring: of the world.
    """

    def __init__(self, rank: int, peers: tuple[Peer, ...], wiring: Wiring) -> None:
        self.rank = rank
        self.peers = peers
        self.wiring = wiring
        self.world = Identity(None, tuple(range(len(peers))))
        self._lock = threading.Lock()
        self._made: dict[tuple[int, tuple[int, ...]], int] = {}
        self._unused: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._used: set[Runner] = set()

    def name(self, parent: Identity, ranks: tuple[int, ...]) -> Identity:
        """The identity of the next group of these ranks."""
        key = (parent.id, ranks)
        with self._lock:
            number = self._made.get(key, 0)
            self._made[key] = number + 1
        return Identity(parent.id, ranks, number)

    def add(self, runner: Runner) -> None:
        with self._lock:
            self._unused.add(runner)

    def use(self, runner: Runner) -> None:
        """Keep it: it has an engine now."""
        with self._lock:
            self._used.add(runner)

    def remove(self, runner: Runner) -> None:
        with self._lock:
            self._unused.discard(runner)
            self._used.discard(runner)

    def close(self) -> None:
        """Close all groups; the world has said goodbye for them."""
        with self._lock:
            runners = {*self._unused, *self._used}
            self._unused.clear()
            self._used.clear()
        for runner in runners:
            runner.close()
