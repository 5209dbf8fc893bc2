# SPDX-License-Identifier: Apache-2.0
"""Plans: collectives as data, proved before they run.

Reading order: instructions.py (what a plan is made of), chunk.py (the rule that cuts arrays),
plan.py, program.py (how plans are written), algorithms/ (one page each), verify.py with form.py,
order.py, races.py and meaning.py (the proof), choose.py (which one to run), show.py.

Everything here is pure: no socket, no clock, no thread.
"""

from .algorithms import algorithms, build
from .choose import candidates, choose, in_rank_order, tile_bytes
from .chunk import bounds
from .instructions import INSTRUCTION, SLOTS, Collective, Flag, Op, Space
from .plan import Plan, PlanError, pipelined
from .show import show
from .verify import Report, prove, verify

__all__ = [
    "INSTRUCTION",
    "SLOTS",
    "Collective",
    "Flag",
    "Op",
    "Plan",
    "PlanError",
    "Report",
    "Space",
    "algorithms",
    "bounds",
    "build",
    "candidates",
    "choose",
    "in_rank_order",
    "pipelined",
    "prove",
    "show",
    "tile_bytes",
    "verify",
]
