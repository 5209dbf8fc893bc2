# SPDX-License-Identifier: Apache-2.0
"""Plans: collectives as data, proved before they run.

Reading order: instructions.py (what a plan is made of), chunk.py (the rule that cuts arrays),
plan.py, program.py (how plans are written), algorithms/ (one page each), verifier.py with form.py,
order.py, races.py and meaning.py (the proof), choose.py (which one to run), display.py and
drawing.py.

Everything here is pure: no socket, no clock, no thread. The verifier and `show` are loaded when
they are first asked for: a group needs neither until it binds a plan.
"""

from typing import TYPE_CHECKING, Any

from .algorithms import algorithms, build
from .choose import (
    DIRECT,
    LINE_BYTES,
    candidates,
    choose,
    in_rank_order,
    shared_bounds,
    tile_bytes,
)
from .chunk import bounds
from .instructions import INSTRUCTION, SLOTS, Collective, Flag, Op, Space
from .plan import Plan, PlanError, arrays_of, pipelined

if TYPE_CHECKING:
    from .display import show
    from .drawing import draw
    from .verifier import Report, prove, verify

__all__ = [
    "DIRECT",
    "INSTRUCTION",
    "LINE_BYTES",
    "SLOTS",
    "Collective",
    "Flag",
    "Op",
    "Plan",
    "PlanError",
    "Report",
    "Space",
    "algorithms",
    "arrays_of",
    "bounds",
    "build",
    "candidates",
    "choose",
    "draw",
    "in_rank_order",
    "pipelined",
    "prove",
    "shared_bounds",
    "show",
    "tile_bytes",
    "verify",
]

_LATER = {
    "Report": "verifier",
    "draw": "drawing",
    "prove": "verifier",
    "show": "display",
    "verify": "verifier",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)
