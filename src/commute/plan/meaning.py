# SPDX-License-Identifier: Apache-2.0
"""What a plan computes: the last part of the verifier.

The plan runs once, on values that say what they are made of. A value is

    parts   how often each rank's contribution is in it, a vector of counts;
    block   which block of the contributions (reduce_scatter has several, the others block 0);
    shape   64 bits that tell the order of the sum: x0 + x1 differs from x1 + x0.

Which chunk of the block it is needs no record: form.py lets no data leave its place in the block.

In the end each rank must hold what the collective promises: every contribution exactly once, or
exactly that of one rank. All ranks that get the same sum must get it in the same shape, because
then they get the same bits. A plan is in rank order if all sums are shaped ((x0 + x1) + x2) + ...
A barrier moves no data; it promises that no rank leaves before all have entered.

One order of execution and one tile suffice: without races all orders read the same values, and
what is read has been written in the same tile, as in the first tile there is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .form import Ints, Table
from .instructions import Collective, Flag, Op, Space
from .order import Clocks, Order
from .plan import Plan, PlanError
from .races import places

UNDEFINED, NOTHING = -1, -2


@dataclass
class Values:
    """Columns of values. The last one is nothing, to stand for an operand that is not there."""

    parts: NDArray[np.int32]  # (values, ranks)
    block: Ints
    shape: NDArray[np.uint64]

    def __getitem__(self, index: Ints) -> Values:
        return Values(self.parts[index], self.block[index], self.shape[index])

    def __setitem__(self, index: Ints, value: Values) -> None:
        self.parts[index] = value.parts
        self.block[index] = value.block
        self.shape[index] = value.shape


def _undefined(count: int, ranks: int) -> Values:
    parts = np.zeros((count + 1, ranks), dtype=np.int32)
    block = np.full(count + 1, UNDEFINED)
    block[-1] = NOTHING
    return Values(parts, block, np.zeros(count + 1, dtype=np.uint64))


def _mixed(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The shape of left + right; the constants are those of splitmix64."""
    mixed = left * np.uint64(0x9E3779B97F4A7C15) + right * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _rounded_once(shape: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The shape of a sum that reduce_many made: halves are rounded once, and not at each step."""
    return _mixed(shape, np.zeros_like(shape))


def _leaf_shapes(ranks: int) -> NDArray[np.uint64]:
    numbers = np.arange(1, ranks + 1, dtype=np.uint64)
    return _mixed(numbers, numbers)


def _rank_order_shape(ranks: int) -> np.uint64:
    leaves = _leaf_shapes(ranks)
    folded = leaves[:1]
    for rank in range(1, ranks):
        folded = _mixed(folded, leaves[rank : rank + 1])
    return np.uint64(folded[0])


def check_meaning(clocks: Clocks) -> bool:
    """PlanError unless the plan does what its collective promises; whether in rank order."""
    table = clocks.order.table
    plan = table.plan
    if plan.collective is Collective.BARRIER:
        _check_barrier(clocks)
    values = _contributions(plan)
    _Run(clocks.order, values).run()
    if plan.collective is Collective.BARRIER:
        return True
    if plan.collective is Collective.BROADCAST:
        _check_copies(plan, values, np.full(plan.chunks, plan.root))
        return True
    if plan.collective is Collective.ALLGATHER:
        _check_copies(plan, values, np.repeat(np.arange(plan.ranks), plan.chunks))
        return True
    return _check_sums(plan, values)


def _space_of(plan: Plan, ranks: Ints, space: Space) -> Ints:
    """Places of a whole space, a row per rank."""
    count = plan.blocks[space] * plan.chunks
    start = sum(plan.blocks[:space]) * plan.chunks
    width = sum(plan.blocks) * plan.chunks
    return np.asarray(ranks[:, None] * width + start + np.arange(count))


def _contributions(plan: Plan) -> Values:
    """What each rank has at the start."""
    values = _undefined(plan.ranks * sum(plan.blocks) * plan.chunks, plan.ranks)
    shapes = _leaf_shapes(plan.ranks)
    everyone = np.arange(plan.ranks)
    root = everyone == plan.root
    given: list[tuple[Ints, Space]]
    if plan.collective is Collective.REDUCE:
        given = [(everyone[root], Space.OUT), (everyone[~root], Space.IN)]
    elif plan.collective is Collective.BROADCAST:
        given = [(everyone[root], Space.OUT)]
    elif plan.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
        given = [(everyone, Space.IN)]
    else:
        given = [(everyone, Space.OUT)]
    for ranks, space in given:
        where = _space_of(plan, ranks, space)
        values.parts[where, ranks[:, None]] = 1
        values.block[where] = np.arange(where.shape[1]) // plan.chunks
        values.shape[where] = shapes[ranks][:, None]
    return values


class _Run:
    """One execution, level by level; whatever an instruction does, it does at its begin."""

    def __init__(self, order: Order, values: Values) -> None:
        t = self.table = order.table
        self.values = values
        nowhere = len(values.block) - 1
        moving = np.flatnonzero(~t.is_op(Op.SIGNAL, Op.WAIT))
        moving = moving[np.argsort(order.level[moving], kind="stable")]
        i, offset = self.item, self.offset = t.expand(moving)
        self.bounds = np.searchsorted(order.level[i], np.arange(len(order.levels) + 1))

        many = self.many = t["op"][i] == Op.REDUCE_MANY
        has_src = t["src_space"][i] != Space.NONE
        has_dst = t["dst_space"][i] != Space.NONE
        of_peer = t.is_op(Op.COPY)[i] & (t["src_space"][i] == Space.OUTBOX)
        owner = np.where(of_peer, t["peer"][i], t.rank[i])
        src_space = np.where(has_src, t["src_space"][i], 0)
        dst_space = np.where(has_dst, t["dst_space"][i], 0)
        self.src = np.where(has_src, places(t, owner, src_space, t["src"][i] + offset), nowhere)
        dst = places(t, t.rank[i], dst_space, t["dst"][i] + offset)
        self.dst = np.where(has_dst, dst, UNDEFINED)
        keeps = t.is_op(Op.PUT)[i] & (t["flags"][i] & Flag.KEEP != 0)
        out = np.full(len(i), int(Space.OUT))
        kept = places(t, t.rank[i], out, np.where(keeps, t["arg"][i] + offset, 0))
        self.keep = np.where(keeps, kept, UNDEFINED)
        self.back = many & (t["flags"][i] & Flag.BACK != 0)
        self.first = t["flags"][i] & Flag.FIRST != 0
        self._number_messages()

    def _number_messages(self) -> None:
        t = self.table
        start = np.zeros(len(t), dtype=np.int64)
        counts = t["count"][t.sender]
        start[t.sender] = np.cumsum(counts) - counts
        total = int(counts.sum())
        is_sender, is_receiver = np.zeros((2, len(t)), dtype=bool)
        is_sender[t.sender] = is_receiver[t.receiver] = True
        source = np.zeros(len(t), dtype=np.int64)
        source[t.receiver] = t.sender
        out = start[self.item] + self.offset
        self.outgoing = np.where(is_sender[self.item], out, UNDEFINED)
        arriving = start[source[self.item]] + self.offset
        self.incoming = np.where(is_receiver[self.item], arriving, total)
        self.messages = _undefined(total, t.plan.ranks)

    def run(self) -> None:
        for low, high in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            if low == high:
                continue
            here = np.arange(low, high)
            result = self._sum(
                here, self.values[self.src[here]], self.messages[self.incoming[here]]
            )
            self._turn_round(here, result)
            if self.many[here].any():
                many = self.many[here]
                result[np.flatnonzero(many)] = self._sum_of_all(here[many])
            for store, target in (
                (self.values, self.dst),
                (self.values, self.keep),
                (self.messages, self.outgoing),
            ):
                chosen = np.flatnonzero(target[here] >= 0)
                store[target[here[chosen]]] = result[chosen]
            self._store_back(here[self.back[here]], result[np.flatnonzero(self.back[here])])

    def _sum(self, here: Ints, left: Values, right: Values) -> Values:
        self._refuse(here, (left.block == UNDEFINED) | (right.block == UNDEFINED), _NEVER_WRITTEN)
        both = (left.block >= 0) & (right.block >= 0)
        self._refuse(here, both & (left.block != right.block), "adds up different blocks")
        shape = np.where(both, _mixed(left.shape, right.shape), left.shape + right.shape)
        block = np.maximum(left.block, right.block)
        return Values(left.parts + right.parts, block, shape)

    def _turn_round(self, here: Ints, result: Values) -> None:
        """The shape of message + source, where that is the order."""
        chosen = np.flatnonzero(self.first[here])
        mine = self.values[self.src[here[chosen]]].shape
        theirs = self.messages[self.incoming[here[chosen]]].shape
        result.shape[chosen] = _mixed(theirs, mine)

    def _sum_of_all(self, here: Ints) -> Values:
        total = self.values[np.full(len(here), -1)]
        for rank in range(self.table.plan.ranks):
            own = self.table.rank[self.item[here]] == rank
            theirs = self.values[np.where(own, self.src[here], self._outboxes(here, rank))]
            total = self._sum(here, total, theirs)
        if self.table.plan.ranks > 2:
            total.shape = _rounded_once(total.shape)
        return total

    def _store_back(self, here: Ints, result: Values) -> None:
        for rank in range(self.table.plan.ranks if len(here) else 0):
            others = np.flatnonzero(self.table.rank[self.item[here]] != rank)
            self.values[self._outboxes(here[others], rank)] = result[others]

    def _outboxes(self, here: Ints, rank: int) -> Ints:
        """Where a reduce_many reads, and stores back, in the outbox of this rank."""
        chunk = self.table["arg"][self.item[here]] + self.offset[here]
        outbox = np.full(len(here), int(Space.OUTBOX))
        return places(self.table, np.full(len(here), rank), outbox, chunk)

    def _refuse(self, here: Ints, bad: NDArray[np.bool_], why: str) -> None:
        if bad.any():
            index = int(self.item[here[bad][0]])
            raise PlanError(f"{self.table.where(index)}: {why}")


_NEVER_WRITTEN = "uses data that nobody has written in this tile"


def _check_copies(plan: Plan, values: Values, source: Ints) -> None:
    """OUT of every rank holds, chunk by chunk, exactly the contribution of `source`."""
    everyone = np.arange(plan.ranks)
    where = _space_of(plan, everyone, Space.OUT)
    expected = np.zeros((len(source), plan.ranks), dtype=np.int32)
    expected[np.arange(len(source)), source] = 1
    wrong = (values.parts[where] != expected).any(axis=2)
    if wrong.any():
        rank, chunk = (int(index) for index in np.argwhere(wrong)[0])
        raise PlanError(
            f"{plan.collective.label} by {plan.algorithm}: rank {rank} ends with OUT[{chunk}] = "
            f"{_sum_text(values, int(where[rank, chunk]))}, expected x{source[chunk]}"
        )


def _check_sums(plan: Plan, values: Values) -> bool:
    """OUT of those who get a sum holds every contribution once; whether added in rank order."""
    everyone = np.arange(plan.ranks)
    getters = everyone[[plan.root]] if plan.collective is Collective.REDUCE else everyone
    where = _space_of(plan, getters, Space.OUT)
    wrong = (values.parts[where] != 1).any(axis=2)
    scattered = plan.collective is Collective.REDUCE_SCATTER
    if scattered:
        wrong |= values.block[where] != getters[:, None]
    if wrong.any():
        row, chunk = (int(index) for index in np.argwhere(wrong)[0])
        place = int(where[row, chunk])
        of_block = f" of block {values.block[place]}" if scattered else ""
        raise PlanError(
            f"{plan.collective.label} by {plan.algorithm}: rank {getters[row]} ends with "
            f"OUT[{chunk}] = {_sum_text(values, place)}{of_block}, expected every rank once"
            + (f" of block {getters[row]}" if scattered else "")
        )
    shapes = values.shape[where]
    if not scattered and (shapes != shapes[0]).any():
        row, chunk = (int(index) for index in np.argwhere(shapes != shapes[0])[0])
        raise PlanError(
            f"{plan.collective.label} by {plan.algorithm}: ranks {getters[0]} and {getters[row]} "
            f"add up OUT[{chunk}] in different orders, so their bits would differ"
        )
    in_order = np.array([_rank_order_shape(plan.ranks)])
    either = (in_order, _rounded_once(in_order))
    return any(bool((shapes == shape).all()) for shape in either)


def _sum_text(values: Values, place: int) -> str:
    if values.block[place] == UNDEFINED:
        return "nothing"
    terms = [(rank, int(count)) for rank, count in enumerate(values.parts[place]) if count]
    shown = [f"x{rank}" if count == 1 else f"{count}*x{rank}" for rank, count in terms[:8]]
    return " + ".join(shown) + (" + ..." if len(terms) > 8 else "")


def _check_barrier(clocks: Clocks) -> None:
    """When a rank's lanes have ended, each other rank has begun something in the same tile."""
    t: Table = clocks.order.table
    plan, n = t.plan, len(t)
    if plan.ranks == 1:
        return
    last = t.lane_first + t.lane_length - 1
    owner = t.rank[t.lane_first]
    for rank in range(plan.ranks):
        ends = clocks.rows[n + last[owner == rank]]
        seen = np.zeros(plan.ranks, dtype=np.int64)
        if len(ends):
            np.maximum.at(seen, owner, ends.max(axis=0).astype(np.int64))
        seen[rank] = 1
        if (seen == 0).any():
            missing = int(np.argmin(seen))
            raise PlanError(
                f"barrier by {plan.algorithm}: rank {rank} can leave before rank {missing} enters"
            )
