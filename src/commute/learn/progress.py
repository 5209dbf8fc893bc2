# SPDX-License-Identifier: Apache-2.0
"""What the workers report while they learn, added up by a table of the store itself.

worker: adds to its own sums; twice a second pushes what is new          (store "progress")
rank 0: pulls the sums of all, and writes a point as a line of JSON      (progress.jsonl)
the command: reads the lines as they come, and shows them                (fitting.py)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from commute.group import Group
from commute.learn.documents import encoded
from commute.learn.metrics import Metrics
from commute.learn.report import History, Point
from commute.learn.settings import Plan
from commute.store.sparse import SparseTable

__all__ = ["POINTS", "Line", "Progress"]

POINTS = "progress.jsonl"
EVERY_S = 0.5


class Line(msgspec.Struct):
    """What rank 0 tells the command."""

    point: Point
    fraction: float  # of all passes


class Progress:
    """One worker's sums, and on rank 0 the points made of all workers' sums."""

    def __init__(self, world: Group, plan: Plan, table: SparseTable) -> None:
        self._world, self._plan, self._table = world, plan, table
        self.new = Metrics()  # of examples since it was told last
        self._rounds_told = 0
        self._store = world.store("progress", staleness=None)
        self._sums = self._store.dense("sums", Metrics.SIZE + world.size + 1, "float64")
        self._passes_told = 0.0
        self._begin = self._told_at = time.monotonic()
        self.history = History()

    def report(self, rounds: int, passes: float, *, last: bool = False) -> None:
        """Tells the others, if it is time to, how many rounds and passes this worker has done."""
        now = time.monotonic()
        if now - self._told_at < EVERY_S and not last:
            return
        self._told_at = now
        sums = np.zeros(self._sums.shape)
        sums[: Metrics.SIZE] = self.new.array
        sums[Metrics.SIZE + self._world.rank] = rounds - self._rounds_told
        sums[-1] = (passes - self._passes_told) / self._world.size
        self._sums.push(sums)
        self.new, self._rounds_told, self._passes_told = Metrics(), rounds, passes
        if last:
            self._store.flush()
        elif self._world.rank == 0:
            self._point(self._sums.pull(), now)

    def total(self) -> Metrics:
        """Of all workers, once all have reported their last."""
        sums = self._sums.pull()
        if self._world.rank == 0:
            self._point(sums, time.monotonic())
        return Metrics.of(sums[: Metrics.SIZE])

    def _point(self, sums: np.ndarray[Any, Any], now: float) -> None:
        total = Metrics.of(sums[: Metrics.SIZE].copy())
        points = self.history.points
        if total.examples == (points[-1].examples if points else 0):
            return  # nothing new
        rounds = sums[Metrics.SIZE : -1]
        point = self.history.record(
            total,
            seconds=now - self._begin,
            features=self._table.count(),
            staleness=float(rounds.max() - rounds.min()),
        )
        with (Path(self._plan.folder) / POINTS).open("ab") as file:
            fraction = min(1.0, float(sums[-1]) / self._plan.training.epochs)
            file.write(encoded(Line(point, fraction)) + b"\n")
