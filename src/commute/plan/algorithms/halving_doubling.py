# SPDX-License-Identifier: Apache-2.0
"""Allreduce by recursive halving and doubling: 2 log2 n steps, and as few bytes as the ring.

With n = 2^k ranks the array is cut into n chunks. Halving: partners at distance n/2, n/4, ..., 1
exchange halves of what they are responsible for, each adds the half it keeps, and ends up with one
complete chunk, that of its own number. Doubling: the same partners in reverse order exchange all
they have complete. (Rabenseifner, 2004.)

With any other number of ranks, those beyond the largest power of two first give their arrays to a
partner below it, and get the result from there at the end.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, Rank, write


def halving_doubling(ranks: int) -> Plan:
    name = "halving-doubling"
    return write(Collective.ALLREDUCE, name, ranks, each_rank, chunks=_core(ranks))


def _core(ranks: int) -> int:
    """The largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def each_rank(me: Rank) -> None:
    core = _core(me.size)
    everything = OUT[0:core]
    outgoing, incoming = me.lane(), me.lane()
    if me.rank >= core:
        outgoing.send(everything, to=me.rank - core)
        incoming.recv(everything, source=me.rank - core)
        return

    arrived = None
    extra = me.rank + core
    if extra < me.size:
        arrived = incoming.recv_reduce(everything, source=extra)

    # Before the step at `distance`, this rank is responsible for 2 * distance chunks from `first`.
    first = 0
    distances = [1 << k for k in range(core.bit_length() - 1)]
    for distance in reversed(distances):
        keep, give = first, first + distance
        if me.rank & distance:
            keep, give = give, keep
        partner = me.rank ^ distance
        outgoing.send(OUT[give : give + distance], to=partner, after=arrived)
        arrived = incoming.recv_reduce(OUT[keep : keep + distance], source=partner)
        first = keep
    for distance in distances:
        partner, theirs = me.rank ^ distance, first ^ distance
        outgoing.send(OUT[first : first + distance], to=partner, after=arrived)
        arrived = incoming.recv(OUT[theirs : theirs + distance], source=partner)
        first = min(first, theirs)

    if extra < me.size:
        outgoing.send(everything, to=extra, after=arrived)
