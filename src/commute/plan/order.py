# SPDX-License-Identifier: Apache-2.0
"""What happens before what: the second part of the verifier, and the proof of no deadlock.

Each instruction has two events, its begin and its end. An arrow means "not before":

    own begin -> own end; end of the step before in the lane -> begin      lanes run in order
    end of the instruction named by dep -> begin                           dependencies
    begin of a send -> begin of its receive                                data must have left
    end of a send -> end of its receive                                    all of it must have
    end of a signal -> end of the wait for it

and, for deadlock only, *credit*: with links that hold `depth` messages, the k-th send of a
direction ends only after the receive k - depth has ended. With depth 0 a link holds nothing: a send
ends only after its own receive has begun. This is the strictest case, and covers TCP, whose
buffers have no known size. A recv_reduce_send is a receive and a send at once.

Without a cycle, every lane always moves on. No arrow leads to an earlier tile, and arrows within a
tile are the same in all tiles, so one tile proves it for all.

Races are judged without credit, as a link may well hold everything. Each event gets a vector
clock: for each lane, how many of its events come before. Clocks run over several tiles, as lanes
pass from tile to tile on their own; arrows that reach back over tiles carry their distance.

Everything goes level by level (a level is what can happen once all levels before it have), which
leaves the loops to NumPy: the ring on 128 ranks has a quarter of a million events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .form import Ints, Table
from .plan import PlanError

ARROWS = 3


@dataclass
class Order:
    """Events: begin of instruction i is i, its end is n + i."""

    table: Table
    before: Ints  # (2n, ARROWS): an event that comes before, or -1
    distance: Ints  # (2n, ARROWS): how many tiles ago
    hop: NDArray[np.bool_]  # (2n, ARROWS): whether the arrow crosses to another rank
    levels: list[Ints]
    level: Ints  # (2n,)

    def steps(self) -> int:
        """Messages and signals on the longest chain in which each waits for the one before."""
        count = np.zeros(len(self.before) + 1, dtype=np.int64)
        same_tile = np.where(self.distance == 0, self.before, -1)
        for events in self.levels:
            arrows = same_tile[events]
            chains = count[arrows] + (self.hop[events] & (arrows >= 0))
            count[events] = chains.max(axis=1)
        return int(count.max())


def order(table: Table, depth: int) -> Order:
    """The arrows and the levels of one tile; PlanError if it can deadlock at this depth."""
    n = len(table)
    before = np.full((2 * n, ARROWS), -1)
    distance = np.zeros((2 * n, ARROWS), dtype=np.int64)
    hop = np.zeros((2 * n, ARROWS), dtype=bool)
    credit = np.full(2 * n, -1)
    begins, ends = np.arange(n), np.arange(n) + n

    lane_last = table.lane_first + table.lane_length - 1
    first = table.step == 0
    before[begins, 0] = np.where(first, ends[lane_last[table.lane]] if n else 0, ends - 1)
    distance[begins, 0] = first
    before[begins, 1] = np.where(table.dep >= 0, table.dep + n, -1)
    before[table.receiver, 2] = table.sender
    before[ends, 0] = begins
    before[table.receiver + n, 1] = table.sender + n
    before[table.waiter + n, 1] = table.signaller + n
    distance[table.waiter + n, 1] = table.lag
    hop[table.receiver, 2] = True
    hop[table.receiver + n, 1] = True
    hop[table.waiter + n, 1] = True

    if depth == 0:
        credit[table.sender + n] = table.receiver
    elif len(table.sender) > depth:
        known = table.direction[depth:] == table.direction[:-depth]
        credit[table.sender[depth:][known] + n] = table.receiver[:-depth][known] + n

    levels, level = _levels(np.where(distance == 0, before, -1), credit)
    if (level < 0).any():
        raise PlanError(_cycle(table, np.column_stack([before, credit]), distance, level))
    return Order(table, before, distance, hop, levels, level)


def _levels(before: Ints, credit: Ints) -> tuple[list[Ints], Ints]:
    """Kahn's algorithm, a level at a time; events on or behind a cycle keep level -1."""
    count = len(before)
    arrows = np.column_stack([before, credit])
    to, column = np.nonzero(arrows >= 0)
    source = arrows[to, column]
    by_source = np.argsort(source, kind="stable")
    to = to[by_source]
    fan_out = np.bincount(source, minlength=count)
    start = np.concatenate([[0], np.cumsum(fan_out)])
    missing = np.bincount(to, minlength=count)
    level = np.full(count, -1)
    levels: list[Ints] = []
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        level[ready] = len(levels)
        levels.append(ready)
        lengths = fan_out[ready]
        run_ends = np.cumsum(lengths)
        places = np.arange(run_ends[-1]) + np.repeat(start[ready] - run_ends + lengths, lengths)
        reached = to[places]
        np.subtract.at(missing, reached, 1)
        ready = np.sort(reached[missing[reached] == 0])
        ready = ready[np.diff(ready, prepend=-1) > 0]  # np.unique imports numpy.ma for this
    return levels, level


def _cycle(table: Table, arrows: Ints, distance: Ints, level: Ints) -> str:
    """Walks back along events that never happen until one repeats, and says who waits for whom."""
    n = len(table)
    event = int(np.argmax(level < 0))
    seen: dict[int, int] = {}
    path: list[int] = []
    while event not in seen:
        seen[event] = len(path)
        path.append(event)
        gaps = np.append(distance[event], 0)
        event = next(
            int(a)
            for a, d in zip(arrows[event], gaps, strict=True)
            if a >= 0 and d == 0 and level[a] < 0
        )
    stuck = dict.fromkeys(e % n for e in path[seen[event] :])
    names = [table.where(index) for index in list(stuck)[:4]]
    more = f", and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return f"deadlock: {' waits for '.join(names)}{more}, which waits for the first"


@dataclass
class Clocks:
    """Vector clocks of all events of several tiles."""

    order: Order
    tiles: int
    rows: NDArray[np.unsignedinteger]  # (tiles * 2n + 1, lanes); the last row is all zero

    def ended_before(self, a: Ints, a_tile: Ints, b: Ints, b_tile: Ints) -> NDArray[np.bool_]:
        """Whether instruction a has ended, in its tile, whenever b begins in its tile."""
        t = self.order.table
        seen = self.rows[b_tile * 2 * len(t) + b, t.lane[a]]
        needed = (a_tile * t.lane_length[t.lane[a]] + t.step[a]) * 2 + 2
        return np.asarray(seen >= needed)


def clocks(order: Order, tiles: int) -> Clocks:
    t = order.table
    n = len(t)
    lanes = len(t.lane_first)
    most = int(t.lane_length.max(initial=0)) * tiles * 2
    dtype = np.uint16 if most < 1 << 16 else np.uint32
    rows = np.zeros((tiles * 2 * n + 1, lanes), dtype=dtype)
    nothing = len(rows) - 1
    lane = np.concatenate([t.lane, t.lane])
    own = np.concatenate([t.step * 2 + 1, t.step * 2 + 2])
    per_tile = np.concatenate([t.lane_length, [0]])[lane] * 2
    for tile in range(tiles):
        reach = tile - order.distance
        known = (order.before >= 0) & (reach >= 0)
        before = np.where(known, order.before + reach * 2 * n, nothing)
        number = own + tile * per_tile
        for events in order.levels:
            arrows = before[events]
            clock = rows[arrows[:, 0]]
            np.maximum(clock, rows[arrows[:, 1]], out=clock)
            # Only the begin of a receive has a third arrow.
            third = np.flatnonzero(arrows[:, 2] != nothing)
            if len(third):
                clock[third] = np.maximum(clock[third], rows[arrows[third, 2]])
            clock[np.arange(len(events)), lane[events]] = number[events]
            rows[events + tile * 2 * n] = clock
    return Clocks(order, tiles, rows)
