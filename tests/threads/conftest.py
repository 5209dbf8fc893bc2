# SPDX-License-Identifier: Apache-2.0
"""Groups of threads whose ranks may fail: what each rank returned or raised, and nobody left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commute
from commute import Group
from commute.testing import memory_groups

DEADLINE_SECONDS = 15.0
PROBE_BYTES = 2 * (64 << 10)  # two chunks: one on each of the two shards


class Ranks:
    """A group whose ranks are driven by threads, one piece of work after the other."""

    def __init__(self, size: int, **options: Any) -> None:
        self.groups = memory_groups(size, **options)

    def __call__(self, work: Callable[[Group], Any]) -> list[Any]:
        """Runs work(group) on every rank; what each returned, or the exception it raised."""
        ended: list[Any] = [None] * len(self.groups)

        def body(rank: int) -> None:
            try:
                ended[rank] = work(self.groups[rank])
            except BaseException as error:
                ended[rank] = error

        threads = [
            threading.Thread(target=body, args=(group.rank,), daemon=True) for group in self.groups
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + DEADLINE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]

        assert not stuck, f"ranks {stuck} hang; the others ended with {ended}"
        return ended

    def values(self, work: Callable[[Group], Any]) -> list[Any]:
        """As calling it, where no rank may raise."""
        ended = self(work)
        for result in ended:
            if isinstance(result, BaseException):
                raise result
        return ended


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """`ranks(4)` makes a group of four threads; it is closed after the test."""
    made: list[Ranks] = []

    def make(size: int, **options: Any) -> Ranks:
        made.append(Ranks(size, **{"records": str(tmp_path), **options}))
        return made[-1]

    yield make
    for each in made:
        for group in each.groups:
            group.close()


class Stores(list[Any]):
    """The store of each rank, all for the test's own thread; so the order of things is the test's.

    `settle()` returns when the shards have taken, or put off, all that any rank has sent, and
    answered what they can: messages to a shard, and its answers, keep their order, and after them
    goes a pull that is answered at once. What is not done then waits for something.
    """

    def __init__(self, groups: list[Group], **options: Any) -> None:
        super().__init__(group.store("main", **options) for group in groups)
        self.groups = groups
        self._probes = [
            group.store("probe", staleness=None).dense("probe", PROBE_BYTES, "int8")
            for group in groups
        ]
        assert all(probe.info().slots.keys() >= {"shard 0", "shard 1"} for probe in self._probes)

    def settle(self) -> None:
        # Four hops: a push is taken, "go" is told, what was put off is taken, its answer is told.
        for _ in range(4):
            for group, probe in zip(self.groups, self._probes, strict=True):
                if not group._runner.closed:
                    probe.pull()

    def tables(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Declares a table on each rank."""
        return [store.dense(name, *args, **options) for store in self]

    def rows(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Declares a sparse table on each rank."""
        return [store.sparse(name, *args, **options) for store in self]

    def lose(self, rank: int) -> None:
        """The program of this rank fails inside its block; returns when every shard knows."""
        survivor = next(group for group in self.groups if group.rank != rank)
        options: dict[str, Any] = {"staleness": 0, "on_loss": "raise"}
        told = survivor.store(f"loss of {rank}", **options).dense("told", PROBE_BYTES, "int8")
        waiting = told.push_pull_async(np.zeros(PROBE_BYTES, "int8"))
        with pytest.raises(RuntimeError, match="boom"), self.groups[rank]:
            raise RuntimeError("boom")
        with pytest.raises(commute.PeerLostError):
            waiting.wait()  # done when each of its chunks has been refused


@pytest.fixture
def stores(ranks: Callable[..., Ranks]) -> Callable[..., Stores]:
    """`stores(2, staleness=1)`: the store of each of two ranks, see Stores."""

    def open_all(size: int, **options: Any) -> Stores:
        return Stores(ranks(size, timeout=20.0).groups, **options)

    return open_all


class Embedded:
    """As Ranks, for a world of one: the shard is in the caller's thread."""

    def values(self, work: Callable[[Group], Any]) -> list[Any]:
        with commute.init() as world:
            return [work(world)]


@pytest.fixture(params=[1, 3], ids=["embedded", "threads"])
def together(request: pytest.FixtureRequest, ranks: Callable[..., Ranks]) -> Ranks | Embedded:
    """`together.values(work)`: what work(group) returned on each rank; of one, and of three."""
    return Embedded() if request.param == 1 else ranks(request.param)
