# SPDX-License-Identifier: Apache-2.0
"""Allreduce on a ring in both directions, whose sums meet in the middle: half the ring's steps.

The array is cut into n chunks, and chunk c is completed by rank c. Contributions to it come to c
from both sides: from the ranks after it, up to half way round, backwards, and from those before it
forwards, each rank adding its own to what passes. So the farthest has ceil((n-1)/2) steps to go
instead of n-1. The complete chunk goes back both ways, the longer way forwards now, so that each
link carries (n-1)/n of the array in each direction, as in bidirectional_ring.py.

When: whenever bidirectional_ring.py would do and steps count; with an even number of ranks one
way is longer than the other by one, and very long arrays are better off there.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write
from .bidirectional_ring import lanes_of_ways


def meeting_ring(ranks: int) -> Plan:
    name = "bidirectional-ring-meeting"
    return write(Collective.ALLREDUCE, name, ranks, each_rank, chunks=ranks)


def each_rank(me: Rank) -> None:
    n = me.size
    following, preceding = (me.rank + 1) % n, (me.rank - 1) % n
    longer, shorter = n // 2, (n - 1) // 2
    lanes = lanes_of_ways(me)
    (onwards, incoming), (back, returning) = lanes[+1], lanes[-1]

    met = arrived = None
    for step in range(shorter):
        onwards.send(OUT[(me.rank + shorter - step) % n], to=following, after=met)
        met = incoming.recv_reduce(OUT[(preceding + shorter - step) % n], source=preceding)
    for step in range(longer):
        back.send(OUT[(me.rank - longer + step) % n], to=preceding, after=arrived)
        # The last of these is the own chunk, to which the sum from the other side comes first.
        before = met if step == longer - 1 else None
        chunk = OUT[(following - longer + step) % n]
        arrived = returning.recv_reduce(chunk, source=following, after=before)

    complete = arrived
    for step in range(longer):
        onwards.send(OUT[(me.rank - step) % n], to=following, after=arrived)
        arrived = incoming.recv(OUT[(preceding - step) % n], source=preceding)
    arrived = complete
    for step in range(shorter):
        back.send(OUT[(me.rank + step) % n], to=preceding, after=arrived)
        arrived = returning.recv(OUT[(following + step) % n], source=following)
