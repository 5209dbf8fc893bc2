# SPDX-License-Identifier: Apache-2.0
"""Allreduce through rank 0: everyone sends to it, it adds in rank order, and sends the sum back.

Two steps only, so it is quick for small arrays and few ranks; rank 0 carries all the traffic. The
sum is ((x0 + x1) + x2) + ... on every chunk, which is what `deterministic=True` promises.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write


def gather_to_root(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "gather-to-root", ranks, each_rank)


def each_rank(me: Rank) -> None:
    outgoing, incoming = me.lane(), me.lane()
    if me.rank == 0:
        complete = None
        for peer in me.others:
            complete = incoming.recv_reduce(OUT[0], source=peer)
        for peer in me.others:
            outgoing.send(OUT[0], to=peer, after=complete)
    else:
        outgoing.send(OUT[0], to=0)
        incoming.recv(OUT[0], source=0)
