# SPDX-License-Identifier: Apache-2.0
"""A plan as a drawing: ranks are columns, time goes down, an arrow is what one rank gets.

The time of the drawing has one unit per message, whatever its length, and each lane sends or
receives one at a time; adding up and copying cost nothing, reading an outbox costs a unit. Messages
that follow each other in one direction without waiting for anything count as one. Of a plan
in waves one is drawn: the others follow close behind it.

A drawing is one SVG file without scripts or references; hovering over an arrow names its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html import escape

import numpy as np

from .form import Ints, Table, read
from .instructions import Collective, Flag, Op, Space
from .order import Order, order
from .plan import Plan

COLUMN, ROW, LEFT, TOP, FOOT = 84, 40, 42, 66, 34  # pixels
_STYLE = (
    "text{font:12px sans-serif;fill:#222;text-anchor:middle}"
    ".t{font-weight:bold;text-anchor:start}.n{font-size:9px}"
    ".l{stroke:#bbb}path{fill:none;stroke-width:1.6}"
    ".c{stroke:#1d4ed8;marker-end:url(#c)}.a{stroke:#c2410c;marker-end:url(#a)}"
    ".m{stroke-dasharray:4 3}"
)
_COLOURS = {"c": "#1d4ed8", "a": "#c2410c"}
_LABELS_MAX = 200  # arrows; beyond, labels would only cover each other


@dataclass
class Arrow:
    """What goes from one rank to another, to arrive at a time."""

    source: int
    target: int
    time: int
    adds: bool
    memory: bool  # read from an outbox, or stored back into it
    runs: list[str] = field(default_factory=list)


def draw(plan: Plan) -> str:
    """The plan as an SVG."""
    one = _first_wave(plan)
    found = arrows(one)
    rows = max((arrow.time for arrow in found), default=0)
    width = 2 * LEFT + COLUMN * (plan.ranks - 1)
    title = f"{plan.collective.label} by {plan.algorithm}, {plan.ranks} ranks"
    if plan.collective.rooted:
        title += f", root {plan.root}"
    parts = [
        *_frame(max(width, 300), TOP + ROW * rows + FOOT, title),
        *_columns(plan.ranks, rows),
        *(_arrow(arrow, labelled=len(found) <= _LABELS_MAX) for arrow in found),
        *_legend(plan, found, TOP + ROW * rows + FOOT - 10),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def arrows(plan: Plan) -> list[Arrow]:
    """All arrows of one tile, in order of time."""
    table = read(plan)
    joined = _joined(table)
    ends = _times(order(table, 0), joined)
    found: dict[tuple[int, int, int, bool], Arrow] = {}

    def add(time: int, source: int, target: int, run: str, adds: bool, memory: bool) -> None:
        key = source, target, time, adds
        found.setdefault(key, Arrow(*key, memory)).runs.append(run)

    for sender, receiver in zip(table.sender.tolist(), table.receiver.tolist(), strict=True):
        adds = bool(table["op"][receiver] != Op.RECV)
        run = _run(table, "src" if table["op"][sender] == Op.SEND else "dst", sender)
        ranks = int(table.rank[sender]), int(table.rank[receiver])
        add(int(ends[receiver]), *ranks, run, adds, memory=False)
    for index in np.flatnonzero(_reads_outboxes(table)).tolist():
        rank, adds = int(table.rank[index]), bool(table["op"][index] == Op.REDUCE_MANY)
        owners = [int(table["peer"][index])] if not adds else _others(plan, rank)
        for owner in owners:
            run = _run(table, "arg" if adds else "src", index)
            add(int(ends[index]), owner, rank, run, adds, memory=True)
            if table["flags"][index] & Flag.BACK:
                add(int(ends[index]) + 1, rank, owner, run, adds=False, memory=True)
    if plan.collective is Collective.BARRIER:  # where signals are all there is
        for waiter, signaller in zip(table.waiter.tolist(), table.signaller.tolist(), strict=True):
            ranks = int(table.rank[signaller]), int(table.rank[waiter])
            add(int(ends[waiter]) + 1, *ranks, "signal", adds=False, memory=True)
    return sorted(found.values(), key=lambda arrow: (arrow.time, arrow.source, arrow.target))


def _others(plan: Plan, rank: int) -> list[int]:
    return [other for other in range(plan.ranks) if other != rank]


def _first_wave(plan: Plan) -> Plan:
    """What `pipelined` has made `waves` of."""
    if plan.waves == 1:
        return plan
    chunks = plan.chunks // plan.waves
    programs = []
    for program in plan.programs:
        one = program[:: plan.waves].copy()
        one["dep_step"] //= plan.waves
        for name in ("src", "dst"):
            block, chunk = np.divmod(one[name], plan.chunks)
            one[name] = block * chunks + chunk
        programs.append(one)
    return replace(plan, chunks=chunks, waves=1, programs=tuple(programs))


def _joined(table: Table) -> Ints:
    """1 for sends and receives that belong to the message before them."""
    joined = np.zeros(len(table), dtype=np.int64)
    sender = table.sender
    same = table.direction[1:] == table.direction[:-1]
    waits = (table.dep[sender[1:]] >= 0) & (table.dep[sender[1:]] != table.dep[sender[:-1]])
    follows = (sender[1:] == sender[:-1] + 1) & (table.receiver[1:] == table.receiver[:-1] + 1)
    chosen = np.flatnonzero(same & follows & ~waits) + 1
    joined[sender[chosen]] = joined[table.receiver[chosen]] = 1
    return joined


def _reads_outboxes(table: Table) -> Ints:
    of_peer = (table["src_space"] == Space.OUTBOX) & (table["peer"] != table.rank)
    return np.asarray((table["op"] == Op.REDUCE_MANY) | of_peer, dtype=np.int64)


def _times(ordered: Order, joined: Ints) -> Ints:
    """When each instruction ends, if all that is not joined to another takes a unit.

    A receive takes its unit while it may still wait for something else, as the message is on its
    way meanwhile: it ends a unit after the step before it in its lane.
    """
    table = ordered.table
    n = len(table)
    receives = table.is_op(Op.RECV, Op.RECV_REDUCE)
    sends = table.is_op(Op.SEND, Op.RECV_REDUCE_SEND)
    cost = np.where(sends, 1 - joined, _reads_outboxes(table))
    time = np.zeros(2 * n + 1, dtype=np.int64)
    before = np.where((ordered.distance == 0) & (ordered.before >= 0), ordered.before, 2 * n)
    for events in ordered.levels:
        time[events] = time[before[events]].max(axis=1)
        ending = events[events >= n]
        own = ending - n
        in_lane = time[before[own, 0]] + np.where(receives[own], 1 - joined[own], 0)
        time[ending] = np.maximum.reduce(
            [time[ending], time[own] + cost[own], np.where(receives[own], in_lane, 0)]
        )
    return time[n : 2 * n]


def _run(table: Table, side: str, index: int) -> str:
    first, count = int(table[side][index]), int(table["count"][index])
    return f"{first}" if count == 1 else f"{first}:{first + count}"


def _frame(width: int, height: int, title: str) -> list[str]:
    heads = [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"'
        f' markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:{colour}"/></marker>'
        for name, colour in _COLOURS.items()
    ]
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f"<defs>{''.join(heads)}</defs>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="12" y="20">{escape(title)}</text>',
    ]


def _columns(ranks: int, rows: int) -> list[str]:
    lines = []
    for rank in range(ranks):
        x = LEFT + COLUMN * rank
        lines.append(f'<text x="{x}" y="{TOP - 20}">{rank}</text>')
        bottom = TOP + ROW * rows + 6
        lines.append(f'<line class="l" x1="{x}" y1="{TOP - 12}" x2="{x}" y2="{bottom}"/>')
    return lines


def _arrow(arrow: Arrow, *, labelled: bool) -> str:
    x, to = (LEFT + COLUMN * rank for rank in (arrow.source, arrow.target))
    y, below = TOP + ROW * (arrow.time - 1), TOP + ROW * arrow.time - 4
    chunks = ", ".join(arrow.runs)
    kind = ("a" if arrow.adds else "c") + (" m" if arrow.memory else "")
    title = f"{arrow.source} to {arrow.target}: {chunks}"
    text = f'<path class="{kind}" d="M{x} {y}L{to} {below}"><title>{title}</title></path>'
    if not labelled:
        return text
    # Near the tail, where arrows have not met yet.
    share = min(0.25, 22 / abs(to - x))
    at, down = round(x + share * (to - x)), round(y + share * (below - y))
    short = chunks if len(chunks) <= 11 else f"{chunks[:9]}.."
    return f'{text}<text class="n" x="{at}" y="{down - 2}">{short}</text>'


def _legend(plan: Plan, found: list[Arrow], y: int) -> list[str]:
    words = []
    if any(arrow.adds for arrow in found):
        words.append(("a", "adds"))
    if any(not arrow.adds for arrow in found):
        words.append(("c", "tells" if plan.collective is Collective.BARRIER else "copies"))
    lines, x = [], 12
    for kind, word in words:
        lines.append(f'<path class="{kind}" d="M{x} {y - 4}h26"/>')
        lines.append(f'<text x="{x + 34}" y="{y}" style="text-anchor:start">{word}</text>')
        x += 90
    if plan.waves > 1:
        note = f"one of {plan.waves} waves"
        lines.append(f'<text x="{x}" y="{y}" style="text-anchor:start">{note}</text>')
    return lines
