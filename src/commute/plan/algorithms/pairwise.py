# SPDX-License-Identifier: Apache-2.0
"""All-to-all in pairs: in step k every rank sends to the one k further on; n-1 steps.

Each block travels once, straight from the sender's array into the receiver's, and at any time each
rank sends to one and receives from one. No step waits for another.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, Rank, write


def pairwise(ranks: int) -> Plan:
    return write(Collective.ALLTOALL, "pairwise", ranks, each_rank)


def each_rank(me: Rank) -> None:
    n = me.size
    outgoing, incoming, own = me.lane(), me.lane(), me.lane()
    own.copy(IN[me.rank], into=OUT[me.rank])
    for step in range(1, n):
        to, source = (me.rank + step) % n, (me.rank - step) % n
        outgoing.send(IN[to], to=to)
        incoming.recv(OUT[source], source=source)
