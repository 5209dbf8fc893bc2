# SPDX-License-Identifier: Apache-2.0
"""Barrier by a token that goes round the ring: 2 (n-1) steps, one message on its way at a time.

Rank 0 sends the token when it enters, each other rank when it has it and has entered. At the last
rank it says that all have; from there it goes round once more to tell them. The textbook's first
barrier, and the one with the fewest links.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, SCRATCH, Rank, write


def token_ring(ranks: int) -> Plan:
    return write(Collective.BARRIER, "token-ring", ranks, each_rank, scratch=1)


def each_rank(me: Rank) -> None:
    n, last = me.size, me.size - 1
    following, preceding = (me.rank + 1) % n, (me.rank - 1) % n
    if n == 1:
        return
    lane = me.lane()
    if me.rank > 0:
        lane.recv(SCRATCH[0], source=preceding)
    lane.send(OUT[0], to=following)
    if me.rank < last:
        lane.recv(SCRATCH[0], source=preceding)
        if me.rank < last - 1:
            lane.send(OUT[0], to=following)
