# SPDX-License-Identifier: Apache-2.0
"""A proved plan as the core takes it."""

from __future__ import annotations

import numpy as np

from commute import _core
from commute import plan as plans


def core_plan(plan: plans.Plan, rank: int, *, settled: bool) -> _core.Plan:
    """One rank's part of a plan, for the core."""
    signals = np.zeros((plan.ranks, _core.SIGNALS), dtype=np.int64)
    for owner, program in enumerate(plan.programs):
        used = program["arg"][program["op"] == plans.Op.SIGNAL]
        np.add.at(signals[owner], used, 1)
    has_in, has_out = plans.arrays_of(plan.collective, rank == plan.root)
    blocks_in, blocks_out, *others = plan.blocks
    return _core.make_plan(
        int(plan.collective),
        plan.algorithm,
        rank,
        plan.ranks,
        plan.root,
        plan.hash,
        plan.chunks,
        (has_in * blocks_in, has_out * blocks_out, *others),
        plan.programs[rank].tobytes(),
        signals.ravel().tolist(),
        settled,
        plan.direct,
    )
