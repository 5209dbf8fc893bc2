# SPDX-License-Identifier: Apache-2.0
"""Groups of threads whose ranks may fail: what each rank returned or raised, and nobody left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commute import Group
from commute.testing import memory_groups

DEADLINE_SECONDS = 15.0


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
