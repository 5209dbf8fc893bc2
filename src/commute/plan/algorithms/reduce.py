# SPDX-License-Identifier: Apache-2.0
"""Reduce on a binomial tree: the way of the broadcast, backwards; ceil(log2 n) steps.

The root adds to its own array. All others must leave theirs alone, so an inner rank keeps its
partial sum in SCRATCH; it streams on to the parent while the last child is being added.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Rank, write
from .binomial import children, parent


def reduce(ranks: int, root: int) -> Plan:
    return write(Collective.REDUCE, "binomial", ranks, each_rank, scratch=1, root=root)


def each_rank(me: Rank) -> None:
    place = (me.rank - me.root) % me.size
    above = (parent(place) + me.root) % me.size
    below = [(child + me.root) % me.size for child in children(place, me.size)]
    up = me.lane()
    if place == 0:
        for child in below:
            up.recv_reduce(OUT[0], source=child)
    elif not below:
        up.send(IN[0], to=above)
    else:
        so_far = IN[0]
        for child in below[:-1]:
            up.recv_reduce(so_far, into=SCRATCH[0], source=child)
            so_far = SCRATCH[0]
        up.recv_reduce_send(so_far, into=SCRATCH[0], source=below[-1], to=above)
