# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between the root and everyone: one step, n-1 messages at the root.

No byte travels twice, and none is copied on the way. The root takes, or sends, one block after the
other, beginning with the rank after it. For blocks of some size, and for few ranks.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, Rank, write


def linear_gather(ranks: int, root: int) -> Plan:
    return write(Collective.GATHER, "linear", ranks, gather_rank, root=root)


def linear_scatter(ranks: int, root: int) -> Plan:
    return write(Collective.SCATTER, "linear", ranks, scatter_rank, root=root)


def gather_rank(me: Rank) -> None:
    if me.rank != me.root:
        me.lane().send(IN[0], to=me.root)
        return
    incoming, own = me.lane(), me.lane()
    own.copy(IN[0], into=OUT[me.rank])
    for peer in me.others[me.rank :] + me.others[: me.rank]:
        incoming.recv(OUT[peer], source=peer)


def scatter_rank(me: Rank) -> None:
    if me.rank != me.root:
        me.lane().recv(OUT[0], source=me.root)
        return
    outgoing, own = me.lane(), me.lane()
    own.copy(IN[me.rank], into=OUT[0])
    for peer in me.others[me.rank :] + me.others[: me.rank]:
        outgoing.send(IN[peer], to=peer)
