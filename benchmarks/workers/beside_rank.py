# SPDX-License-Identifier: Apache-2.0
"""One worker of commute's store, at staleness None, beside a neighbour. Argument: socket.

The last worker is the neighbour of the others. What it does is the variant of the turn:

    alone       nothing
    ordinary    the same exchanges as the others
    computing   a loop that uses a core and nothing of the store
    flood       pushes, each sent without waiting for the one before
    stopped     pulls 128 MB and is stopped (SIGSTOP) in the middle; worker 0 wakes it again

A sample is the mean time of an exchange of one of the others, over 150 ms of exchanges back to back
that begin when the neighbour is well under way. Worker r adds 2^r and takes it off again, in turn:
the table never holds more than the sum of these, and in each answer bit r says whether this
worker's last contribution is in it.
"""

import collections
import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import commute
from benchmarks.workers.turns import Array, checked_places, take_turns

SETTLE_SECONDS = 0.03
WINDOW_SECONDS = 0.15
# More than any credit lets through at once, and yet no memory to speak of.
FLOOD_PUSHES_MAX = 256
LARGE_BYTES, LARGE_PULLS = 16 << 20, 8
# On a busy host the pulls may be over before anybody has looked; then they are made again.
STOP_ATTEMPTS_MAX = 20
STOP_SECONDS_MAX = 20.0


class Beside:
    def __init__(self, world: commute.Group) -> None:
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {commute.__version__}"
        self.barrier = world.barrier
        self._store = world.store("bench", staleness=None)
        pids = world.allgather(np.array([os.getpid()], np.int64))
        self.neighbour_pid = int(pids[-1, 0])
        self.is_neighbour = self.rank == self.size - 1
        ones = np.ones(LARGE_BYTES // 4, np.float32)
        self.large = self._store.dense("large", ones.shape, "float32", init=ones)
        self._tables: dict[int, Table] = {}

    def table(self, bytes: int) -> "Table":
        """The table of that size, the same in all variants: what it holds goes on."""
        if bytes not in self._tables:
            dense = self._store.dense(f"exchanged{bytes}", (bytes // 4,), "float32")
            self._tables[bytes] = Table(dense, self.rank, bytes)
            self.barrier()
        return self._tables[bytes]


class Table:
    """A table and what this worker has given to it: 2^rank if `is_in`, else nothing."""

    def __init__(self, dense: Any, rank: int, bytes: int) -> None:
        self._dense = dense
        self._weight = 1 << rank
        self._is_in = False
        self._source, self._result = (np.zeros(bytes // 4, np.float32) for _ in range(2))

    def exchange(self) -> float:
        """Seconds of one exchange; its answer is checked."""
        self._is_in = not self._is_in
        self._source.fill(self._weight if self._is_in else -self._weight)
        places = checked_places(self._result)
        self._result[places] = -1
        start = time.perf_counter()
        self._dense.push_pull(self._source, out=self._result)
        seconds = time.perf_counter() - start
        for value in self._result[places].astype(int):
            if bool(value & self._weight) != self._is_in:
                raise AssertionError(f"the answer {value} has not my last contribution in it")
        return seconds

    def flood(self, seconds: float) -> None:
        sources = {True: self._filled(self._weight), False: self._filled(-self._weight)}
        sent: collections.deque[Any] = collections.deque()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._is_in = not self._is_in
            sent.append(self._dense.push_async(sources[self._is_in]))
            if len(sent) > FLOOD_PUSHES_MAX:
                sent.popleft().wait()
        for handle in sent:
            handle.wait()

    def _filled(self, value: float) -> Array:
        return np.full_like(self._source, value)


class Neighbourhood:
    """One variant: what this worker does in a sample of it."""

    def __init__(self, beside: Beside, *, variant: str, bytes: int) -> None:
        self._beside, self._variant = beside, variant
        self._table = beside.table(bytes)
        pulled = LARGE_PULLS if variant == "stopped" and beside.is_neighbour else 0
        self._pulled = [np.zeros(LARGE_BYTES // 4, np.float32) for _ in range(pulled)]
        self.sample()

    def sample(self) -> float:
        self._beside.barrier()
        seconds = self._behave() if self._beside.is_neighbour else self._exchange()
        self._beside.barrier()
        return seconds

    def _exchange(self) -> float:
        if self._variant != "stopped":
            time.sleep(SETTLE_SECONDS)
            return statistics.mean(self._exchanges())
        _wait_until_stopped(self._beside.neighbour_pid)
        try:
            return statistics.mean(self._exchanges())
        finally:
            if self._beside.rank == 0:
                time.sleep(SETTLE_SECONDS)  # the other workers may still be at it
                os.kill(self._beside.neighbour_pid, signal.SIGCONT)

    def _exchanges(self) -> list[float]:
        times = []
        until = time.perf_counter() + WINDOW_SECONDS
        while time.perf_counter() < until:
            times.append(self._table.exchange())
        return times

    def _behave(self) -> float:
        match self._variant:
            case "ordinary":
                self._exchange()
            case "computing":
                _compute(2 * SETTLE_SECONDS + WINDOW_SECONDS)
            case "flood":
                self._table.flood(2 * SETTLE_SECONDS + WINDOW_SECONDS)
            case "stopped":
                self._stop_while_pulling()
        return 0.0

    def _stop_while_pulling(self) -> None:
        for _ in range(STOP_ATTEMPTS_MAX):
            for array in self._pulled:
                array.fill(0)
            pulls = [self._beside.large.pull_async(out=array) for array in self._pulled]
            while not pulls[0].done():
                time.sleep(0.0002)
            in_the_middle = not pulls[-1].done()
            if in_the_middle:
                os.kill(os.getpid(), signal.SIGSTOP)
            for pull in pulls:
                pull.wait()
            if in_the_middle:
                break
        else:
            raise AssertionError("the pulls were always over before the worker could be stopped")
        for array in self._pulled:
            if not bool((array == 1).all()):
                raise AssertionError(f"a pull that was interrupted brought {array[:4]}")


def _compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while time.monotonic() < deadline:
        # The state follows the command, in parentheses.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.001)
    raise AssertionError(f"the neighbour was not stopped after {STOP_SECONDS_MAX:.0f} s")


def _bind(beside: Beside, turn: dict[str, Any]) -> Neighbourhood:
    return Neighbourhood(beside, variant=turn["variant"], bytes=turn["bytes"])


if __name__ == "__main__":
    with commute.init() as world:
        beside = Beside(world)
        take_turns(beside, partial(_bind, beside))
