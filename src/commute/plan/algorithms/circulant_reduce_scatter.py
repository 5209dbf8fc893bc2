# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter on a circulant graph: ceil(log2 n) steps for every n, as few bytes as the ring.

The first half of circulant.py, input untouched: IN has one block per rank, block (r + i) mod n is
number i of rank r, and its partial sums live in block i of SCRATCH, but for the last sum, which is
the result. Each block is a message, as only the messages of different steps wait for each other.

A receive waits until the message before it has left. So sums that are sent in the next tile are
never written while those of this tile are still leaving; number 0, which is received first, is
never sent.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Rank, Step, write
from .circulant import halvings


def circulant_reduce_scatter(ranks: int) -> Plan:
    collective, scratch = Collective.REDUCE_SCATTER, ranks // 2 if ranks > 2 else 0
    return write(collective, "circulant", ranks, each_rank, scratch=scratch)


def each_rank(me: Rank) -> None:
    n = me.size
    outgoing, incoming = me.lane(), me.lane()
    if n == 1:
        outgoing.copy(IN[0], into=OUT[0])
        return
    sums = [IN[(me.rank + number) % n] for number in range(n)]
    complete: Step | None = None
    left: Step | None = None
    for s, h in halvings(n):
        arrived = complete
        for number in range(s - h):
            leaving = outgoing.send(sums[h + number], to=(me.rank + h) % n, after=arrived)
            into = OUT[0] if s == 2 else SCRATCH[number]
            source = (me.rank - h) % n
            complete = incoming.recv_reduce(sums[number], into=into, source=source, after=left)
            sums[number], left = into, leaving
