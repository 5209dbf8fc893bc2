# SPDX-License-Identifier: Apache-2.0
"""Allreduce on two binary trees, each with half of the array: up and then down, in a stream.

In the trees of binary_trees.py a rank that passes sums on in one tree is a leaf in the other: it
sends and receives the array twice, as on a ring, but is at most 2 log2 n steps away from everyone.
The array goes through in parts, one on its way up while the one before it comes down. For many
ranks and arrays of middle length. (Sanders, Speck and Träff, 2009; NCCL since 2.4.)

Some links carry sums up in one tree and results down in the other, in the same direction. So lanes
belong to links, and on each link everything that goes up comes first: what goes up never waits for
what comes down, hence nobody can wait for himself.
"""

from collections import defaultdict

from ..instructions import Collective
from ..plan import Plan, pipelined
from ..program import OUT, Lane, Rank, Step, write
from .binary_trees import two_trees

# Parts of a tile in flight together. Each costs a message on every link, but a tree of depth d is
# busy only if there are about d of them.
WAVES = 4


def double_tree(ranks: int) -> Plan:
    plan = write(Collective.ALLREDUCE, "double-tree", ranks, each_rank, chunks=2)
    return pipelined(plan, WAVES)


def each_rank(me: Rank) -> None:
    place = me.rank + 1
    outgoing: defaultdict[int, Lane] = defaultdict(me.lane)
    incoming: defaultdict[int, Lane] = defaultdict(me.lane)
    trees = two_trees(me.size)
    summed: list[Step | None] = [None, None]
    for half, (parent, children) in enumerate(trees):
        for child in children[place]:
            summed[half] = incoming[child].recv_reduce(
                OUT[half], source=child - 1, after=summed[half]
            )
        if above := parent[place]:
            outgoing[above].send(OUT[half], to=above - 1, after=summed[half])
    for half, (parent, children) in enumerate(trees):
        complete = summed[half]
        if above := parent[place]:
            complete = incoming[above].recv(OUT[half], source=above - 1)
        for child in children[place]:
            outgoing[child].send(OUT[half], to=child - 1, after=complete)
