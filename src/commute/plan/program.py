# SPDX-License-Identifier: Apache-2.0
"""How plans are written: as what one rank does.

An algorithm is a function of `me`, a rank; `write` calls it for every rank. Instructions are added
to lanes, in order, and each call returns a `Step`, which a later instruction of another lane can
name with `after=`:

    def each_rank(me: Rank) -> None:
        out, into = me.lane(), me.lane()
        arrived = into.recv_reduce(OUT[0], source=me.rank - 1)
        out.send(OUT[0], to=me.rank + 1, after=arrived)

`OUT[3]` is a chunk, `OUT[2:6]` a run of four. Sends and receives belong in different lanes: a
send may last until its receiver takes it, and a lane that sends cannot receive meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .instructions import (
    INSTRUCTION,
    NO_LANE,
    NO_PEER,
    Collective,
    Flag,
    Op,
    Program,
    Space,
)
from .plan import Plan, user_blocks


class Run(NamedTuple):
    """Consecutive chunks of one space."""

    space: Space
    first: int
    chunks: int


@dataclass(frozen=True)
class Memory:
    """A space that can be indexed: by a chunk, or by a slice of chunks."""

    space: Space

    def __getitem__(self, index: int | slice) -> Run:
        if isinstance(index, slice):
            return Run(self.space, index.start, index.stop - index.start)
        return Run(self.space, index, 1)


IN, OUT = Memory(Space.IN), Memory(Space.OUT)
SCRATCH, OUTBOX = Memory(Space.SCRATCH), Memory(Space.OUTBOX)
_NOTHING = Run(Space.NONE, 0, 0)


class Step(NamedTuple):
    """A place in a lane, to be named by `after=`."""

    lane: Lane
    number: int


class _Draft(NamedTuple):
    op: Op
    after: Step | None
    peer: int
    peer2: int
    src: Run
    dst: Run
    flags: int
    arg: int


class Lane:
    """Instructions that run one after the other."""

    def __init__(self) -> None:
        self.drafts: list[_Draft] = []

    def send(self, chunk: Run, *, to: int, after: Step | None = None) -> Step:
        return self._add(Op.SEND, after, peer=to, src=chunk)

    def recv(self, chunk: Run, *, source: int, after: Step | None = None) -> Step:
        return self._add(Op.RECV, after, peer=source, dst=chunk)

    def recv_reduce(
        self,
        chunk: Run,
        *,
        source: int,
        into: Run | None = None,
        first: bool = False,
        after: Step | None = None,
    ) -> Step:
        """Adds what arrives to `chunk`, and leaves the sum there, or in `into`.

        `first`: what arrives is the left operand, and `chunk` the right one.
        """
        op, dst, flags = Op.RECV_REDUCE, into or chunk, Flag.FIRST if first else 0
        return self._add(op, after, peer=source, src=chunk, dst=dst, flags=flags)

    def recv_reduce_send(
        self,
        chunk: Run,
        *,
        source: int,
        to: int,
        into: Run | None = None,
        first: bool = False,
        after: Step | None = None,
    ) -> Step:
        """As recv_reduce; the sum streams on to rank `to` while it is being formed."""
        op, dst, flags = Op.RECV_REDUCE_SEND, into or chunk, Flag.FIRST if first else 0
        return self._add(op, after, peer=source, peer2=to, src=chunk, dst=dst, flags=flags)

    def copy(
        self, chunk: Run, *, into: Run, streaming: bool = False, after: Step | None = None
    ) -> Step:
        flags = Flag.STREAMING if streaming else 0
        return self._add(Op.COPY, after, src=chunk, dst=into, flags=flags)

    def read(
        self,
        chunk: Run,
        *,
        of: int,
        into: Run,
        streaming: bool = False,
        after: Step | None = None,
    ) -> Step:
        """Copies a chunk of the outbox of rank `of`.

        `streaming`: past the caches if the array is large, for chunks that were not read before.
        """
        flags = Flag.STREAMING if streaming else 0
        return self._add(Op.COPY, after, peer=of, src=chunk, dst=into, flags=flags)

    def reduce_many(
        self, chunk: Run, theirs: Run, *, into: Run, back: bool = False, after: Step | None = None
    ) -> Step:
        """Adds up, in rank order, the own `chunk` and `theirs` of all other ranks' outboxes.

        With `back` the sum also replaces what was added up, in all those outboxes.
        """
        flags = Flag.BACK if back else 0
        op, arg = Op.REDUCE_MANY, theirs.first
        return self._add(op, after, src=chunk, dst=into, flags=flags, arg=arg)

    def put(
        self, chunk: Run, *, into: Run, keep: Run | None = None, after: Step | None = None
    ) -> Step:
        """Puts a chunk into the outbox, and in the same pass into `keep`, past the caches."""
        if keep is None:
            return self._add(Op.PUT, after, src=chunk, dst=into)
        flags = Flag.KEEP | Flag.STREAMING
        return self._add(Op.PUT, after, src=chunk, dst=into, flags=flags, arg=keep.first)

    def signal(self, counter: int, *, after: Step | None = None) -> Step:
        return self._add(Op.SIGNAL, after, arg=counter)

    def wait(
        self, counter: int, *, of: int, number: int = 1, lag: int = 0, after: Step | None = None
    ) -> Step:
        """Waits for the `number`-th signal that rank `of` gives in the tile `lag` tiles ago."""
        target = Run(Space.NONE, number, 0)
        return self._add(Op.WAIT, after, peer=of, src=target, arg=lag << 16 | counter)

    def _add(
        self,
        op: Op,
        after: Step | None,
        *,
        peer: int = NO_PEER,
        peer2: int = NO_PEER,
        src: Run = _NOTHING,
        dst: Run = _NOTHING,
        flags: int = 0,
        arg: int = 0,
    ) -> Step:
        self.drafts.append(_Draft(op, after, peer, peer2, src, dst, flags, arg))
        return Step(self, len(self.drafts) - 1)


class Rank:
    """One rank, as seen by the algorithm that says what it does."""

    def __init__(self, rank: int, size: int, root: int) -> None:
        self.rank = rank
        self.size = size
        self.root = root
        self._lanes: list[Lane] = []

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def lane(self) -> Lane:
        self._lanes.append(Lane())
        return self._lanes[-1]

    def program(self) -> Program:
        # Lanes without instructions do not exist for the executor, so numbers are given here.
        lanes = [lane for lane in self._lanes if lane.drafts]
        number = {lane: index for index, lane in enumerate(lanes)}
        rows = [_row(draft, number[lane], number) for lane in lanes for draft in lane.drafts]
        return np.array(rows, dtype=INSTRUCTION)


def _row(draft: _Draft, lane: int, number: dict[Lane, int]) -> tuple[int, ...]:
    op, after, peer, peer2, src, dst, flags, arg = draft
    dep_lane, dep_step = (number[after.lane], after.number) if after else (NO_LANE, 0)
    if src.chunks and dst.chunks and src.chunks != dst.chunks:
        raise ValueError(f"{op.name.lower()} from {src.chunks} chunks into {dst.chunks}")
    return (
        *(op, lane, flags, dep_lane, dep_step, peer, peer2),
        *(src.space, dst.space, src.chunks or dst.chunks, src.first, dst.first, arg),
    )


def write(
    collective: Collective,
    algorithm: str,
    ranks: int,
    each_rank: Callable[[Rank], None],
    *,
    chunks: int = 1,
    scratch: int = 0,
    outbox: int = 0,
    root: int = 0,
    direct: bool = False,
) -> Plan:
    """The plan in which every rank does what `each_rank` says.

    Args:
        scratch: blocks of SCRATCH.
        outbox: blocks of OUTBOX.
        direct: OUTBOX is OUT itself.
    """
    programs = []
    for rank in range(ranks):
        me = Rank(rank, ranks, root)
        each_rank(me)
        programs.append(me.program())
    given = user_blocks(collective, ranks)
    blocks = (*given, scratch, given[1] if direct else outbox)
    made = tuple(programs)
    return Plan(collective, algorithm, ranks, root, chunks, blocks, made, direct=direct)
