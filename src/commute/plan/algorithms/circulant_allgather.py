# SPDX-License-Identifier: Apache-2.0
"""Allgather on a circulant graph: ceil(log2 n) steps for every n, and as few bytes as the ring.

The second half of circulant.py. Block (r + i) mod n is number i of rank r, which begins with its
number 0. When it has the numbers 0 to h-1 it sends as many as are still missing elsewhere to the
rank h before it, and gets its own next ones from the rank h further on. (Bruck et al., 1997.)

Each block is a message, as only the messages of different steps wait for each other.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, Rank, write
from .circulant import halvings


def circulant_allgather(ranks: int) -> Plan:
    return write(Collective.ALLGATHER, "circulant", ranks, each_rank)


def each_rank(me: Rank) -> None:
    n = me.size
    outgoing, incoming, own = me.lane(), me.lane(), me.lane()
    own.copy(IN[0], into=OUT[me.rank])
    complete = None
    for s, h in reversed(halvings(n)):
        arrived = complete
        for number in range(s - h):
            block = OUT[(me.rank + number) % n] if number else IN[0]
            outgoing.send(block, to=(me.rank - h) % n, after=arrived)
            block = OUT[(me.rank + h + number) % n]
            complete = incoming.recv(block, source=(me.rank + h) % n)
