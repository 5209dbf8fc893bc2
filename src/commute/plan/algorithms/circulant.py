# SPDX-License-Identifier: Apache-2.0
"""Allreduce on a circulant graph: 2 ceil(log2 n) steps for every n, and as few bytes as the ring.

The array is cut into n chunks; chunk (r + i) mod n is number i of rank r. Summing: a rank that is
still concerned with its numbers 0 to s-1 sends the upper ones, from h = ceil(s/2) on, to the rank h
further on, for which they are the numbers from 0 on; it adds what comes from the rank h before it,
and goes on with s = h. When s = 1 its number 0 is complete. Spreading: the same steps backwards.
Powers of two need no fold, and no other number does. (Träff, 2023.)

The chunks of a step are consecutive, but may pass the end of the array: then they are two messages.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, Run, write


def circulant(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "circulant", ranks, each_rank, chunks=ranks)


def halvings(size: int) -> list[tuple[int, int]]:
    """The steps of summing: from s numbers to h."""
    steps = []
    while size > 1:
        steps.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return steps


def runs(first: int, count: int, size: int) -> list[Run]:
    """`count` chunks of OUT from `first` on, round the end of the array, in one run or two."""
    first %= size
    before_end = min(count, size - first)
    pieces = [OUT[first : first + before_end]]
    return pieces if before_end == count else [*pieces, OUT[0 : count - before_end]]


def each_rank(me: Rank) -> None:
    n = me.size
    outgoing, incoming = me.lane(), me.lane()
    arrived = None
    for s, h in halvings(n):
        for run in runs(me.rank + h, s - h, n):
            outgoing.send(run, to=(me.rank + h) % n, after=arrived)
        for run in runs(me.rank, s - h, n):
            arrived = incoming.recv_reduce(run, source=(me.rank - h) % n)
    for s, h in reversed(halvings(n)):
        for run in runs(me.rank, s - h, n):
            outgoing.send(run, to=(me.rank - h) % n, after=arrived)
        for run in runs(me.rank + h, s - h, n):
            arrived = incoming.recv(run, source=(me.rank + h) % n)
