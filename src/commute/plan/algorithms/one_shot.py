# SPDX-License-Identifier: Apache-2.0
"""Allreduce in one shot, for ranks that share memory: everyone reads everyone's outbox.

Each rank puts its array into its outbox and says so (READY). When all have, each adds up its array
and all other outboxes, in rank order, in place, and says that it no longer reads (DONE).
An outbox has two slots that take turns, so a rank may refill a slot only when all others are done
with the tile that used it last, two tiles ago. (In this one lane READY of the tile between says as
much already; DONE keeps the plan right for any number of slots, and when lanes part.)
"""

from ..instructions import SLOTS, Collective
from ..plan import Plan
from ..program import OUT, OUTBOX, Rank, write

READY, DONE = 0, 1


def one_shot(ranks: int) -> Plan:
    return write(Collective.ALLREDUCE, "one-shot", ranks, each_rank, outbox=1)


def each_rank(me: Rank) -> None:
    if me.size == 1:
        return
    lane = me.lane()
    for peer in me.others:
        lane.wait(DONE, of=peer, lag=SLOTS)
    lane.put(OUT[0], into=OUTBOX[0])
    lane.signal(READY)
    for peer in me.others:
        lane.wait(READY, of=peer)
    lane.reduce_many(OUT[0], OUTBOX[0], into=OUT[0])
    lane.signal(DONE)
