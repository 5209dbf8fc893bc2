# SPDX-License-Identifier: Apache-2.0
"""Broadcast by scattering and gathering: no rank sends much more than two arrays, at any n.

The array is cut into n chunks. They go down a binomial tree, to each rank those of its subtree, so
that each has its own chunk after ceil(log2 n) steps; then all gather what is missing on the
circulant graph of circulant.py, in as many steps. Only the root, which has everything, gets
nothing. (Barnett et al., 1994, with a ring.)
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write
from .binomial import children, parent, reach
from .circulant import halvings, runs


def scatter_allgather(ranks: int, root: int) -> Plan:
    name = "scatter-allgather"
    return write(Collective.BROADCAST, name, ranks, each_rank, chunks=ranks, root=root)


def each_rank(me: Rank) -> None:
    n, place = me.size, (me.rank - me.root) % me.size
    incoming, outgoing = me.lane(), me.lane()

    def rank_at(other: int) -> int:
        return (other + me.root) % n

    arrived = None
    if place > 0:
        chunks = OUT[place : place + reach(place, n)]
        arrived = incoming.recv(chunks, source=rank_at(parent(place)))
    for child in reversed(children(place, n)):
        chunks = OUT[child : child + reach(child, n)]
        outgoing.send(chunks, to=rank_at(child), after=arrived)

    for s, h in reversed(halvings(n)):
        if (place - h) % n != 0:
            for run in runs(place, s - h, n):
                outgoing.send(run, to=rank_at(place - h), after=arrived)
        if place != 0:
            for run in runs(place + h, s - h, n):
                arrived = incoming.recv(run, source=rank_at(place + h))
