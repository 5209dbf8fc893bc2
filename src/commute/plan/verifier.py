# SPDX-License-Identifier: Apache-2.0
"""The verifier: proves a plan before it runs, on the very arrays that are executed. (Where a
hand-written kernel stands for a plan, tests compare the two: algorithms/line.py.)

    form.py      every field is valid, in bounds, and each message has two ends
    order.py     no deadlock, even if links hold nothing
    races.py     no two unordered accesses to one chunk, in one tile or the next
    meaning.py   every contribution is counted exactly once, and all ranks get the same bits

It needs no length and no dtype, and the time it takes is that of a few passes over the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .form import read
from .meaning import check_meaning
from .order import clocks, order
from .plan import Plan
from .races import check_direct, check_last_tile, check_races, settled, tiles_to_unroll

# A proof takes some 10 us per instruction. Up to this many (a ring of 16 ranks has 1,920) nobody
# notices it when a plan is bound; larger plans of ours are proved by the tests, up to 128 ranks.
PROVED_AT_BINDING = 4096


@dataclass(frozen=True)
class Report:
    """What is known about a plan that has been proved."""

    instructions: int
    messages: int
    steps: int  # messages, or signals, on the longest chain in which each waits for the one before
    rank_order: bool  # every sum is ((x0 + x1) + x2) + ...; true where nothing is summed
    settled: tuple[bool, ...]  # per rank: its outbox is its own again once it has finished


def verify(plan: Plan, depth: int = 0) -> Report:
    """Proves the plan right, or raises PlanError, which says where it is wrong.

    Args:
        depth: messages that a link holds. 0, the default, is the strictest: nothing is assumed.
    """
    if depth < 0:
        raise ValueError(f"a link holds at least 0 messages, got {depth}")
    table = read(plan)
    ordered = order(table, depth)
    times = clocks(ordered, tiles_to_unroll(table))
    check_races(times)
    check_last_tile(times)
    rank_order = check_meaning(times)
    steps, messages = ordered.steps(), len(table.sender)
    alone = settled(times)
    check_direct(times, alone)
    return Report(len(table), messages, steps, rank_order, alone)


def prove(plan: Plan) -> Report | None:
    """Verifies a plan that is about to be bound, once, unless it is too large for that.

    Raises:
        PlanError: it must not be executed.
    """
    if sum(len(program) for program in plan.programs) > PROVED_AT_BINDING:
        return None
    return _proved(plan)


@lru_cache(maxsize=256)
def _proved(plan: Plan) -> Report:
    return verify(plan)
