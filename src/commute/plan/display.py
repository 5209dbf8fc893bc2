# SPDX-License-Identifier: Apache-2.0
"""A plan as text that a person can read: a header, then a block per rank with a column per lane.

Each line is a step. "after 1.4" means: begins when lane 1 of this rank has ended step 4. Lanes
that do not fit beside the others go below them.
"""

from __future__ import annotations

from itertools import zip_longest

from .instructions import NO_LANE, Program, describe
from .plan import Plan
from .verifier import verify

_LINKS_NAMED = 8
_LINE = 110  # characters of a line, beyond which further lanes go below
_GAP = "   "


def show(plan: Plan, rank: int | None = None) -> str:
    """The whole plan, or what one rank does; verified first, so it shows no plan that is wrong."""
    report = verify(plan)
    what = f"{plan.collective.label} by {plan.algorithm} on {_count(plan.ranks, 'rank')}"
    if plan.collective.rooted:
        what += f", root {plan.root}"
    lines = [
        what,
        f"  {_count(plan.chunks, 'chunk')} in {_count(plan.waves, 'wave')}, "
        f"{_count(report.steps, 'step')} on the longest chain, "
        f"{_count(report.messages, 'message')}, {_count(report.instructions, 'instruction')}",
        *_links(plan),
        f"  adds up in rank order: {'yes' if report.rank_order else 'no'}; plan {plan.hash:016x}",
    ]
    for number in range(plan.ranks) if rank is None else [rank]:
        lines += ["", *_rank(plan, number)]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _links(plan: Plan) -> list[str]:
    """Links by how much of a block they carry, the busiest first."""
    unit = "the array" if max(plan.blocks[:2]) == 1 else "a block"
    by_load: dict[int, list[str]] = {}
    for (a, b), chunks in plan.links().items():
        by_load.setdefault(chunks, []).append(f"{a}->{b}")
    lines = []
    for chunks, names in sorted(by_load.items(), reverse=True):
        shown = ", ".join(names[:_LINKS_NAMED])
        more = f" and {len(names) - _LINKS_NAMED} more" if len(names) > _LINKS_NAMED else ""
        lines.append(f"  {chunks / plan.chunks:.2f} x {unit} on {shown}{more}")
    return lines


def _rank(plan: Plan, rank: int) -> list[str]:
    program = plan.programs[rank]
    peers = ", ".join(str(peer) for peer in plan.peers(rank))
    title = f"rank {rank}" + (f", with {peers}" if peers else "")
    if len(program) == 0:
        return [f"{title}: nothing to do"]
    lines, width = [title], 0
    lanes: list[list[str]] = []
    for number in range(int(program["lane"].max()) + 1):
        lane = [f"lane {number}", *_lane(program[program["lane"] == number])]
        longest = max(len(text) for text in lane)
        if lanes and width + longest > _LINE:
            lines += [*_columns(lanes), ""]
            lanes, width = [], 0
        lanes.append([text.ljust(longest) for text in lane])
        width += longest + len(_GAP)
    return lines + _columns(lanes)


def _columns(lanes: list[list[str]]) -> list[str]:
    """Lanes side by side; their first lines are titles."""
    lines = []
    for step, row in enumerate(zip_longest(*lanes, fillvalue=None), -1):
        cells = (
            " " * len(lane[0]) if text is None else text
            for text, lane in zip(row, lanes, strict=True)
        )
        lines.append(f"  {'step' if step < 0 else f'{step:4}'}  {_GAP.join(cells)}".rstrip())
    return lines


def _lane(instructions: Program) -> list[str]:
    words = [describe(instruction) for instruction in instructions]
    longest = max(len(text) for text in words)
    lines = []
    for text, instruction in zip(words, instructions, strict=True):
        if instruction["dep_lane"] != NO_LANE:
            after = f"after {instruction['dep_lane']}.{instruction['dep_step']}"
            text = f"{text.ljust(longest)}  {after}"
        lines.append(text)
    return lines
