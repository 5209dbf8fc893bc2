# SPDX-License-Identifier: Apache-2.0
"""Allreduce on a ring: every link carries the least that is possible, 2 (n-1)/n of the array.

The n ranks form a ring and the array is cut into n chunks. In each of n-1 steps every rank sends
one chunk to the next rank and adds the chunk that comes from the rank before to its own. A chunk
that starts at rank c has then collected all contributions and rests, complete, at rank c-1. In
another n-1 steps the complete chunks go round the same ring. What is sent in a step is what
arrived in the step before. (Patarasuk and Yuan, 2009.)

In two waves, so that a link is busy while the other half is being added.
"""

from ..instructions import Collective
from ..plan import Plan, pipelined
from ..program import OUT, Rank, write


def ring(ranks: int) -> Plan:
    return pipelined(write(Collective.ALLREDUCE, "ring", ranks, each_rank, chunks=ranks), waves=2)


def each_rank(me: Rank) -> None:
    n = me.size
    following, preceding = (me.rank + 1) % n, (me.rank - 1) % n
    onwards, incoming = me.lane(), me.lane()
    arrived = None
    for step in range(n - 1):
        onwards.send(OUT[(me.rank - step) % n], to=following, after=arrived)
        arrived = incoming.recv_reduce(OUT[(me.rank - step - 1) % n], source=preceding)
    for step in range(n - 1):
        onwards.send(OUT[(me.rank + 1 - step) % n], to=following, after=arrived)
        arrived = incoming.recv(OUT[(me.rank - step) % n], source=preceding)
