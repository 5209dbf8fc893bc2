# SPDX-License-Identifier: Apache-2.0
"""The job of a run: starts the workers of a plan, and ends with them.

    python -m commute.learn.job STARTER     the path of the plan comes on standard input

It is a process of its own, so that a run can be started from anywhere: a notebook, a thread, a
command that shows a display. It ends with whoever started it, however that ended; `start` has the
other end. The workers are forked from it, so that nothing is imported twice.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path

from commute.cluster.forked import heed, importing, name_process
from commute.learn.documents import decoded
from commute.learn.result import OUTPUT
from commute.learn.settings import Plan

__all__ = ["begin", "main", "perform"]

_PR_SET_PDEATHSIG = 1
SAVING_S = 600.0  # how long a run that was interrupted may take to save what it has
# What the launcher, the workers and their servers import on their way.
_NEEDED = (
    "commute.cluster.launch",
    "commute.learn.worker",
    "commute._member",
    "commute.plan.verifier",
    "commute.store.server",
    "commute.store.saving",
)


def main(starter: int) -> int:
    """A job that is a new Python; `starter` is the process that has started it."""
    begin(starter)
    path = sys.stdin.readline()
    return perform(path[:-1]) if path.endswith("\n") else 0


def begin(starter: int) -> None:
    """What can be done before there is a plan."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        sys.exit(1)  # it has gone already
    name_process("commute-job")
    if os.getsid(0) != os.getpid():
        os.setsid()  # Ctrl-C of the terminal comes to the starter alone
    with importing():
        for name in _NEEDED:
            importlib.import_module(name)


def perform(path: str) -> int:
    """Runs the workers of the plan that is in a file."""
    from commute.cluster.launch import Job, launch  # `begin` has them, while the starter is busy

    plan = decoded(Path(path).read_bytes(), Plan)
    _print_to(Path(plan.folder) / OUTPUT)
    heed(signal.SIGINT, signal.default_int_handler)
    env = {**os.environ, "COMMUTE_SERVERS": str(plan.training.servers)}
    job = Job(command=lambda: _work(plan), ranks=plan.training.workers, interrupt_s=SAVING_S)
    return launch(job, env)


def _print_to(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for place in (1, 2):
        os.dup2(fd, place)
    os.close(fd)


def _work(plan: Plan) -> int:
    from commute.learn import worker

    name_process("commute-worker")
    return worker.main(plan)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
