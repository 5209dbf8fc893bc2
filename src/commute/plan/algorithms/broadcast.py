# SPDX-License-Identifier: Apache-2.0
"""Broadcast on a binomial tree: after k steps 2^k ranks have the array; ceil(log2 n) steps.

A rank passes the array on to its largest subtree first, as that has the longest way to go.
Receiving and sending are lanes of their own: the next tile arrives while this one goes on.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write
from .binomial import children, parent


def broadcast(ranks: int, root: int) -> Plan:
    return write(Collective.BROADCAST, "binomial", ranks, each_rank, root=root)


def each_rank(me: Rank) -> None:
    place = (me.rank - me.root) % me.size
    incoming, outgoing = me.lane(), me.lane()
    arrived = None
    if place > 0:
        arrived = incoming.recv(OUT[0], source=(parent(place) + me.root) % me.size)
    for child in reversed(children(place, me.size)):
        outgoing.send(OUT[0], to=(child + me.root) % me.size, after=arrived)
