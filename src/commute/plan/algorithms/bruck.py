# SPDX-License-Identifier: Apache-2.0
"""All-to-all by Bruck's algorithm: ceil(log2 n) steps of one message each.

The block that has i ranks to go is number i. In step k every rank sends all blocks whose number
has bit k, as one message, to the rank 2^k further on; so a block has arrived when all bits of its
number have been walked. Each step moves half of all blocks: (log2 n)/2 times the bytes of
pairwise.py, in few messages, for very short blocks. (Bruck et al., 1997.)

Blocks that leave are packed side by side in SCRATCH; those that arrive stay where they land until
they leave again, or go into the result. A receive waits until its step has been packed, so that
when a tile ends nothing that has landed is still to be packed.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import IN, OUT, SCRATCH, Rank, write


def bruck(ranks: int) -> Plan:
    landing = sum(len(numbers) for numbers in _steps(ranks))
    scratch = ranks // 2 + landing
    return write(Collective.ALLTOALL, "bruck", ranks, each_rank, scratch=scratch)


def _steps(size: int) -> list[list[int]]:
    """For each step the numbers that leave."""
    bits = range((size - 1).bit_length())
    return [[number for number in range(size) if number >> bit & 1] for bit in bits]


def each_rank(me: Rank) -> None:
    n = me.size
    work, incoming = me.lane(), me.lane()
    block = [IN[(me.rank + number) % n] for number in range(n)]
    arrived = packed = None
    landing = n // 2
    for step, numbers in enumerate(_steps(n)):
        for at, number in enumerate(numbers):
            packed = work.copy(block[number], into=SCRATCH[at], after=arrived)
            block[number] = SCRATCH[landing + at]
        work.send(SCRATCH[0 : len(numbers)], to=(me.rank + (1 << step)) % n)
        landed = SCRATCH[landing : landing + len(numbers)]
        arrived = incoming.recv(landed, source=(me.rank - (1 << step)) % n, after=packed)
        landing += len(numbers)
    for number in range(n):
        incoming.copy(block[number], into=OUT[(me.rank - number) % n])
