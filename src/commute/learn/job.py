# SPDX-License-Identifier: Apache-2.0
"""`python -m commute.learn.job plan.json`: starts the workers of a plan, and ends with them.

It is a process of its own, so that a run can be started from anywhere: a notebook, a thread, a
command that shows a display. It ends with whoever started it, however that ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from commute.cluster.launch import Job, launch
from commute.learn.documents import decoded
from commute.learn.settings import Plan

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
SAVING_S = 600.0  # how long a run that was interrupted may take to save what it has


def main(path: str, starter: int) -> int:
    """Runs the workers; `starter` is the process that has started this one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        return 1  # it has gone already
    plan = decoded(Path(path).read_bytes(), Plan)
    command = (sys.executable, "-m", "commute.learn.worker", path)
    env = {**os.environ, "COMMUTE_SERVERS": str(plan.training.servers)}
    job = Job(command=command, ranks=plan.training.workers, interrupt_s=SAVING_S)
    return launch(job, env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
