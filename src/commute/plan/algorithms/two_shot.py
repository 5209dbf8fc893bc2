# SPDX-License-Identifier: Apache-2.0
"""Allreduce in two shots, for ranks that share memory: each rank adds up its part for all.

Everyone puts its array into its outbox and says so (READY). Rank r adds up chunk r of all
outboxes, in rank order, into its own array and back into its outbox, and says so (REDUCED). Then
everyone reads the other chunks from their owners' outboxes and says that it is done with all
(DONE). Each rank reads 2(n-1)/n of an array instead of n-1 arrays, for one more step.
"""

from ..instructions import SLOTS, Collective
from ..plan import Plan
from ..program import OUT, OUTBOX, Rank, write

READY, REDUCED, DONE = 0, 1, 2


def two_shot(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "two-shot", ranks, each_rank, chunks=ranks, outbox=1)


def each_rank(me: Rank) -> None:
    if me.size == 1:
        return
    lane = me.lane()
    for peer in me.others:
        lane.wait(DONE, of=peer, lag=SLOTS)
    lane.put(OUT[0 : me.size], into=OUTBOX[0 : me.size])
    lane.signal(READY)
    for peer in me.others:
        lane.wait(READY, of=peer)
    mine = me.rank
    lane.reduce_many(OUTBOX[mine], into=OUT[mine], also=OUTBOX[mine])
    lane.signal(REDUCED)
    # Beginning with the next rank, so that not everyone reads from rank 0 at once.
    for owner in me.others[mine:] + me.others[:mine]:
        lane.wait(REDUCED, of=owner)
        lane.read(OUTBOX[owner], of=owner, into=OUT[owner])
    lane.signal(DONE)
