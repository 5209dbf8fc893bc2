# SPDX-License-Identifier: Apache-2.0
"""What is required, as rows, and whether it was met.

A requirement says: at these ranks, this size and call, ours is at least `ratio` times as fast as
the peer (and, where there is a `ratio_max`, at most that). "mpi" is the fastest of the MPIs, in or
out of place, "best peer" the fastest of those that stand beside the store; "wire" is the time the
links themselves need; "limit" is a bound on ours alone. With several runs the median of their
ratios decides.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.mpi_modes import MPIS, VARIANTS
from benchmarks.rounds import Cell, CellResult, size_text

NO_SLOWER = 0.95
OURS = "commute"
STORE_PEERS = ("ray", "rpc", "redis")
GROUPS = {"mpi": MPIS, "best peer": STORE_PEERS}


@dataclass(frozen=True)
class Requirement:
    peer: str
    ranks: int
    bytes: int
    ratio: float
    words: str  # the requirement as a person would say it
    call: str = "allreduce"
    ours: str = OURS
    ratio_max: float | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.ranks, self.bytes, self.call)


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        # A third digit only where a figure is decided; 50.1 times gloo needs no more.
        digits = 3 if self.median < 2 else 1
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}-{self.high:.{digits}f}]"


@dataclass(frozen=True)
class Verdict:
    requirement: Requirement
    per_run: tuple[Spread | None, ...]  # None: too much noise in that run

    @property
    def ratio(self) -> float | None:
        """The median over the runs; a run without a result counts as the worst."""
        medians = [spread.median if spread else 0.0 for spread in self.per_run]
        middle = statistics.median_low(medians)
        return middle or None

    @property
    def met(self) -> bool:
        row, ratio = self.requirement, self.ratio
        if ratio is None or ratio < row.ratio:
            return False
        return row.ratio_max is None or ratio <= row.ratio_max


def entries_of(peer: str, result: CellResult) -> list[str]:
    """The entries of a library, in and out of place, or of all libraries of a group."""
    names = GROUPS.get(peer, (peer,))
    wanted = {entry for name in names for entry in (name, *(f"{name} {v}" for v in VARIANTS))}
    return [entry for entry in result.rounds[0].seconds if entry in wanted]


def compare(result: CellResult, peer: str, ours: str = OURS) -> Spread | None:
    """Our speed over the peer's in this cell; the peer is taken in its fastest variant."""
    if not result.has_result:
        return None
    mine, theirs = (result.fastest(entries_of(name, result)) for name in (ours, peer))
    ratios = result.ratios(mine, theirs)
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


Run = Mapping[Cell, CellResult]


def judge(requirements: Iterable[Requirement], runs: Sequence[Run]) -> list[Verdict]:
    return [
        Verdict(row, tuple(compare(run[row.cell], row.peer, row.ours) for run in runs))
        for row in requirements
    ]


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = []
    for verdict in verdicts:
        row = verdict.requirement
        runs = ", ".join(
            str(spread) if spread else "no result: noise" for spread in verdict.per_run
        )
        word = "met    " if verdict.met else "NOT MET"
        place = f"{row.call:<14} {size_text(row.bytes):>6} x{row.ranks}"
        needs = f"{row.ratio:.3f}" + (f"-{row.ratio_max:.3f}" if row.ratio_max else "")
        lines.append(f"{word}  {place}  {row.words:<28} needs {needs}  got {runs}")
    met = sum(verdict.met for verdict in verdicts)
    lines.append(f"{met} of {len(verdicts)} figures met")
    return lines
