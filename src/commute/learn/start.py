# SPDX-License-Identifier: Apache-2.0
"""Starting the job of a run before there is a plan: it imports what the workers need while the
first lines of the data are looked at, and is told by one line where the plan is.

    forked     by the command, which has no threads, and nothing that a fork should not take along
    executed   `python -m commute.learn.job` from any other program; the line comes on its standard
               input
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from commute._cores import ONE_THREAD
from commute.cluster.forked import Understudy, has_threads

__all__ = ["JobProcess", "waiting_job"]


class _Executed(subprocess.Popen[bytes]):
    """A job that is a new Python; it is told as an understudy is."""

    def tell(self, word: str) -> None:
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(f"{word}\n".encode())
            self.stdin.flush()
        self.dismiss()

    def dismiss(self) -> None:
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


JobProcess = _Executed | Understudy


@contextlib.contextmanager
def waiting_job(*, forked: bool = False) -> Iterator[JobProcess]:
    """A job that waits for the path of its plan; after the block it has ended.

    Args:
        forked: this process is ours alone, so that it may be forked, if it has no threads.
    """
    job = _fork() if forked and not has_threads() else _execute()
    try:
        yield job
    finally:
        job.dismiss()
        if job.poll() is None:
            job.kill()
            job.wait()


def _fork() -> Understudy:
    from commute.learn.job import begin, perform

    starter = os.getpid()
    return Understudy(perform, prepare=lambda: begin(starter))


def _execute() -> _Executed:
    # As of an understudy, Ctrl-C is held back until it has a plan.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return _Executed(
            [sys.executable, "-m", "commute.learn.job", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**ONE_THREAD, **os.environ},
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
