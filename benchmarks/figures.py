# SPDX-License-Identifier: Apache-2.0
"""What is required, as rows, and whether it was met.

A requirement says: at these ranks and this size, ours is at least `ratio` times as fast as the
peer. "mpi" is the fastest of the MPIs, in or out of place; "wire" is the time the links themselves
need. With several runs the median of their ratios decides.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.mpi_modes import MPIS, VARIANTS
from benchmarks.rounds import Cell, CellResult, size_text

NO_SLOWER = 0.95
OURS = "commute"


@dataclass(frozen=True)
class Requirement:
    peer: str
    ranks: int
    bytes: int
    ratio: float
    words: str  # the requirement as a person would say it


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
        return self.ratio is not None and self.ratio >= self.requirement.ratio


def entries_of(peer: str, result: CellResult) -> list[str]:
    """The entries of a peer: an MPI in and out of place, "mpi" for all three of them."""
    names = MPIS if peer == "mpi" else (peer,)
    wanted = {name for mpi in names for name in (mpi, *(f"{mpi} {v}" for v in VARIANTS))}
    return [entry for entry in result.rounds[0].seconds if entry in wanted]


def compare(result: CellResult, peer: str, *, ours: str = OURS) -> Spread | None:
    """Our speed over the peer's in this cell; the peer is taken in its fastest variant."""
    if not result.has_result:
        return None
    ratios = result.ratios(ours, result.fastest(entries_of(peer, result)))
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


Run = Mapping[Cell, CellResult]


def judge(requirements: Iterable[Requirement], runs: Sequence[Run]) -> list[Verdict]:
    return [
        Verdict(row, tuple(compare(run[Cell(row.ranks, row.bytes)], row.peer) for run in runs))
        for row in requirements
        if all(Cell(row.ranks, row.bytes) in run for run in runs)
    ]


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = []
    for verdict in verdicts:
        row = verdict.requirement
        runs = ", ".join(
            str(spread) if spread else "no result: noise" for spread in verdict.per_run
        )
        word = "met    " if verdict.met else "NOT MET"
        place = f"{size_text(row.bytes):>6} x{row.ranks}"
        lines.append(f"{word}  {place}  {row.words:<22} needs {row.ratio:.3f}  got {runs}")
    met = sum(verdict.met for verdict in verdicts)
    lines.append(f"{met} of {len(verdicts)} figures met")
    return lines
