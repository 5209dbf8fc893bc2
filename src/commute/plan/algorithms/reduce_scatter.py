# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter on a ring: n-1 steps, the first half of the ring allreduce, input untouched.

IN has one block per rank. The sum for rank b starts at rank b+1 and collects one contribution per
step until it arrives at b. As IN must not change, partial sums on their way live in SCRATCH.

Blocks travel in halves, and SCRATCH has two blocks that take turns. A receive waits until the send
before it, in the order of halves, has left, which has three consequences: the four half-blocks of
SCRATCH are never overwritten while they are being sent, not even by the next tile; both halves
are in flight at any time; and as no receive waits for the send of its own half, no ring of ranks
can wait for itself.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Rank, Step, write

HALVES = 2


def reduce_scatter(ranks: int) -> Plan:
    scratch = 2 if ranks > 2 else 0
    name = "ring"
    collective = Collective.REDUCE_SCATTER
    return write(collective, name, ranks, each_rank, chunks=HALVES, scratch=scratch)


def each_rank(me: Rank) -> None:
    n = me.size
    following, preceding = (me.rank + 1) % n, (me.rank - 1) % n
    onwards, incoming = me.lane(), me.lane()
    if n == 1:
        onwards.copy(IN[0:HALVES], into=OUT[0:HALVES])
        return
    sums = [IN[HALVES * preceding + half] for half in range(HALVES)]
    arrived: list[Step | None] = [None] * HALVES
    left: Step | None = None
    for step in range(n - 1):
        block = (me.rank - 2 - step) % n
        for half in range(HALVES):
            leaving = onwards.send(sums[half], to=following, after=arrived[half])
            place = OUT[half] if block == me.rank else SCRATCH[HALVES * (step % 2) + half]
            mine = IN[HALVES * block + half]
            arrived[half] = incoming.recv_reduce(mine, into=place, source=preceding, after=left)
            sums[half], left = place, leaving
