# SPDX-License-Identifier: Apache-2.0
"""Reductions along a chain, in rank order: rank 0 sends to 1, 1 adds and sends on to 2, ...

What arrives is the sum of all ranks before, and comes first: ((x0 + x1) + x2) + ..., which is what
`deterministic=True` promises, whoever the root is. Sums stream on while they are formed, and tiles
follow each other, so a long array takes little longer than over one link: each link carries it
once, where in gather-to-root one rank takes in n-1 of them. A short one takes n-1 steps.

The last rank has the result. An allreduce hands it back down the same chain; a reduce sends it to
the root; a reduce_scatter sends each block to its rank.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Lane, Rank, Run, Step, write

NAME = "chain"


def chain_allreduce(ranks: int) -> Plan:
    def each_rank(me: Rank) -> None:
        last = me.size - 1
        up, incoming, down = me.lane(), me.lane(), me.lane()
        if me.size == 1:
            return
        done = pass_up(me, up, OUT[0], OUT[0])
        if me.rank < last:
            done = incoming.recv(OUT[0], source=me.rank + 1, after=done)
        if me.rank > 0:
            down.send(OUT[0], to=me.rank - 1, after=done)

    return write(Collective.ALLREDUCE, NAME, ranks, each_rank)


def chain_reduce(ranks: int, root: int) -> Plan:
    def each_rank(me: Rank) -> None:
        last = me.size - 1
        up, incoming = me.lane(), me.lane()
        if me.size == 1:
            return
        # The root's array is its contribution until it has gone up, and the result after that.
        mine = OUT[0] if me.rank == root else IN[0]
        if me.rank == root == last:
            pass_up(me, up, mine, OUT[0])
            return
        gone = pass_up(me, up, mine, SCRATCH[0], then=root)
        if me.rank == root:
            incoming.recv(OUT[0], source=last, after=gone)

    return write(Collective.REDUCE, NAME, ranks, each_rank, scratch=1, root=root)


def chain_reduce_scatter(ranks: int) -> Plan:
    def each_rank(me: Rank) -> None:
        last = me.size - 1
        up, incoming = me.lane(), me.lane()
        if me.size == 1:
            up.copy(IN[0], into=OUT[0])
            return
        for block in range(last):
            pass_up(me, up, IN[block], SCRATCH[0], then=block)
        pass_up(me, up, IN[last], OUT[0] if me.rank == last else SCRATCH[0])
        if me.rank < last:
            incoming.recv(OUT[0], source=last)

    return write(Collective.REDUCE_SCATTER, NAME, ranks, each_rank, scratch=1)


def pass_up(me: Rank, lane: Lane, mine: Run, into: Run, then: int | None = None) -> Step:
    """Adds `mine` to what comes from the rank before and passes it on; the last rank to `then`."""
    before = me.rank - 1
    to = me.rank + 1 if me.rank < me.size - 1 else then
    if me.rank == 0:
        return lane.send(mine, to=1)
    if to is None:
        return lane.recv_reduce(mine, source=before, into=into, first=True)
    return lane.recv_reduce_send(mine, source=before, to=to, into=into, first=True)
