# SPDX-License-Identifier: Apache-2.0
"""Allgather on a ring: n-1 steps, each rank passes on the block that arrived in the step before.

OUT has one block per rank. In two waves, so that half a block is on its way while the other half
is being received.
"""

from ..instructions import Collective
from ..plan import Plan, pipelined
from ..program import IN, OUT, Rank, write


def allgather(ranks: int) -> Plan:
    return pipelined(write(Collective.ALLGATHER, "ring", ranks, each_rank), waves=2)


def each_rank(me: Rank) -> None:
    n = me.size
    following, preceding = (me.rank + 1) % n, (me.rank - 1) % n
    onwards, incoming, own = me.lane(), me.lane(), me.lane()
    own.copy(IN[0], into=OUT[me.rank])
    block, arrived = IN[0], None
    for step in range(1, n):
        onwards.send(block, to=following, after=arrived)
        block = OUT[(me.rank - step) % n]
        arrived = incoming.recv(block, source=preceding)
