# SPDX-License-Identifier: Apache-2.0
"""Barrier by dissemination: in step k every rank tells the one 2^k further on; ceil(log2 n) steps.

A rank tells what it has heard of so far: itself, then 2 ranks, 4, 8, ..., and in the end all.
The messages are chunks of no elements. (Hensgen, Finkel and Manber, 1988.)
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, SCRATCH, Rank, write


def barrier(ranks: int) -> Plan:
    return write(Collective.BARRIER, "dissemination", ranks, each_rank, scratch=1)


def each_rank(me: Rank) -> None:
    tell, hear = me.lane(), me.lane()
    heard = None
    distance = 1
    while distance < me.size:
        tell.send(OUT[0], to=(me.rank + distance) % me.size, after=heard)
        heard = hear.recv(SCRATCH[0], source=(me.rank - distance) % me.size)
        distance *= 2
