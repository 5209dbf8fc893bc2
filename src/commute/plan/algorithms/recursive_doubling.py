# SPDX-License-Identifier: Apache-2.0
"""Allreduce by recursive doubling: log2 n steps, in each of which partners exchange all they have.

With n = 2^k ranks, partners at distance 1, 2, 4, ... exchange their sums and both add them up, so
that a sum covers 2, 4, 8, ... ranks. The sum of the lower ranks is the first operand on both
sides, so both get the same bits. Half the steps of halving and doubling, and log2 n times the
array instead of twice: for short arrays. (Thakur, Rabenseifner and Gropp, 2005.)

With any other number of ranks, those beyond the largest power of two first give their arrays to a
partner below it, and get the result from there at the end.

While a sum is being sent the next one is formed, so sums take turns in two blocks of SCRATCH. A
receive waits until the send before it has left the block that it fills; the copy at the end waits
for the last send, and keeps the next tile out of SCRATCH.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, SCRATCH, Rank, write


def recursive_doubling(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "recursive-doubling", ranks, each_rank, scratch=2)


def each_rank(me: Rank) -> None:
    core = 1 << (me.size.bit_length() - 1)
    outgoing, incoming = me.lane(), me.lane()
    if me.rank >= core:
        outgoing.send(OUT[0], to=me.rank - core)
        incoming.recv(OUT[0], source=me.rank - core)
        return

    arrived = left = None
    extra = me.rank + core
    if extra < me.size:
        arrived = incoming.recv_reduce(OUT[0], source=extra)
    so_far = OUT[0]
    for step in range(core.bit_length() - 1):
        partner, following = me.rank ^ 1 << step, SCRATCH[step % 2]
        leaving = outgoing.send(so_far, to=partner, after=arrived)
        lower = partner < me.rank
        arrived = incoming.recv_reduce(
            so_far, into=following, source=partner, first=lower, after=left
        )
        so_far, left = following, leaving
    if so_far != OUT[0]:
        arrived = incoming.copy(so_far, into=OUT[0], after=left)
    if extra < me.size:
        outgoing.send(OUT[0], to=extra, after=arrived)
