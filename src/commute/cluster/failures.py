# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, and what to tell about it.

When one rank fails the others fail because of it, often before it has finished dying. Who was
first is decided by, in this order:

    1. the coordinator's first word about a member (LOST, or the member's own LEAVE as failed), if
       we know how that rank ended;
    2. whichever came first: the end of a rank of ours, or another launcher's report of one of its.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commute.cluster.children import describe_exit, exit_code
from commute.cluster.control import Frame, Kind
from commute.cluster.nodes import is_launchers_report

__all__ = ["Failure", "Failures", "excerpt"]

_EXCERPT_LINES_MAX = 40
_TRACEBACK = b"Traceback (most recent call last):"
# What Python prints between the tracebacks of a chain of exceptions.
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed: `how` in words, `details` what it printed about it."""

    rank: int
    how: str
    details: bytes
    code: int
    note: str = ""

    def text(self) -> str:
        """The report, headline first."""
        note = f"commute: {self.note}\n" if self.note else ""
        headline = f"{note}commute: rank {self.rank} failed first ({self.how})"
        if not self.details:
            return f"{headline}; it wrote nothing to stderr"
        return f"{headline}:\n{self.details.decode('utf-8', 'replace')}"


class Failures:
    """Everything known about failed ranks of the job."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._own: dict[int, tuple[int, int]] = {}  # rank: pid, status
        self._reports: dict[int, Frame] = {}  # of other launchers
        self._order: list[int] = []
        self._named: Frame | None = None

    def add_own(self, rank: int, pid: int, status: int) -> None:
        self._own[rank] = (pid, status)
        self._order.append(rank)

    def add_told(self, frame: Frame) -> None:
        if is_launchers_report(frame):
            self._reports.setdefault(frame.rank, frame)
            self._order.append(frame.rank)
        elif self._named is None:
            self._named = frame

    def own(self, rank: int, tail: bytes) -> Failure | None:
        """The failure of a rank of this launcher."""
        if rank not in self._own:
            return None
        pid, status = self._own[rank]
        how = f"{describe_exit(status, pid)}, on host {self._host}, pid {pid}"
        return Failure(rank, how, excerpt(tail), exit_code(status))

    def first(self, tail: Callable[[int], bytes]) -> Failure | None:
        """The failure to report; None if no rank has failed."""
        if not self._order:
            return None
        named = self._named
        if named is not None and named.rank in self._order:
            return self._failure(named.rank, tail)
        failure = self._failure(self._order[0], tail)
        if named is None:
            return failure
        if named.kind is Kind.LEAVE and (details := excerpt(tail(named.rank))):
            # It said itself that it failed, and was ended by us before it could exit.
            return Failure(named.rank, f"{named.text}; slow to exit", details, 1)
        # It fell silent, say, and was ended by us: it has neither exit code nor traceback.
        note = f"rank {named.rank} was lost before: {named.text}"
        return Failure(failure.rank, failure.how, failure.details, failure.code, note)

    def _failure(self, rank: int, tail: Callable[[int], bytes]) -> Failure:
        own = self.own(rank, tail(rank))
        if own is not None:
            return own
        frame = self._reports[rank]
        how, _, details = frame.text.partition("\n")
        # Whatever the number says, a failed job must not look like a good one.
        code = frame.op if 0 < frame.op < 256 else 1
        return Failure(rank, how, details.encode(), code)


def excerpt(tail: bytes) -> bytes:
    """The last traceback in what a rank wrote to stderr, with its chain; else its last lines."""
    lines = tail.rstrip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.lstrip().startswith(_TRACEBACK)]
    if not starts:
        return b"\n".join(lines[-_EXCERPT_LINES_MAX:])
    start = starts.pop()
    while starts and any(line.strip() in _CHAINED for line in lines[starts[-1] : start]):
        start = starts.pop()
    return b"\n".join(lines[start:])
