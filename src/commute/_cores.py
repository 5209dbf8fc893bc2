# SPDX-License-Identifier: Apache-2.0
"""How many cores this process may use: by its affinity and by the quota of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> float:
    """The smaller of the two limits; not whole where a quota is not."""
    return min(float(len(os.sched_getaffinity(0))), quota())


def quota() -> float:
    """The cores that the control group allows, by cgroup version 2; infinite without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf
