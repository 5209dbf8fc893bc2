# SPDX-License-Identifier: Apache-2.0
"""A changed plan that does harm is refused: the verifier against a machine that just runs plans.

The machine below knows nothing of the verifier. It executes a plan on numbers, several tiles, one
event at a time in a random order, over links that hold nothing or everything. It is as hostile as
an executor may be: an instruction that is under way has garbage in its destination, and one
whose source changes meanwhile has read garbage. A plan does harm if some run ends with a wrong
number, stops, or does something that has no meaning.

Each test takes a good plan, changes one instruction at random, and asks the verifier. What it
lets pass must be harmless in all runs. Seeds are printed; each alone replays its mutation.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commute.plan import Collective, Op, Plan, PlanError, Space, algorithms, build, verify

TILES = 4
SLOTS = 2
RECEIVES = (Op.RECV, Op.RECV_REDUCE, Op.RECV_REDUCE_SEND)
SENDS = (Op.SEND, Op.RECV_REDUCE_SEND)


class Harm(Exception):
    """The plan went wrong in this run."""


class Garbage:
    """A number nobody can predict; each one is different."""


def add(a: Any, b: Any) -> Any:
    return Garbage() if isinstance(a, Garbage) or isinstance(b, Garbage) else a + b


class Message:
    def __init__(self, position: int, count: int) -> None:
        self.place = (position, count)
        self.values: list[Any] = []
        self.complete = False
        self.taken = False


class Lane:
    """Where a lane is, and what its instruction under way has read."""

    def __init__(self, rank: int, program: list[dict[str, int]]) -> None:
        self.rank = rank
        self.program = program
        self.tile = 0
        self.step = 0
        self.under_way = False
        self.read: list[tuple[Any, Any]] = []  # cell, what was in it
        self.marks: list[tuple[Any, Garbage]] = []  # cell, garbage put there meanwhile
        self.sent: Message | None = None
        self.received: Message | None = None

    @property
    def now(self) -> dict[str, int]:
        return self.program[self.step]

    def has_ended(self, tile: int, step: int) -> bool:
        return (self.tile, self.step) > (tile, step)


class Machine:
    """One run of a plan."""

    def __init__(self, plan: Plan, rng: random.Random, *, buffered: bool) -> None:
        self.plan, self.rng, self.buffered = plan, rng, buffered
        self.lanes: list[Lane] = []
        self.lanes_of: list[list[Lane]] = []
        for rank, program in enumerate(plan.programs):
            rows = [
                dict(zip(program.dtype.names or (), row.tolist(), strict=True)) for row in program
            ]
            if [row["lane"] for row in rows] != sorted(row["lane"] for row in rows):
                raise Harm("lanes are not sorted")
            numbers = sorted({row["lane"] for row in rows})
            if numbers != list(range(len(numbers))):
                raise Harm("a lane is missing")
            split = [[row for row in rows if row["lane"] == number] for number in numbers]
            self.lanes_of.append([Lane(rank, rows) for rows in split])
            self.lanes += self.lanes_of[-1]
        self.memory: dict[Any, Any] = {}
        self.links: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.taken: Counter[tuple[int, int]] = Counter()
        self.counters: Counter[tuple[int, int]] = Counter()
        self.per_tile = Counter(
            (lane.rank, row["arg"])
            for lane in self.lanes
            for row in lane.program
            if row["op"] == Op.SIGNAL
        )
        self.entered: set[tuple[int, int]] = set()
        self.numbers: dict[Any, int] = {}
        self._fill()

    # The collective's promise, in numbers.

    def _fill(self) -> None:
        plan = self.plan
        for tile in range(TILES):
            for rank in range(plan.ranks):
                for space, blocks in ((0, plan.blocks[0]), (1, plan.blocks[1])):
                    given = {
                        Collective.ALLREDUCE: space == 1,
                        Collective.BARRIER: space == 1,
                        Collective.BROADCAST: space == 1 and rank == plan.root,
                        Collective.REDUCE: space == (1 if rank == plan.root else 0),
                        Collective.ALLGATHER: space == 0,
                        Collective.REDUCE_SCATTER: space == 0,
                        Collective.GATHER: space == 0,
                        Collective.SCATTER: space == 0 and rank == plan.root,
                        Collective.ALLTOALL: space == 0,
                    }[plan.collective]
                    for chunk in range(blocks * plan.chunks if given else 0):
                        value = self.rng.getrandbits(60)
                        self.memory[rank, space, chunk, tile] = value
                        self.numbers[rank, chunk, tile] = value

    def _promised(self, rank: int, chunk: int, tile: int) -> int | None:
        """What OUT must hold at the end, or None for anything."""
        plan = self.plan
        everyone = range(plan.ranks)
        block, place = divmod(chunk, plan.chunks)
        if plan.collective is Collective.BROADCAST:
            return self.numbers[plan.root, chunk, tile]
        if plan.collective is Collective.ALLGATHER:
            return self.numbers[block, place, tile]
        if plan.collective is Collective.GATHER:
            return self.numbers[block, place, tile] if rank == plan.root else None
        if plan.collective is Collective.SCATTER:
            return self.numbers[plan.root, rank * plan.chunks + place, tile]
        if plan.collective is Collective.ALLTOALL:
            return self.numbers[block, rank * plan.chunks + place, tile]
        if plan.collective is Collective.REDUCE_SCATTER:
            mine = rank * plan.chunks + chunk
            return sum(self.numbers[peer, mine, tile] for peer in everyone)
        if plan.collective is Collective.BARRIER:
            return None
        if plan.collective is Collective.REDUCE and rank != plan.root:
            return None
        return sum(self.numbers[peer, chunk, tile] for peer in everyone)

    def _check_result(self) -> None:
        plan = self.plan
        for tile in range(TILES):
            for rank in range(plan.ranks):
                for chunk in range(plan.blocks[1] * plan.chunks):
                    expected = self._promised(rank, chunk, tile)
                    if expected is not None:
                        got = self.memory.get((rank, int(Space.OUT), chunk, tile))
                        if got != expected:
                            raise Harm(f"rank {rank}, chunk {chunk}, tile {tile} is wrong")
                for chunk in range(plan.blocks[0] * plan.chunks):
                    got = self.memory.get((rank, int(Space.IN), chunk, tile))
                    if got != self.numbers.get((rank, chunk, tile)) and not (
                        plan.collective is Collective.REDUCE and rank == plan.root
                    ):
                        raise Harm(f"rank {rank}: the input has changed")

    # Operands.

    def _cells(self, rank: int, space: int, first: int, count: int, tile: int) -> list[Any]:
        plan = self.plan
        if space > 3 or not 0 <= first <= first + count <= plan.blocks[space] * plan.chunks:
            raise Harm("out of bounds")
        crosses = count and first // plan.chunks != (first + count - 1) // plan.chunks
        if crosses and space != Space.SCRATCH:
            raise Harm("a run in two blocks")
        missing = {
            Collective.REDUCE: 0 if rank == plan.root else 1,
            Collective.GATHER: None if rank == plan.root else 1,
            Collective.SCATTER: None if rank == plan.root else 0,
        }.get(plan.collective)
        if space == missing:
            raise Harm("no such array on this rank")
        if plan.direct and space == Space.OUTBOX:
            space = int(Space.OUT)
        version = (tile, tile, 0, tile % SLOTS)[space]
        return [(rank, space, chunk, version) for chunk in range(first, first + count)]

    def _sources(self, lane: Lane) -> list[list[Any]]:
        """Cells to read: one list for each operand."""
        row, tile = lane.now, lane.tile
        run = (row["src_space"], row["src"], row["count"], tile)
        if row["op"] == Op.REDUCE_MANY:
            if row["src_space"] == Space.OUTBOX:
                raise Harm("reduce_many of the own outbox")
            theirs = (Space.OUTBOX, row["arg"], row["count"], tile)
            others = [self._cells(rank, *theirs) for rank in self._others(lane)]
            return [self._cells(lane.rank, *run), *others]
        if row["op"] == Op.COPY and row["src_space"] == Space.OUTBOX:
            return [self._cells(self._peer(row["peer"]), *run)]
        return [] if row["op"] == Op.RECV else [self._cells(lane.rank, *run)]

    def _targets(self, lane: Lane) -> list[Any]:
        row = lane.now
        if row["op"] == Op.SEND:
            return []
        if row["op"] == Op.PUT and self.plan.direct:
            raise Harm("puts an array onto itself")
        if (row["op"] == Op.PUT) != (row["dst_space"] == Space.OUTBOX):
            raise Harm("only put writes outboxes")
        cells = self._cells(lane.rank, row["dst_space"], row["dst"], row["count"], lane.tile)
        if row["op"] == Op.PUT and row["flags"] & 2:
            cells += self._cells(lane.rank, Space.OUT, row["arg"], row["count"], lane.tile)
        if row["op"] == Op.REDUCE_MANY and row["flags"] & 1:
            for rank in self._others(lane):
                cells += self._cells(rank, Space.OUTBOX, row["arg"], row["count"], lane.tile)
        return cells

    def _others(self, lane: Lane) -> list[int]:
        return [rank for rank in range(self.plan.ranks) if rank != lane.rank]

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.plan.ranks:
            raise Harm("no such peer")
        return peer

    # Events.

    def _can_begin(self, lane: Lane) -> bool:
        row = lane.now
        if row["dep_lane"] != 255:
            lanes = self.lanes_of[lane.rank]
            if row["dep_lane"] >= len(lanes):
                raise Harm("no such lane")
            dep = lanes[row["dep_lane"]]
            if row["dep_step"] >= len(dep.program):
                raise Harm("no such step")
            if not dep.has_ended(lane.tile, row["dep_step"]):
                return False
        if row["op"] in RECEIVES:
            direction = (self._peer(row["peer"]), lane.rank)
            return len(self.links[direction]) > self.taken[direction]
        return True

    def _can_end(self, lane: Lane) -> bool:
        row = lane.now
        if lane.received and not lane.received.complete:
            return False
        if lane.sent and not self.buffered and not lane.sent.taken:
            return False
        if row["op"] == Op.WAIT:
            key = (self._peer(row["peer"]), row["arg"] & 0xFFFF)
            target = (lane.tile - (row["arg"] >> 16)) * self.per_tile[key] + row["src"]
            return self.counters[key] >= target
        return True

    def _begin(self, lane: Lane) -> None:
        row = lane.now
        if row["op"] > max(Op):
            raise Harm("no such op")
        self.entered.add((lane.rank, lane.tile))
        lane.under_way, lane.sent, lane.received = True, None, None
        lane.read, lane.marks = [], []
        if row["op"] in (Op.SIGNAL, Op.WAIT):
            return
        if row["op"] in RECEIVES:
            direction = (row["peer"], lane.rank)
            lane.received = self.links[direction][self.taken[direction]]
            lane.received.taken = True
            self.taken[direction] += 1
            if lane.received.place != (row["dst"] % self.plan.chunks, row["count"]):
                raise Harm("lengths of a message differ")
        sources, targets = self._sources(lane), self._targets(lane)
        self._check_owners(lane, [*sources, targets])
        positions = {run[0][2] % self.plan.chunks for run in (*sources, targets) if run}
        if len(positions) > 1:
            raise Harm("lengths of operands differ")
        lane.read = [(cell, self.memory.get(cell)) for run in sources for cell in run]
        for cell in targets:
            mark = Garbage()
            self.memory[cell] = mark
            lane.marks.append((cell, mark))
        if row["op"] in SENDS:
            to = self._peer(row["peer2"] if row["op"] == Op.RECV_REDUCE_SEND else row["peer"])
            first = row["src"] if row["op"] == Op.SEND else row["dst"]
            lane.sent = Message(first % self.plan.chunks, row["count"])
            self.links[lane.rank, to].append(lane.sent)

    def _check_owners(self, lane: Lane, runs: list[list[Any]]) -> None:
        """Direct: an array is the user's before its rank begins, and once it has finished."""
        owners = {cell[0] for run in runs for cell in run} - {lane.rank}
        for owner in owners if self.plan.direct else ():
            finished = all(other.tile == TILES for other in self.lanes_of[owner])
            if (owner, 0) not in self.entered or finished:
                raise Harm("touches an array that is the user's")

    def _end(self, lane: Lane) -> None:
        row = lane.now
        if row["op"] not in (Op.SIGNAL, Op.WAIT):
            self._check_owners(lane, [[cell for cell, _ in lane.read + lane.marks]])
        own = dict(lane.marks)
        values: list[Any] = []
        for cell, before in lane.read:
            kept = self.memory.get(cell) is (own[cell] if cell in own else before)
            values.append(before if kept and before is not None else Garbage())
        if row["op"] == Op.SIGNAL:
            self.counters[lane.rank, row["arg"]] += 1
        count = row["count"]
        runs = [values[k : k + count] for k in range(0, len(values), count)] if count else []
        if lane.received:
            runs.append(lane.received.values)
        result = runs[0] if runs else []
        for run in runs[1:]:
            result = [add(a, b) for a, b in zip(result, run, strict=True)]
        for index, (cell, mark) in enumerate(lane.marks):
            kept = self.memory.get(cell) is mark
            self.memory[cell] = result[index % count] if kept else Garbage()
        if lane.sent:
            lane.sent.values, lane.sent.complete = result, True
        self._advance(lane)

    def _advance(self, lane: Lane) -> None:
        lane.under_way = False
        lane.step += 1
        if lane.step < len(lane.program):
            return
        lane.step, lane.tile, left = 0, lane.tile + 1, lane.tile
        rank = lane.rank
        if self.plan.collective is Collective.BARRIER:
            out = all(other.tile > left for other in self.lanes_of[rank])
            if out and any((peer, left) not in self.entered for peer in range(self.plan.ranks)):
                raise Harm("left the barrier before all have entered")

    def run(self) -> None:
        """Runs to the end in a random order; some lanes are hurried, others held back."""
        weight = {id(lane): self.rng.random() for lane in self.lanes}
        fair = self.rng.random() < 0.3
        while True:
            busy = [lane for lane in self.lanes if lane.tile < TILES]
            if not busy:
                break
            ready = [
                lane
                for lane in busy
                if (self._can_end(lane) if lane.under_way else self._can_begin(lane))
            ]
            if not ready:
                raise Harm("nobody can go on")
            if fair:
                lane = self.rng.choice(ready)
            else:
                lane = max(ready, key=lambda lane: weight[id(lane)])
                if self.rng.random() < 0.02:
                    weight[id(lane)] = self.rng.random()
            if lane.under_way:
                self._end(lane)
            else:
                self._begin(lane)
        if any(len(sent) != self.taken[link] for link, sent in self.links.items()):
            raise Harm("a message is left over")
        self._check_result()


def harm_of(plan: Plan, seed: str, runs: int) -> str | None:
    """What goes wrong in some of these runs, or None."""
    for number in range(runs):
        rng = random.Random(f"{seed}/{number}")
        try:
            Machine(plan, rng, buffered=number % 2 == 1).run()
        except Harm as harm:
            return str(harm)
    return None


# Mutations.

FIELDS = ["op", "lane", "dep", "peer", "peer2", "src", "dst", "count", "flags", "arg", "space"]
MOVES = ["swap", "delete", "duplicate", "move"]


def mutated(plan: Plan, rng: random.Random) -> Plan:
    """The plan with one instruction changed."""
    programs = [program.copy() for program in plan.programs]
    rank = rng.choice([r for r, program in enumerate(programs) if len(program)])
    index = rng.randrange(len(programs[rank]))
    kind = rng.choice(FIELDS + MOVES)
    if kind in MOVES:
        programs[rank] = moved(programs[rank], index, kind, rng)
    else:
        change_field(plan, programs[rank], index, kind, rng)
    return dataclasses.replace(plan, programs=tuple(programs))


def moved(program: Any, index: int, kind: str, rng: random.Random) -> Any:
    order = list(range(len(program)))
    if kind == "delete":
        order.pop(index)
    elif kind == "duplicate":
        order.insert(index, index)
    elif kind == "swap":
        # Two instructions change places; each stays in the lane of its new place.
        other = rng.choice([index - 1, index + 1, rng.randrange(len(program))]) % len(program)
        lanes = program["lane"].copy()
        order[index], order[other] = order[other], order[index]
        swapped = program[order]
        swapped["lane"] = lanes
        return swapped
    else:
        # To the begin or the end of another lane.
        program = program.copy()
        program["lane"][index] = rng.randrange(int(program["lane"].max()) + 2)
        order = sorted(
            order, key=lambda i: (program["lane"][i], rng.random() if i == index else 0.5)
        )
    return program[order]


def change_field(plan: Plan, program: Any, index: int, kind: str, rng: random.Random) -> None:
    row = program[index]
    near = rng.choice([-1, 1, 2])
    if kind == "dep":
        lane = rng.choice([255, *set(program["lane"].tolist())])
        length = int(np.count_nonzero(program["lane"] == lane))
        row["dep_lane"] = lane
        row["dep_step"] = rng.randrange(length) if length else 0
    elif kind == "space":
        side = rng.choice(["src_space", "dst_space"])
        row[side] = rng.choice([0, 1, 2, 3, 255])
    elif kind in ("peer", "peer2"):
        row[kind] = rng.randrange(-1, plan.ranks)
    elif kind == "op":
        row["op"] = rng.randrange(9)
        if rng.random() < 0.5:  # a likely neighbour, with fields as it needs them
            row["op"], row["src_space"], row["src"] = Op.RECV, 255, 0
            if row["dst_space"] == 255:
                row["dst_space"], row["dst"] = 1, row["src"]
    elif kind == "lane":
        row["lane"] = (int(row["lane"]) + near) % 4
    elif kind == "flags":
        row["flags"] = rng.randrange(16)
    elif kind == "arg":
        row["arg"] = rng.choice([int(row["arg"]) ^ 1, rng.randrange(4), rng.randrange(4) << 16 | 1])
    else:
        row[kind] = max(0, int(row[kind]) + near)


PER_CASE = 100
RUNS_OF_GOOD = 10
RUNS_OF_ACCEPTED = 16


def plans_of(collective: Collective, name: str) -> Iterator[tuple[str, Plan]]:
    for ranks in (2, 3, 4, 6):
        root = 1 if collective.rooted else 0
        yield f"{collective.label}/{name}/{ranks}", build(collective, name, ranks, root)


# The kernels run what their twins say, which are here already.
ALL = [
    (collective, name)
    for collective in Collective
    for name in algorithms(collective)
    if name not in ("line", "fetch")
]


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_machine_finds_no_harm_in_good_plans(collective: Collective, name: str) -> None:
    """The machine runs every plan to the right end, in every order it tries."""
    for seed, plan in plans_of(collective, name):
        assert harm_of(plan, seed, RUNS_OF_GOOD) is None, seed


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_harmful_mutations_are_refused(collective: Collective, name: str) -> None:
    """What the verifier lets pass is harmless, whatever single instruction was changed."""
    refused = accepted = 0
    for base, plan in plans_of(collective, name):
        verify(plan)
        for number in range(PER_CASE):
            seed = f"{base}/{number}"
            mutant = mutated(plan, random.Random(seed))
            if mutant.hash == plan.hash:
                continue
            try:
                verify(mutant)
            except PlanError:
                refused += 1
                continue
            accepted += 1
            harm = harm_of(mutant, seed, RUNS_OF_ACCEPTED)
            assert harm is None, f"mutation {seed} was let pass, but {harm}"
    print(f"{collective.label} by {name}: {refused} mutations refused, {accepted} harmless")

    assert refused > 2 * accepted


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_most_refused_mutations_do_harm(collective: Collective, name: str) -> None:
    """The verifier is strict, but not for the sake of it: the machine confirms most refusals."""
    refused = harmful = 0
    for base, plan in plans_of(collective, name):
        for number in range(PER_CASE // 4):
            seed = f"{base}/{number}"
            mutant = mutated(plan, random.Random(seed))
            try:
                verify(mutant)
            except PlanError:
                refused += 1
                harmful += harm_of(mutant, seed, RUNS_OF_GOOD) is not None
    print(f"{collective.label} by {name}: {harmful} of {refused} refused mutations do harm")

    assert harmful > refused / 2
