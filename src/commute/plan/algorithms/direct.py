# SPDX-License-Identifier: Apache-2.0
"""In arrays that all ranks reach (`world.empty`): nothing is copied that is not the result.

OUTBOX is OUT itself here. Everyone says that its array is ready (READY). In an allreduce rank r
then adds up chunk r of all arrays, in rank order, and stores the sum into all of them; in a
broadcast everyone copies from the root's. Who is done says so (DONE), and a rank has finished when
nobody touches its array any more.

16 MB between 2 ranks take 0.65 ms, where two shots through the outboxes take 1.65.
"""

from ..instructions import Collective
from ..plan import Plan
from ..program import OUT, OUTBOX, Rank, write

READY, DONE = 0, 1


def direct_allreduce(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "direct", ranks, _add_up, chunks=ranks, direct=True)


def direct_broadcast(ranks: int, root: int) -> Plan:
    return write(Collective.BROADCAST, "direct", ranks, _copy, root=root, direct=True)


def _add_up(me: Rank) -> None:
    if me.size == 1:
        return
    lane = me.lane()
    lane.signal(READY)
    for peer in me.others:
        lane.wait(READY, of=peer)
    lane.reduce_many(OUT[me.rank], OUTBOX[me.rank], into=OUT[me.rank], back=True)
    lane.signal(DONE)
    for peer in me.others:
        lane.wait(DONE, of=peer)


def _copy(me: Rank) -> None:
    if me.size == 1:
        return
    lane = me.lane()
    if me.rank == me.root:
        lane.signal(READY)
        for peer in me.others:
            lane.wait(DONE, of=peer)
        return
    lane.wait(READY, of=me.root)
    lane.read(OUTBOX[0], of=me.root, into=OUT[0])
    lane.signal(DONE)
