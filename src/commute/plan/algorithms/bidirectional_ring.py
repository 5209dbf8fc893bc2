# SPDX-License-Identifier: Apache-2.0
"""Allreduce on two rings at once, one in each direction, each with half of the array.

Both are the ring of ring.py, with its 2 (n-1) steps; the chunks of the second ring go round the
other way. So each link carries (n-1)/n of the array in each direction, half of what it carries on
one ring, and all links are busy in all steps.

When: long arrays, where the two neighbours of a rank are reached through different ports. Behind
one port nothing is gained, as that port sends and receives at once already. For half the steps,
see meeting_ring.py.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Lane, Rank, Step, write


def bidirectional_ring(ranks: int) -> Plan:
    name = "bidirectional-ring"
    return write(Collective.ALLREDUCE, name, ranks, each_rank, chunks=2 * ranks)


def each_rank(me: Rank) -> None:
    n = me.size
    arrived: dict[int, Step | None] = {+1: None, -1: None}
    lanes = lanes_of_ways(me)
    for step in range(2 * (n - 1)):
        for way in (+1, -1):
            onwards, incoming = lanes[way]
            half = 0 if way == +1 else n
            leaving = half + (me.rank - way * step) % n
            coming = half + (me.rank - way * (step + 1)) % n
            onwards.send(OUT[leaving], to=(me.rank + way) % n, after=arrived[way])
            receive = incoming.recv_reduce if step < n - 1 else incoming.recv
            arrived[way] = receive(OUT[coming], source=(me.rank - way) % n)


def lanes_of_ways(me: Rank) -> dict[int, tuple[Lane, Lane]]:
    """Two lanes, to send and to receive, for each way round; of 2 ranks both ways are one link."""
    forwards = me.lane(), me.lane()
    return {+1: forwards, -1: forwards if me.size == 2 else (me.lane(), me.lane())}
