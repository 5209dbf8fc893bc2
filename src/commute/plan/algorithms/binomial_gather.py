# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter on a binomial tree: ceil(log2 n) steps, and as many messages at the root.

Gather: a rank collects the blocks of its subtree in SCRATCH, where they lie side by side in the
order of their places, and sends them to its parent as one message. Scatter is the way back. Blocks
travel and are copied up to log2 n times: for short blocks and many ranks.

All in one lane, as there is nothing to overlap in a short array.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Rank, write
from .binomial import children, parent, reach


def binomial_gather(ranks: int, root: int) -> Plan:
    collective = Collective.GATHER
    return write(collective, "binomial", ranks, gather_rank, scratch=ranks, root=root)


def binomial_scatter(ranks: int, root: int) -> Plan:
    collective = Collective.SCATTER
    return write(collective, "binomial", ranks, scatter_rank, scratch=ranks, root=root)


def gather_rank(me: Rank) -> None:
    lane = me.lane()
    n, place = me.size, (me.rank - me.root) % me.size
    above = (parent(place) + me.root) % n
    subtree = reach(place, n)
    if place > 0 and subtree == 1:
        lane.send(IN[0], to=above)
        return
    for child in children(place, n):
        at = child - place
        blocks = SCRATCH[at : at + reach(child, n)]
        lane.recv(blocks, source=(child + me.root) % n)
    if place > 0:
        lane.copy(IN[0], into=SCRATCH[0])
        lane.send(SCRATCH[0:subtree], to=above)
        return
    lane.copy(IN[0], into=OUT[me.rank])
    for other in range(1, n):
        lane.copy(SCRATCH[other], into=OUT[(other + me.root) % n])


def scatter_rank(me: Rank) -> None:
    lane = me.lane()
    n, place = me.size, (me.rank - me.root) % me.size
    above = (parent(place) + me.root) % n
    subtree = reach(place, n)
    if place > 0 and subtree == 1:
        lane.recv(OUT[0], source=above)
        return
    if place > 0:
        lane.recv(SCRATCH[0:subtree], source=above)
    else:
        for other in range(1, n):
            lane.copy(IN[(other + me.root) % n], into=SCRATCH[other])
    for child in reversed(children(place, n)):
        at = child - place
        lane.send(SCRATCH[at : at + reach(child, n)], to=(child + me.root) % n)
    lane.copy(SCRATCH[0] if place > 0 else IN[me.rank], into=OUT[0])
