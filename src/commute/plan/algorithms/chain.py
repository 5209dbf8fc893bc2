# SPDX-License-Identifier: Apache-2.0
"""Broadcast along a chain: each rank passes on to the next what has arrived, part by part.

The last rank has the first part after n-1 steps, and then one part in each step: long arrays take
as long as it takes to send them once, whatever n. For few ranks, as all wait for n-1 steps.
"""

from ..instructions import Collective
from ..plan import Plan, pipelined
from ..program import OUT, Rank, write

# Parts of a tile, so that arrays below a tile are passed on in parts too.
WAVES = 8


def chain(ranks: int, root: int) -> Plan:
    return pipelined(write(Collective.BROADCAST, "chain", ranks, each_rank, root=root), WAVES)


def each_rank(me: Rank) -> None:
    place = (me.rank - me.root) % me.size
    incoming, onwards = me.lane(), me.lane()
    arrived = None
    if place > 0:
        arrived = incoming.recv(OUT[0], source=(me.rank - 1) % me.size)
    if place < me.size - 1:
        onwards.send(OUT[0], to=(me.rank + 1) % me.size, after=arrived)
