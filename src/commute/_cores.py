# SPDX-License-Identifier: Apache-2.0
"""How many cores this process may use: by its affinity and by the quota of its control group.

A quota is set on a control group or on one above it; the smallest counts. /proc/self/cgroup names
the group, in lines of "number:controllers:path". Version 2 has one line without controllers, and
keeps "quota period" in cpu.max; version 1 has a line, and a folder, for the controller cpu, and
keeps the two in files of their own. In a container the path may be one of the host's that is not
visible inside: then the root of what is mounted is the container's own group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")

# For an environment: processes that compute in the core need no threads of a linear algebra
# library. They take their time as soon as it is imported, and stand in the way of forks.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def usable_cores() -> float:
    """The smaller of the two limits; not whole where a quota is not."""
    return min(float(len(os.sched_getaffinity(0))), quota())


def quota(mount: Path = _MOUNT, own: Path = _OWN) -> float:
    """The cores that the control groups of this process allow; infinite without a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf
    return min((_limit(folder) for folder in _folders(mount, lines)), default=math.inf)


def _folders(mount: Path, lines: list[str]) -> Iterator[Path]:
    """Every folder that may hold a limit: the group's own, and those above it."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in (mount / controllers, mount / "cpu") if controllers else (mount,):
            for part in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield root / str(part).lstrip("/")


def _limit(folder: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            limit, period = " ".join((folder / name).read_text() for name in names).split()
            # "max" in version 2, -1 in version 1.
            return math.inf if limit in ("max", "-1") else int(limit) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf
