# SPDX-License-Identifier: Apache-2.0
"""A group as an ordered set of ranks: making groups of it, and comparing them.

All of it is local and costs microseconds, but for `split`, which has to ask. A group that is made
here has neither engine nor links. It gets them when it is first used (its runner asks its wiring),
on each member by itself. Whoever is not in a group may hold it all the same; using it raises.

Ranks in arguments are those of the group that is asked; `ranks`, `in`, and the three operators go
by the ranks of the world, so groups of different parents can be combined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex, overload

import numpy as np

from commute import _core
from commute._errors import CommuteError
from commute._runner import Peer, Runner
from commute._wiring import Wiring
from commute.group.calls import Calls
from commute.group.family import Family, Identity


class Ranks(Calls):
    """An ordered set of ranks of a world."""

    def __init__(
        self,
        runner: Runner,
        wiring: Wiring,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        host: str,
        timeout: float,
        family: Family | None,
        identity: Identity | None,
    ) -> None:
        super().__init__(runner, wiring, rank=rank, size=size, timeout=timeout)
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = host
        self._family = family or Family(rank, runner.peers, wiring)
        self._identity = identity or self._family.world

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, by their ranks in the world, in the order of this group."""
        return self._identity.ranks

    def group(self, ranks: Iterable[SupportsIndex]) -> Self:
        """A group of some of these ranks, in this order; local, and next to nothing until used.

        Its members agree about which group it is because each of them makes it: groups of the same
        ranks in the same order. Others may make it too, or not; using it raises for them. It is
        closed with the world, or earlier by `close`.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     team = world.group([0])
        ...     team.rank, team.size, float(team.allreduce(numpy.ones(1))[0])
        (0, 1, 1.0)

        Args:
            ranks: of this group, each at most once.
        """
        chosen = [operator.index(rank) for rank in ranks]
        for rank in chosen:
            self._check_rank(rank, "ranks", "group")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"group expected each rank once, got {chosen}")
        return self._make(self._identity, tuple(self.ranks[rank] for rank in chosen))

    @overload
    def split(
        self, color: SupportsIndex, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Self: ...
    @overload
    def split(
        self, color: None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> None: ...
    @overload
    def split(
        self, color: SupportsIndex | None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Self | None: ...
    def split(
        self, color: SupportsIndex | None, key: SupportsIndex = 0, *, timeout: float | None = None
    ) -> Self | None:
        """The group of all ranks that give the same color; all ranks call this.

        >>> import commute
        >>> with commute.init() as world:
        ...     world.split(world.rank % 2).ranks
        (0,)

        Args:
            color: any integer of 64 bits; None takes no part and gets None.
            key: the order in the new group; among equals that of the ranks here.
        """
        takes_part = color is not None
        colored = operator.index(color) if color is not None else 0
        try:
            mine = np.array([takes_part, colored, operator.index(key)], dtype=np.int64)
        except OverflowError:
            raise ValueError(
                f"split expected color= and key= of 64 bits, got {color!r} and {key!r}"
            ) from None
        everyone = self._run(self._allgather(mine, None), None, False, timeout).tolist()
        if not takes_part:
            return None
        same = [
            (theirs, rank)
            for rank, (there, shade, theirs) in enumerate(everyone)
            if there and shade == colored
        ]
        return self._make(self._identity, tuple(self.ranks[rank] for _, rank in sorted(same)))

    def __or__(self, other: Ranks) -> Self:
        """The ranks of this group, then those that only the other one has."""
        return self._combine(other, lambda ours, theirs: (*ours, *_without(theirs, ours)))

    def __and__(self, other: Ranks) -> Self:
        """The ranks that both groups have, in the order of this one."""
        return self._combine(
            other, lambda ours, theirs: tuple(rank for rank in ours if rank in set(theirs))
        )

    def __sub__(self, other: Ranks) -> Self:
        """The ranks of this group that the other one has not."""
        return self._combine(other, _without)

    def __contains__(self, rank: object) -> bool:
        """Whether this rank of the world is a member."""
        return rank in self.ranks

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        """Whether both have the same ranks, in the same order, of one world.

        They may be two groups all the same: each has links and an order of calls of its own.
        """
        if not isinstance(other, Ranks):
            return NotImplemented
        return self._family is other._family and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash((id(self._family), self.ranks))

    def __repr__(self) -> str:
        state = ", closed" if self._runner.closed else ""
        if self._identity.parent is None:
            return f"<Group rank {self.rank} of {self.size} on {self.host}{state}>"
        place = f"rank {self.rank}" if self.rank >= 0 else "no rank"
        members = ", ".join(map(str, self.ranks))
        return (
            f"<Group {place} of {self.size} on {self.host}, ranks [{members}] of the world{state}>"
        )

    def _combine(
        self,
        other: Ranks,
        choose: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]],
    ) -> Self:
        if not isinstance(other, Ranks):
            raise TypeError(f"expected another group, got {other!r}; make one with group()")
        if other._family is not self._family:
            raise ValueError(f"expected two groups of one world, got {self!r} and {other!r}")
        return self._make(self._family.world, choose(self.ranks, other.ranks))

    def _make(self, parent: Identity, ranks: tuple[int, ...]) -> Self:
        self._runner.check_open()
        family = self._family
        identity = family.name(parent, ranks)
        rank = ranks.index(family.rank) if family.rank in ranks else -1
        part = family.wiring.part(identity, rank)
        peers = [
            Peer(place, family.peers[member].host, family.peers[member].pid)
            for place, member in enumerate(ranks)
        ]

        def open_engine() -> _core.Engine:
            if rank < 0:
                raise _not_a_member(family.rank, identity)
            engine = part.open()
            family.use(runner)
            return engine

        runner = self._runner.beside(open_engine, rank, peers, part.health, str(identity))
        family.add(runner)
        near = [peer.rank for peer in peers if peer.host == self.host]
        return type(self)(
            runner,
            part.wiring,
            rank=rank,
            size=len(ranks),
            local_rank=near.index(rank) if rank >= 0 else -1,
            local_size=len(near),
            host=self.host,
            timeout=self.timeout,
            family=family,
            identity=identity,
        )


def _not_a_member(rank: int, identity: Identity) -> CommuteError:
    return CommuteError(
        f"rank {rank} is not in {identity}, which only its members can use; test `world.rank in"
        " group` first"
    )


def _without(ranks: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    unwanted = set(others)
    return tuple(rank for rank in ranks if rank not in unwanted)
