# SPDX-License-Identifier: Apache-2.0
"""What a worker does with rows of a sparse table: many are there, each call is about a few.

10 million rows are filled in once. A call is about 10,000 of them, drawn anew and without
repetition before every sample, so nothing is warm that would not be in use. A sample is `batch`
calls back to back. Keys are spread over all of uint64.

Everything can be checked: a row's *pattern* follows from its key, it is written with that pattern
every time, and this side counts how often. What a row then holds is the library's affair
(`Table.holds`): who only stores holds the last row written, an optimizer the sum of its steps.
Every row that is pulled is compared, outside the timed part; of the rows of a sample of pushes,
those of one call are pulled.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.workers import calls
from benchmarks.workers.turns import Array, Rank, Work, take_turns

RESIDENT = 10_000_000
CALL_ROWS = 10_000
# Odd: a bijection of uint64. 2^64 / the golden ratio spreads 0, 1, 2, ... evenly.
SPREAD = np.uint64(0x9E3779B97F4A7C15)
TOLERANCE = 1e-5

Keys = NDArray[np.uint64]
Counts = NDArray[np.uint16]


class Chosen(NamedTuple):
    """Rows of a call: where an array of all rows has them, and their keys."""

    places: NDArray[np.int64]
    keys: Keys


class Table(Protocol):
    """Rows of one width, in one library."""

    def given(self, patterns: Array, pushes: Counts) -> Array:
        """What is pushed to make it the so many-th push of rows with these patterns."""
        ...

    def holds(self, patterns: Array, pushes: Counts) -> Array:
        """What the rows hold after so many pushes."""
        ...

    def pull(self, chosen: Chosen, out: Array) -> Callable[[], Array]:
        """Get the rows; into `out` if the library can write there."""
        ...

    def push(self, chosen: Chosen, rows: Array, variant: str) -> Callable[[], object]:
        """Give the rows; it returns when they are held by whoever keeps them."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of memory, by variant: "in place" is that of the process that keeps the rows."""
        ...


class Saves(Table, Protocol):
    """A table that can be saved to files, copied there, and loaded."""

    def prepare(self, variant: str) -> None: ...

    def save(self, variant: str) -> None: ...


class Keeper(Rank, Protocol):
    """What a library has to offer for its rows to be measured."""

    def table(self, width: int) -> Table: ...


def width_of(bytes: int) -> int:
    """A turn's bytes are those of the values of one call."""
    return bytes // (CALL_ROWS * 4)


def keys_of(places: NDArray[np.int64]) -> Keys:
    keys: Keys = places.astype(np.uint64) * SPREAD
    return keys


def patterns_of(keys: Keys, width: int) -> Array:
    """16 signs from the first bits of the key; of a row of one element, a number from 1 to 2."""
    bits = (keys >> np.uint64(48)).astype(np.uint16)
    if width == 1:
        return (1 + bits[:, None] / 65536).astype(np.float32)
    signs = np.unpackbits(bits.view(np.uint8)).reshape(len(keys), 16)
    return signs.astype(np.float32) * 2 - 1


class Resident:
    """All rows of one width: filled in when this is made, and how often each was pushed."""

    def __init__(self, table: Table, width: int, count: int = RESIDENT) -> None:
        self.table, self.width = table, width
        self._rng = np.random.default_rng(width)
        self._pushes = np.zeros(count, np.uint16)
        before = table.memory()
        self.fill_seconds = sum(map(self._fill, range(0, count, CALL_ROWS)))
        self.row_bytes = {
            variant: (after - before[variant]) / count for variant, after in table.memory().items()
        }

    def draw(self) -> Chosen:
        places = self._rng.choice(len(self._pushes), CALL_ROWS, replace=False)
        return Chosen(places, keys_of(places))

    def rows_to_push(self, chosen: Chosen) -> Array:
        """What is given to these rows, which count as pushed from now on."""
        self._pushes[chosen.places] += 1
        return self.table.given(self._patterns(chosen), self._pushes[chosen.places])

    def check(self, chosen: Chosen, got: Array) -> None:
        expected = self.table.holds(self._patterns(chosen), self._pushes[chosen.places])
        apart = np.abs(got.reshape(expected.shape) - expected) > TOLERANCE * np.abs(expected)
        if bool(apart.any()) or bool(np.isnan(got).any()):
            worst = int(apart.any(axis=1).argmax())
            raise AssertionError(
                f"wrong row of key {chosen.keys[worst]}: expected {expected[worst][:4]},"
                f" got {got.reshape(expected.shape)[worst][:4]}"
            )

    def pulled(self, chosen: Chosen) -> None:
        """Pulls rows and checks them, untimed."""
        self.check(chosen, self.table.pull(chosen, self.buffer())())

    def buffer(self) -> Array:
        return np.full((CALL_ROWS, self.width), np.nan, np.float32)

    def _patterns(self, chosen: Chosen) -> Array:
        return patterns_of(chosen.keys, self.width)

    def _fill(self, first: int) -> float:
        places = np.arange(first, first + CALL_ROWS)
        chosen = Chosen(places, keys_of(places))
        push = self.table.push(chosen, self.rows_to_push(chosen), "in place")
        start = time.perf_counter()
        push()
        return time.perf_counter() - start


class Pulling:
    def __init__(self, resident: Resident, batch: int) -> None:
        self._resident = resident
        self._buffers = [resident.buffer() for _ in range(batch)]

    def sample(self) -> float:
        chosen = [self._resident.draw() for _ in self._buffers]
        for buffer in self._buffers:
            buffer.fill(np.nan)
        work = zip(chosen, self._buffers, strict=True)
        calls = [self._resident.table.pull(rows, buffer) for rows, buffer in work]
        start = time.perf_counter()
        answers = [call() for call in calls]
        seconds = time.perf_counter() - start
        for rows, answer in zip(chosen, answers, strict=True):
            self._resident.check(rows, answer)
        return seconds / len(calls)


class Pushing:
    def __init__(self, resident: Resident, batch: int, variant: str) -> None:
        self._resident, self._batch, self._variant = resident, batch, variant
        self._samples = 0

    def sample(self) -> float:
        resident = self._resident
        chosen = [resident.draw() for _ in range(self._batch)]
        calls = [
            resident.table.push(rows, resident.rows_to_push(rows), self._variant) for rows in chosen
        ]
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        self._samples += 1
        resident.pulled(chosen[self._samples % len(chosen)])
        return seconds / len(calls)


class Saving:
    """Saves, copies what was saved, or loads it; rows spoilt before a load are whole after it."""

    def __init__(self, resident: Resident, variant: str) -> None:
        self._resident, self._variant = resident, variant
        self._table: Saves = resident.table  # type: ignore[assignment]

    def sample(self) -> float:
        chosen = self._resident.draw()
        self._table.prepare(self._variant)
        if self._variant == "load":
            self._table.push(chosen, self._resident.buffer() * 0 + 1, "in place")()
        start = time.perf_counter()
        self._table.save(self._variant)
        seconds = time.perf_counter() - start
        self._resident.pulled(chosen)
        return seconds


class Known:
    """What was found while the rows were filled in, as a sample."""

    def __init__(self, figure: float) -> None:
        self._figure = figure

    def sample(self) -> float:
        return self._figure


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def serve(keeper: Keeper) -> None:
    """Take turns with rows until the driver says leave or goes away."""
    take_turns(keeper, partial(_bind, keeper, {}))


def _bind(keeper: Keeper, filled: dict[int, Resident], turn: dict[str, Any]) -> Work:
    width = width_of(turn["bytes"])
    if width not in filled:
        filled[width] = Resident(keeper.table(width), width)
    resident, variant = filled[width], turn["variant"]
    match turn["call"]:
        case calls.PULL_ROWS:
            return Pulling(resident, turn["batch"])
        case calls.PUSH_ROWS:
            return Pushing(resident, turn["batch"], variant)
        case calls.FILL_ROWS:
            return Known(resident.fill_seconds)
        case calls.ROW_BYTES:
            return Known(resident.row_bytes[variant])
        case calls.SAVE_ROWS:
            return Saving(resident, variant)
    raise ValueError(f"there is no call {turn['call']!r}")
