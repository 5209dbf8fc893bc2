# SPDX-License-Identifier: Apache-2.0
"""Allreduce on a binomial tree: 2 log2 n levels, up and then down.

Every inner rank adds what its children send to its own array; as the sum with the last child, the
one with the largest subtree, is being formed, it streams on to the parent. The root then has the
complete sum, and it goes down the same tree, to the largest subtree first.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write
from .binomial import children, parent


def tree(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "tree", ranks, each_rank)


def each_rank(me: Rank) -> None:
    above, below = parent(me.rank), children(me.rank, me.size)
    up, incoming, down = me.lane(), me.lane(), me.lane()
    if me.rank == 0:
        complete = None
        for child in below:
            complete = up.recv_reduce(OUT[0], source=child)
    else:
        for child in below[:-1]:
            up.recv_reduce(OUT[0], source=child)
        if below:
            up.recv_reduce_send(OUT[0], source=below[-1], to=above)
        else:
            up.send(OUT[0], to=above)
        complete = incoming.recv(OUT[0], source=above)
    for child in reversed(below):
        down.send(OUT[0], to=child, after=complete)
