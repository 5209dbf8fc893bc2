# SPDX-License-Identifier: Apache-2.0
"""Broadcast on two binary trees below the root, each with half of the array, in a stream.

The other ranks are the places of the trees of binary_trees.py. The root gives one half to the top
of each; a rank that passes its half on to two others in one tree is a leaf in the other. So nobody
sends more than the array, and it takes little longer than sending the array once, at a depth of
log2 n. (Sanders, Speck and Träff, 2009.)
"""

from collections import defaultdict

from ..instructions import Collective
from ..plan import Plan, pipelined
from ..program import OUT, Lane, Rank, write
from .binary_trees import two_trees
from .double_tree import WAVES


def double_tree_broadcast(ranks: int, root: int) -> Plan:
    plan = write(Collective.BROADCAST, "double-tree", ranks, each_rank, chunks=2, root=root)
    return pipelined(plan, WAVES)


def each_rank(me: Rank) -> None:
    place = (me.rank - me.root) % me.size
    outgoing: defaultdict[int, Lane] = defaultdict(me.lane)
    incoming: defaultdict[int, Lane] = defaultdict(me.lane)
    for half, (parent, children) in enumerate(two_trees(me.size - 1)):
        arrived = None
        if place > 0:
            above = (parent[place] + me.root) % me.size
            arrived = incoming[above].recv(OUT[half], source=above)
        for child in children[place]:
            below = (child + me.root) % me.size
            outgoing[below].send(OUT[half], to=below, after=arrived)
