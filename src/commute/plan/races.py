# SPDX-License-Identifier: Apache-2.0
"""No two unordered accesses to one chunk: the third part of the verifier.

An instruction touches its chunks from its begin to its end. Two instructions that touch the same
chunk, one of them writing, must be ordered: one has ended before the other begins.

Which chunks are the same? IN and OUT of different tiles are different memory, and arrows within a
tile are the same in every tile, so one tile is enough for them. SCRATCH is the same memory in all
tiles: an access is checked against those of the next tile, and lane order carries that on to all
later ones. OUTBOX chunks are the same memory SLOTS tiles later. No path between two tiles leaves
the tiles in between, so 2 tiles show all there is to SCRATCH, and SLOTS + 1 to OUTBOX. The last
tile may be shorter, and is cut into as many chunks: then a chunk lies, in whole or in part, where
in the tile before lower chunks of its block were, and must be ordered with those too. From one
call to the next, which may run another plan, outboxes are kept apart by the executor (executor.h);
`settled` says when it need not wait for that.

In a direct plan OUTBOX is OUT: its chunks are those of the user's array, which peers reach. The
user has it before a rank begins and after it has finished, so nobody may touch it then:
`check_direct`.
"""

from __future__ import annotations

import numpy as np

from .form import Bools, Ints, Table
from .instructions import SLOTS, Flag, Op, Space
from .order import Clocks
from .plan import PlanError

Columns = tuple[Ints, Ints, Ints, Ints]


def tiles_to_unroll(table: Table) -> int:
    if table.plan.blocks[Space.OUTBOX] and not table.plan.direct:
        return SLOTS + 1
    scratch = (table["dst_space"] == Space.SCRATCH) | (table["src_space"] == Space.SCRATCH)
    return 2 if scratch.any() else 1


def places(table: Table, rank: Ints, space: Ints, chunk: Ints) -> Ints:
    """One number for each chunk of each space of each rank."""
    sizes = np.array(table.plan.blocks) * table.plan.chunks
    start = np.concatenate([[0], np.cumsum(sizes)])
    if table.plan.direct:
        start[Space.OUTBOX] = start[Space.OUT]
    return np.asarray(rank * start[-1] + start[space] + chunk)


def accesses(table: Table) -> Columns:
    """Who touches what in one tile: instruction, space, place, and 1 for a write."""
    ranks = table.plan.ranks
    many = table["op"] == Op.REDUCE_MANY
    back = table["flags"] & Flag.BACK != 0
    of_peer = (table["op"] == Op.COPY) & (table["src_space"] == Space.OUTBOX)
    owner = np.where(of_peer, table["peer"], table.rank)
    reads = table["src_space"] != Space.NONE
    writes = table["dst_space"] != Space.NONE
    found: list[Columns] = []

    def add(chosen: Ints, rank: Ints, space: Ints, chunk: Ints, write: int) -> None:
        i, offset = table.expand(chosen)
        place = places(table, rank[i], space[i], chunk[i] + offset)
        found.append((i, space[i], place, np.full(len(i), write)))

    add(np.flatnonzero(reads), owner, table["src_space"], table["src"], 0)
    add(np.flatnonzero(writes), table.rank, table["dst_space"], table["dst"], 1)
    keeps = (table["op"] == Op.PUT) & (table["flags"] & Flag.KEEP != 0)
    add(np.flatnonzero(keeps), table.rank, np.full(len(table), int(Space.OUT)), table["arg"], 1)
    outbox = np.full(len(table), int(Space.OUTBOX))
    if many.any():
        for rank in range(ranks):
            theirs, of = many & (table.rank != rank), np.full(len(table), rank)
            add(np.flatnonzero(theirs), of, outbox, table["arg"], 0)
            add(np.flatnonzero(theirs & back), of, outbox, table["arg"], 1)
    instruction, space, place, write = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    return instruction, space, place, write


def check_races(clocks: Clocks) -> None:
    table = clocks.order.table
    who, place, tile, write = _unrolled(table, clocks.tiles)
    if len(who) == 0:
        return
    # By place, then in an order in which it can happen; so only neighbours need a look: a read and
    # the writes around it, a write and the write before it. The rest follows from these.
    by_time = np.lexsort((write, clocks.order.level[who], tile, place))
    who, place, tile, write = who[by_time], place[by_time], tile[by_time], write[by_time]
    index = np.arange(len(who))
    last = np.maximum.accumulate(np.where(write == 1, index, -1))
    last = np.concatenate([[-1], last[:-1]])
    backwards = np.where(write == 1, index, len(who))[::-1]
    following = np.minimum.accumulate(backwards)[::-1]
    following = np.concatenate([following[1:], [len(who)]])

    with_last = index[(last >= 0) & (place[last] == place)]
    near = np.minimum(following, len(who) - 1)
    with_next = index[(write == 0) & (following < len(who)) & (place[near] == place)]
    one = np.concatenate([last[with_last], with_next])
    other = np.concatenate([with_last, following[with_next]])
    same = (who[one] == who[other]) & (tile[one] == tile[other])
    one, other = one[~same], other[~same]
    ordered = clocks.ended_before(who[one], tile[one], who[other], tile[other])
    if not ordered.all():
        pair = int(np.argmin(ordered))
        a, b = int(one[pair]), int(other[pair])
        raise PlanError(_race(table, int(who[a]), int(who[b]), int(tile[b] - tile[a])))


def check_last_tile(clocks: Clocks) -> None:
    """Memory that tiles share is not in use any more by lower chunks of a block either."""
    table = clocks.order.table
    chunks = table.plan.chunks
    if chunks == 1:
        return
    instruction, space, place, write = accesses(table)
    for shared, gap in ((Space.SCRATCH, 1), (Space.OUTBOX, SLOTS))[: 1 if table.plan.direct else 2]:
        chosen = np.flatnonzero(space == shared)
        chosen = chosen[np.argsort(place[chosen] // chunks, kind="stable")]
        block = place[chosen] // chunks
        starts = np.flatnonzero(np.diff(block, prepend=-1))
        for here in np.split(chosen, starts[1:]) if len(chosen) else []:
            chunk, wrote = place[here] % chunks, write[here] == 1
            _check_block(clocks, gap, instruction[here], chunk, wrote)


def _check_block(clocks: Clocks, gap: int, who: Ints, chunk: Ints, wrote: Bools) -> None:
    """Of one block: who touches a chunk, `gap` tiles after all have touched the chunks below it."""
    table = clocks.order.table
    lanes, lane = np.unique(table.lane[who], return_inverse=True)
    touched, written = np.zeros((2, len(lanes), table.plan.chunks + 1), dtype=np.int64)
    # By lane and chunk: how many steps of the lane it takes to be done with all chunks below.
    ended = table.step[who] + 1
    np.maximum.at(touched, (lane, chunk + 1), ended)
    np.maximum.at(written, (lane, chunk + 1), np.where(wrote, ended, 0))
    touched, written = (np.maximum.accumulate(last, axis=1) for last in (touched, written))

    seen = clocks.rows[gap * 2 * len(table) + who][:, lanes]
    needed = 2 * np.where(wrote[:, None], touched[:, chunk].T, written[:, chunk].T)
    if (seen < needed).any():
        later, other = (int(index) for index in np.argwhere(seen < needed)[0])
        step = int(needed[later, other]) // 2 - 1
        earlier = int(table.lane_first[lanes[other]]) + step
        raise PlanError(_race(table, earlier, int(who[later]), gap))


def settled(clocks: Clocks) -> tuple[bool, ...]:
    """Per rank: whether nobody touches its outbox any more once it has finished its tiles.

    One tile shows it: what a lane has done in a tile it has done in all tiles before.
    """
    table = clocks.order.table
    n, ranks, tile = len(table), table.plan.ranks, clocks.tiles - 1
    instruction, space, place, _ = accesses(table) if n else (np.zeros(0, np.int64),) * 4
    owner = place // max(1, sum(table.plan.blocks) * table.plan.chunks)
    foreign = (space == Space.OUTBOX) & (table.rank[instruction] != owner)
    last = table.lane_first + table.lane_length - 1
    ended = clocks.rows[tile * 2 * n + n + last]
    mine = table.rank[table.lane_first]
    found = []
    for rank in range(ranks):
        touching = instruction[foreign & (owner == rank)]
        seen = ended[mine == rank].max(axis=0, initial=0)[table.lane[touching]]
        needed = (tile * table.lane_length[table.lane[touching]] + table.step[touching]) * 2 + 2
        found.append(bool((seen >= needed).all()))
    return tuple(found)


def check_direct(clocks: Clocks, settled: tuple[bool, ...]) -> None:
    """PlanError if a peer can touch an array while it is the user's."""
    table = clocks.order.table
    plan, n = table.plan, len(table)
    if not plan.direct or n == 0:
        return
    instruction, space, place, _ = accesses(table)
    owner = place // (sum(plan.blocks) * plan.chunks)
    foreign = np.flatnonzero((space == Space.OUTBOX) & (table.rank[instruction] != owner))
    lane_owner = table.rank[table.lane_first]
    for access in foreign:
        toucher = int(instruction[access])
        if not clocks.rows[toucher][lane_owner == owner[access]].any():
            raise PlanError(
                f"{table.where(toucher)}: touches the array of rank {owner[access]}, which may not"
                " have begun"
            )
    if not all(settled):
        rank = settled.index(False)
        raise PlanError(f"rank {rank} can finish while others still touch its array")


def _unrolled(table: Table, tiles: int) -> Columns:
    """Who touches what in several tiles: instruction, memory, tile, and 1 for a write."""
    instruction, space, place, write = accesses(table)
    size = table.plan.ranks * sum(table.plan.blocks) * table.plan.chunks
    columns: list[Columns] = []
    for tile in range(tiles):
        here = np.ones(len(space), dtype=bool) if tile == 0 else space >= Space.SCRATCH
        slot = np.where(space == Space.OUTBOX, tile % SLOTS, 0)
        memory = place + slot * size
        number = np.full(len(space), tile)
        columns.append((instruction[here], memory[here], number[here], write[here]))
    who, memory, when, wrote = (np.concatenate(column) for column in zip(*columns, strict=True))
    return who, memory, when, wrote


def _race(table: Table, a: int, b: int, gap: int) -> str:
    later = "" if gap == 0 else f" {gap} tile{'s' * (gap > 1)} later"
    return f"race: {table.where(a)} and{later} {table.where(b)} touch the same chunk in no order"
