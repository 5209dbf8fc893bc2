# SPDX-License-Identifier: Apache-2.0
"""Reads a plan's arrays as one table, and refuses what has no meaning.

First part of the verifier. What leaves here as a `Table` has valid fields, operands inside their
spaces, dependencies that exist, and each message, signal and wait paired with its other end. The
later parts ask in which order things happen, and what they compute.

All checks look at columns of the whole plan at once; `refuse` names the first instruction that
fails one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .instructions import (
    COUNTERS,
    FORMS,
    INSTRUCTION,
    NO_LANE,
    NO_PEER,
    Flag,
    Op,
    Program,
    Space,
    describe,
)
from .plan import Plan, PlanError, arrays_of, user_blocks

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SPACES = 4


def _allowed(side: str) -> Bools:
    table = np.zeros((len(Op), 256), dtype=bool)
    for op, form in FORMS.items():
        spaces = form.src if side == "src" else form.dst
        table[op, [int(space) for space in spaces or (Space.NONE,)]] = True
    return table


_SRC, _DST = _allowed("src"), _allowed("dst")
_FLAGS = np.array([form.flags for form in FORMS.values()])
_SENDS = np.array([form.sends for form in FORMS.values()])
_RECEIVES = np.array([form.receives for form in FORMS.values()])


@dataclass
class Table:
    """All instructions of all ranks, rank by rank, as columns; an index is an instruction."""

    plan: Plan
    rows: Program
    rank: Ints
    step: Ints  # within its lane
    lane: Ints  # numbered through over all ranks
    lane_first: Ints  # per lane: index of its first instruction
    lane_length: Ints  # per lane
    columns: dict[str, Ints]
    dep: Ints  # index of the instruction it comes after, or -1
    # Messages in order of direction and time: message m goes from sender[m] to receiver[m].
    sender: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    receiver: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    direction: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    # Waits: waiter[w] comes after signaller[w] of the tile lag[w] tiles ago.
    waiter: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    signaller: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    lag: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def where(self, index: int) -> str:
        """An instruction and its place, for error messages."""
        row = self.rows[index]
        place = f"rank {self.rank[index]}, lane {row['lane']}, step {self.step[index]}"
        return f"{place} ({describe(row)})"

    def refuse(self, bad: Bools, why: str) -> None:
        """Raises for the first instruction marked bad, with its fields filled into `why`."""
        if bad.any():
            index = int(np.argmax(bad))
            values = {name: int(column[index]) for name, column in self.columns.items()}
            raise PlanError(f"{self.where(index)}: {why.format(**values)}")

    def is_op(self, *ops: Op) -> Bools:
        return np.isin(self["op"], [int(op) for op in ops])

    def expand(self, indices: Ints) -> tuple[Ints, Ints]:
        """Runs as single chunks: for each chunk, its instruction and its place in the run."""
        counts = self["count"][indices]
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return np.repeat(indices, counts), offsets


def read(plan: Plan) -> Table:
    """The table of a plan whose every field is valid, or PlanError."""
    _check_header(plan)
    table = _columns(plan)
    _check_fields(table)
    _check_lanes(table)
    _check_operands(table)
    _pair_messages(table)
    _pair_signals(table)
    return table


def _check_header(plan: Plan) -> None:
    if plan.ranks < 1 or len(plan.programs) != plan.ranks:
        raise PlanError(f"plan of {plan.ranks} ranks has {len(plan.programs)} programs")
    if not 0 <= plan.root < plan.ranks or (plan.root and not plan.collective.rooted):
        raise PlanError(
            f"{plan.collective.label} on {plan.ranks} ranks cannot have root {plan.root}"
        )
    if plan.direct and plan.blocks[Space.OUTBOX] != plan.blocks[Space.OUT]:
        raise PlanError(f"a direct plan has OUTBOX as OUT, got blocks {plan.blocks}")
    if plan.chunks < 1 or len(plan.blocks) != SPACES or min(plan.blocks) < 0:
        raise PlanError(f"plan has {plan.chunks} chunks and blocks {plan.blocks}")
    expected = user_blocks(plan.collective, plan.ranks)
    if plan.blocks[:2] != expected:
        got = plan.blocks[:2]
        raise PlanError(f"{plan.collective.label} has {expected} blocks of IN and OUT, got {got}")
    for rank, program in enumerate(plan.programs):
        if program.dtype != INSTRUCTION or program.ndim != 1:
            raise PlanError(f"program of rank {rank} is not a flat array of instructions")


def _columns(plan: Plan) -> Table:
    rows = np.concatenate(plan.programs)
    lengths = [len(program) for program in plan.programs]
    rank = np.repeat(np.arange(plan.ranks), lengths)
    columns = {name: rows[name].astype(np.int64) for name in INSTRUCTION.names or ()}
    index = np.arange(len(rows))
    key = rank * 256 + columns["lane"]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = key[1:] != key[:-1]
    lane_first = np.flatnonzero(first)
    lane_length = np.diff(np.append(lane_first, len(rows)))
    lane = np.cumsum(first) - 1
    step = index - lane_first[lane]
    nothing = np.full(len(rows), -1)
    return Table(plan, rows, rank, step, lane, lane_first, lane_length, columns, nothing)


def _check_fields(t: Table) -> None:
    t.refuse(t["op"] >= len(Op), "there is no such op")
    t.refuse((t["op"] == Op.PUT) & t.plan.direct, "a direct plan has nothing to put")
    op = t["op"]
    copies_outbox = (op == Op.COPY) & (t["src_space"] == Space.OUTBOX)
    messages = _SENDS[op] | _RECEIVES[op]
    with_peer = messages | (op == Op.WAIT) | copies_outbox
    passes_on = _SENDS[op] & _RECEIVES[op]
    third = _third(t)
    counting = (op == Op.SIGNAL) | (op == Op.WAIT)
    has_src, has_dst = t["src_space"] != Space.NONE, t["dst_space"] != Space.NONE

    t.refuse(~_SRC[op, t["src_space"]], "source space {src_space} is not allowed for it")
    t.refuse(~_DST[op, t["dst_space"]], "destination space {dst_space} is not allowed for it")
    t.refuse(t["flags"] & ~_FLAGS[op] != 0, "flags {flags} are not allowed for it")
    t.refuse(~with_peer & (t["peer"] != NO_PEER), "peer {peer} has no use here")
    t.refuse(~passes_on & (t["peer2"] != NO_PEER), "second peer {peer2} has no use here")
    t.refuse(~has_src & (op != Op.WAIT) & (t["src"] != 0), "source {src} has no use here")
    t.refuse(~has_dst & (t["dst"] != 0), "destination {dst} has no use here")
    t.refuse(~third & ~counting & (t["arg"] != 0), "argument {arg} has no use here")
    t.refuse(counting & (t["count"] != 0), "count {count} has no use here")
    t.refuse(~counting & (t["count"] == 0), "a run has at least one chunk")
    t.refuse((op == Op.SIGNAL) & (t["arg"] >= COUNTERS), "there is no counter {arg}")
    t.refuse((t["dep_lane"] == NO_LANE) & (t["dep_step"] != 0), "step {dep_step} of no lane")

    ranks = t.plan.ranks
    bad = with_peer & ((t["peer"] < 0) | (t["peer"] >= ranks))
    t.refuse(bad, f"peer {{peer}} is not a rank from 0 to {ranks - 1}")
    bad = passes_on & ((t["peer2"] < 0) | (t["peer2"] >= ranks))
    t.refuse(bad, f"second peer {{peer2}} is not a rank from 0 to {ranks - 1}")
    itself = (messages & (t["peer"] == t.rank)) | (t["peer2"] == t.rank)
    t.refuse(itself, "a rank exchanges nothing with itself")


def _third(t: Table) -> Bools:
    """Who has a third operand, in `arg`: a reduce_many what it adds, a put what it keeps."""
    keeps = (t["op"] == Op.PUT) & (t["flags"] & Flag.KEEP != 0)
    return np.asarray((t["op"] == Op.REDUCE_MANY) | keeps)


def _check_lanes(t: Table) -> None:
    lane = t["lane"]
    new_rank = np.ones(len(t), dtype=bool)
    new_rank[1:] = t.rank[1:] != t.rank[:-1]
    before = np.concatenate([[0], lane[:-1]])
    bad = np.where(new_rank, lane != 0, (lane != before) & (lane != before + 1))
    t.refuse(bad, "lanes must be sorted and numbered from 0 without a gap")
    t.refuse(lane == NO_LANE, "lane {lane} means none")

    lanes_of_rank = np.bincount(t.rank[t.lane_first], minlength=t.plan.ranks)
    first_lane = np.concatenate([[0], np.cumsum(lanes_of_rank)[:-1]])
    named = t["dep_lane"] != NO_LANE
    t.refuse(named & (t["dep_lane"] >= lanes_of_rank[t.rank]), "there is no lane {dep_lane}")
    t.refuse(named & (t["dep_lane"] == lane), "depends on its own lane")
    target = np.where(named, first_lane[t.rank] + t["dep_lane"], 0)
    if len(t):
        bad = named & (t["dep_step"] >= t.lane_length[target])
        t.refuse(bad, "lane {dep_lane} has no step {dep_step}")
        t.dep = np.where(named, t.lane_first[target] + t["dep_step"], -1)


def _check_operands(t: Table) -> None:
    plan = t.plan
    chunks_of = np.zeros(256, dtype=np.int64)
    chunks_of[:SPACES] = np.array(plan.blocks) * plan.chunks
    third = _third(t)
    beyond = np.where(t["op"] == Op.PUT, chunks_of[Space.OUT], chunks_of[Space.OUTBOX])
    sides = (
        ("src", t["src_space"] != Space.NONE, chunks_of[t["src_space"]]),
        ("dst", t["dst_space"] != Space.NONE, chunks_of[t["dst_space"]]),
        ("arg", third, beyond),
    )
    for name, used, size in sides:
        last = t[name] + t["count"] - 1
        t.refuse(used & (last >= size), f"{name} {{{name}}} + {{count}} is beyond its space")
        crosses = t[name] // plan.chunks != last // plan.chunks
        if name != "arg":
            crosses &= t[f"{name}_space"] != Space.SCRATCH  # whose blocks lie side by side
        t.refuse(used & crosses, f"{name} {{{name}}} + {{count}} crosses into the next block")
    # Chunks of different numbers differ in length, so data keeps its place in the block.
    both = (t["src_space"] != Space.NONE) & (t["dst_space"] != Space.NONE)
    moved = t["src"] % plan.chunks != t["dst"] % plan.chunks
    t.refuse(both & moved, "source and destination are different chunks of a block")
    moved = t["arg"] % plan.chunks != t["dst"] % plan.chunks
    t.refuse(third & moved, "joins different chunks of a block")
    same = (t["src_space"] == t["dst_space"]) & (t["src"] == t["dst"])
    t.refuse((t["op"] == Op.COPY) & same, "copies a chunk onto itself")

    at_root = t.rank == plan.root
    keeps = third & (t["op"] == Op.PUT)  # something in OUT
    has = {is_root: arrays_of(plan.collective, is_root) for is_root in (True, False)}
    for space in (Space.IN, Space.OUT):
        missing = np.where(at_root, not has[True][space], not has[False][space])
        bad = (t["src_space"] == space) | (t["dst_space"] == space)
        bad |= keeps & (space == Space.OUT)
        who = "all others" if has[False][space] else "the root"
        t.refuse(bad & missing, f"{plan.collective.label} has {space.name} on {who} only")


def _sorted(key: Ints, indices: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(key, kind="stable")
    return key[order], indices[order]


def _one_lane(t: Table, key: Ints, indices: Ints, what: str) -> None:
    """Things with one key must lie in one lane, as only a lane gives them an order."""
    mixed = (key[1:] == key[:-1]) & (t.lane[indices[1:]] != t.lane[indices[:-1]])
    if mixed.any():
        raise PlanError(f"{t.where(int(indices[1:][mixed][0]))}: {what} from more than one lane")


def _pair_messages(t: Table) -> None:
    """The k-th message sent from a to b is the k-th one that b receives from a."""
    ranks = t.plan.ranks
    sends, receives = np.flatnonzero(_SENDS[t["op"]]), np.flatnonzero(_RECEIVES[t["op"]])
    passes_on = t["op"] == Op.RECV_REDUCE_SEND
    to = np.where(passes_on, t["peer2"], t["peer"])[sends]
    sent, sends = _sorted(t.rank[sends] * ranks + to, sends)
    received, receives = _sorted(t["peer"][receives] * ranks + t.rank[receives], receives)
    _one_lane(t, sent, sends, "sends in one direction")
    _one_lane(t, received, receives, "receives from one rank")

    if len(sent) != len(received) or (sent != received).any():
        counts = [np.bincount(keys, minlength=ranks * ranks) for keys in (sent, received)]
        key = int(np.argmax(counts[0] != counts[1]))
        a, b = divmod(key, ranks)
        raise PlanError(
            f"rank {a} sends {counts[0][key]} messages to rank {b} in each tile, "
            f"which receives {counts[1][key]} from it"
        )
    chunks = t.plan.chunks
    position = np.where(passes_on | (t["src_space"] == Space.NONE), t["dst"], t["src"]) % chunks
    landing = t["dst"] % chunks
    differ = position[sends] != landing[receives]
    differ |= t["count"][sends] != t["count"][receives]
    if differ.any():
        m = int(np.argmax(differ))
        one, other = t.where(int(sends[m])), t.where(int(receives[m]))
        raise PlanError(f"{one}: is not the run that {other} receives")
    t.sender, t.receiver, t.direction = sends, receives, sent


def _pair_signals(t: Table) -> None:
    """A wait names the n-th signal of a counter in a tile; n = 0 is the last of the tile before."""
    signals = np.flatnonzero(t["op"] == Op.SIGNAL)
    key, signals = _sorted(t.rank[signals] << 16 | t["arg"][signals], signals)
    _one_lane(t, key, signals, "signals one counter")

    waits = np.flatnonzero(t["op"] == Op.WAIT)
    wanted = t["peer"][waits] << 16 | t["arg"][waits] & 0xFFFF
    first = np.searchsorted(key, wanted, side="left")
    per_tile = np.searchsorted(key, wanted, side="right") - first
    number = t["src"][waits]
    bad = np.zeros(len(t), dtype=bool)
    bad[waits] = number > per_tile
    t.refuse(bad, "rank {peer} does not signal that often in a tile")
    bad[waits] = per_tile == 0
    t.refuse(bad, "rank {peer} never signals this counter")
    t.waiter = waits
    t.signaller = signals[first + np.where(number > 0, number, per_tile) - 1]
    t.lag = (t["arg"][waits] >> 16) + (number == 0)
