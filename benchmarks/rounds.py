# SPDX-License-Identifier: Apache-2.0
"""The protocol of every measurement: interleaved rounds, their ratios, noisy rounds dropped.

A round of a cell (number of ranks, size, call) gives each entry one turn, in an order that rotates,
and lasts about a second. The time of a turn is the median of its samples. Ratios are formed inside
a round, between turns that are less than a second or so apart, and the median of the ratios is the
result: slow drift of the host cancels.

A round with more than 2% of stolen or foreign CPU is dropped and counted, and another is made,
until there are 7 clean ones or 21 have been tried. With fewer than 4 clean rounds a cell has no
result. `keep_noisy` keeps all, for trying a benchmark out on a busy host; such a bench never
succeeds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from benchmarks import noise
from benchmarks.jobs import Job, Turn
from benchmarks.workers.calls import BATCH_OF, SAMPLES_OF

ROUNDS = 7
ATTEMPTS_PER_ROUND = 3
BATCH_BYTES_MAX = 64 << 10
BATCH_CALLS_MAX = 100
BATCH_TOTAL_BYTES_MAX = 1 << 20
SAMPLES_MIN, SAMPLES_MAX = 3, 200


@dataclass(frozen=True)
class Cell:
    ranks: int
    bytes: int  # 0: a call without an array
    call: str = "allreduce"

    @property
    def batch(self) -> int:
        if self.call in BATCH_OF:
            return BATCH_OF[self.call]
        if self.bytes > BATCH_BYTES_MAX or self.call in SAMPLES_OF:
            return 1
        return min(BATCH_CALLS_MAX, BATCH_TOTAL_BYTES_MAX // max(1, self.bytes))

    def __str__(self) -> str:
        return f"{self.call} {size_text(self.bytes)} x{self.ranks}"


@dataclass(frozen=True)
class Entry:
    """A job in one of its variants: what a column of the raw results is about."""

    job: Job
    variant: str = "in place"

    @property
    def name(self) -> str:
        return self.job.name if self.variant == "in place" else f"{self.job.name} {self.variant}"

    def seconds(self, cell: Cell, samples: int) -> float:
        turn = Turn(cell.bytes, cell.batch, samples, self.variant, cell.call)
        return statistics.median(self.job.take(turn))


@dataclass(frozen=True)
class Round:
    seconds: dict[str, float]  # by entry
    stolen: float
    foreign: float
    kept: bool


@dataclass
class CellResult:
    cell: Cell
    wanted: int  # clean rounds; more than half of them make a result
    rounds: list[Round] = field(default_factory=list)

    @property
    def kept(self) -> list[Round]:
        return [r for r in self.rounds if r.kept]

    @property
    def dropped(self) -> int:
        return len(self.rounds) - len(self.kept)

    @property
    def has_result(self) -> bool:
        return 2 * len(self.kept) > self.wanted

    def median(self, entry: str) -> float:
        return statistics.median(r.seconds[entry] for r in self.kept)

    def fastest(self, entries: Sequence[str]) -> str:
        return min(entries, key=self.median)

    def ratios(self, ours: str, theirs: str) -> list[float]:
        """How many times faster ours was, round by round."""
        return [r.seconds[theirs] / r.seconds[ours] for r in self.kept]

    def with_entry(self, name: str, seconds: Callable[[Mapping[str, float]], float]) -> Self:
        """With a time that was not measured but follows from the round's, compared like a peer."""
        rounds = [replace(r, seconds={**r.seconds, name: seconds(r.seconds)}) for r in self.rounds]
        return replace(self, rounds=rounds)


def measure(
    cell: Cell,
    entries: Sequence[Entry],
    *,
    turn_seconds: float,
    rounds: int,
    keep_noisy: bool,
    say: Callable[[str], None],
) -> CellResult:
    samples = {entry.name: _samples_for(cell, entry, turn_seconds) for entry in entries}
    ours = [pid for entry in entries for pid in entry.job.pids]
    result = CellResult(cell, rounds)
    while len(result.kept) < rounds and len(result.rounds) < ATTEMPTS_PER_ROUND * rounds:
        start = len(result.rounds) % len(entries)
        before = noise.snapshot()
        seconds = {
            entry.name: entry.seconds(cell, samples[entry.name])
            for entry in (*entries[start:], *entries[:start])
        }
        heard = noise.between(before, noise.snapshot(), ours=ours)
        keep = keep_noisy or not heard.too_much
        result.rounds.append(Round(seconds, heard.stolen, heard.foreign, keep))
        say(f"{cell}: {len(result.kept)} of {rounds} rounds, {result.dropped} dropped")
        if not keep:
            time.sleep(0.5)  # bursts last; the next round would most likely fall into the same one
    return result


def _samples_for(cell: Cell, entry: Entry, turn_seconds: float) -> int:
    """As many samples as fill a turn; the trial is also the warm-up of this size."""
    if cell.call in SAMPLES_OF:
        entry.seconds(cell, 1)
        return SAMPLES_OF[cell.call]
    trial = entry.seconds(cell, 2) * cell.batch
    return min(SAMPLES_MAX, max(SAMPLES_MIN, round(turn_seconds / trial)))


def size_text(bytes: int) -> str:
    if bytes == 0:
        return "-"
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if bytes >= unit:
            return f"{bytes // unit} {name}"
    return f"{bytes} B"


def time_text(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
