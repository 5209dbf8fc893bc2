# SPDX-License-Identifier: Apache-2.0
"""What a worker of a parameter server does in its turn: give an array, get the sum back.

The server keeps a table, an array of the same size that begins as zeros. An exchange adds the
worker's array to it and returns the sum. A sample is `batch` exchanges back to back, each with
buffers of its own, all rewritten before; after "after idle" everybody has slept for 10 ms first.

The n-th exchange gives other values than the one before, and the two halves of an array differ: an
answer that is old, or holds the wrong part, is found out. What an answer must hold depends on what
the server does with two workers (`Keeps`). As everywhere, all of it is checked in the first sample
of a size, and the ends and the middle of each half, spoilt before, in every other.
"""

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks.workers.calls import AFTER_IDLE
from benchmarks.workers.turns import Array, Rank, buffers, checked_places, take_turns

HALVES = 2
IDLE_SECONDS = 0.01

# One array, or an even number of equal parts: together, in this order, what the table holds.
Answer = Array | Sequence[Array]
Exchange = Callable[[], Answer]


class Keeps(enum.Enum):
    ROUNDS = "what all workers have given up to this exchange"
    ARRIVALS = "all that I have given, and whatever of the others' has arrived"
    LAST = "what I gave last: nothing is added up"


class Worker(Rank, Protocol):
    """What a parameter server's Python side has to offer to be measured."""

    keeps: Keeps

    def declare(self, table: str, bytes: int) -> None:
        """Make a table of zeros; every worker declares it."""
        ...

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        """Push `source`, get the sum; into `result` if the library can write there."""
        ...


def given(number: int) -> int:
    """What the n-th exchange, counted from 1, gives: times the worker's weight, times the half."""
    return 1 if number % 2 else 2


def total(number: int) -> int:
    """What the first n exchanges give together."""
    return number + number // 2


def bounds(keeps: Keeps, *, rank: int, workers: int, number: int, last: int) -> tuple[float, float]:
    """Lowest and highest that the first half may hold after exchange `number`.

    Worker r gives (r + 1) times `given`. `last` is the last exchange of the sample, beyond which no
    worker can be.
    """
    mine, others = rank + 1, workers * (workers + 1) // 2 - (rank + 1)
    match keeps:
        case Keeps.ROUNDS:
            low = high = (mine + others) * total(number)
        case Keeps.ARRIVALS:
            low = mine * total(number)
            high = low + others * total(last)
        case Keeps.LAST:
            low = high = mine * given(number)
    return float(low), float(high)


class Exchanges:
    """The buffers and exchanges of one size, with a table of their own."""

    def __init__(
        self, worker: Worker, *, table: str, bytes: int, batch: int, idle_seconds: float
    ) -> None:
        self._worker = worker
        self._idle_seconds = idle_seconds
        self._made = 0
        self._sources, self._results = buffers(bytes, batch), buffers(bytes, batch)
        worker.declare(table, bytes)
        worker.barrier()
        pairs = zip(self._sources, self._results, strict=True)
        self._exchanges = [worker.bind(table, source, result) for source, result in pairs]
        self.sample(check_all=True)  # touches every page and opens every connection

    def sample(self, *, check_all: bool = False) -> float:
        self._rewrite()
        self._worker.barrier()
        if self._idle_seconds:
            time.sleep(self._idle_seconds)
        start = time.perf_counter()
        answers = [exchange() for exchange in self._exchanges]
        seconds = time.perf_counter() - start
        last = self._made + len(answers)
        for number, answer in enumerate(answers, self._made + 1):
            self._check(answer, number=number, last=last, check_all=check_all)
        self._made = last
        return seconds / len(answers)

    def _rewrite(self) -> None:
        weight = self._worker.rank + 1
        for number, source in enumerate(self._sources, self._made + 1):
            for half, part in enumerate(source.reshape(HALVES, -1), 1):
                part.fill(half * weight * given(number))
        for part in (half for result in self._results for half in result.reshape(HALVES, -1)):
            part[checked_places(part)] = 0

    def _check(self, answer: Answer, *, number: int, last: int, check_all: bool) -> None:
        worker = self._worker
        low, high = bounds(
            worker.keeps, rank=worker.rank, workers=worker.size, number=number, last=last
        )
        for half, part in _halves(answer):
            seen = part if check_all else part[checked_places(part)]
            if not bool(((seen >= half * low) & (seen <= half * high)).all()):
                expected = f"{half * low:g} to {half * high:g}"
                raise AssertionError(f"wrong sum: expected {expected}, got {seen[:4]}")


def _halves(answer: Answer) -> Iterator[tuple[int, Array]]:
    """What the answer consists of, each with the half, 1 or 2, that it belongs to."""
    parts = [answer] if isinstance(answer, np.ndarray) else list(answer)
    if len(parts) == 1:
        parts = list(parts[0].reshape(HALVES, -1))
    for index, part in enumerate(parts):
        yield 1 + index * HALVES // len(parts), part


def pieces(array: Array, servers: int) -> list[Array]:
    """An array's equal parts, one per server, for the libraries that leave cutting to the user."""
    return np.split(array, servers)


def serve(worker: Worker) -> None:
    """Take turns with exchanges until the driver says leave or goes away."""
    take_turns(worker, partial(_bind, worker, itertools.count()))


def _bind(worker: Worker, tables: "itertools.count[int]", turn: dict[str, Any]) -> Exchanges:
    return Exchanges(
        worker,
        # Every worker has the same turns, so the numbers agree; a new table begins with zeros.
        table=f"table{next(tables)}",
        bytes=turn["bytes"],
        batch=turn["batch"],
        idle_seconds=IDLE_SECONDS if turn["call"] == AFTER_IDLE else 0.0,
    )
