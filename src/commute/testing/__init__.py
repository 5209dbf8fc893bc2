# SPDX-License-Identifier: Apache-2.0
"""Groups whose ranks are threads of this process, joined by in-memory links: no sockets, no
processes, milliseconds per test.

>>> import numpy
>>> from commute.testing import run_threads
>>> run_threads(4, lambda world: float(world.allreduce(numpy.ones(1))[0]))
[4.0, 4.0, 4.0, 4.0]
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from commute import _core
from commute._runner import Peer, Runner
from commute._wiring import ReadyWiring
from commute.group import Group
from commute.group.family import Identity
from commute.group.shared_arrays import room_bytes
from commute.testing.memory_server import MemoryServer

T = TypeVar("T")

__all__ = ["memory_groups", "run_threads"]

# Small, so that a message does not fit and flow control is exercised.
LINK_BYTES = 64 << 10
SLOT_BYTES = 4 << 20


class MemoryEngines:
    """The engines of all ranks of each group: whoever is the first to ask makes them."""

    def __init__(self, link_bytes: int) -> None:
        self._link_bytes = link_bytes
        self._lock = threading.Lock()
        self._made: dict[int, list[_core.Engine]] = {}

    def open(self, identity: Identity, rank: int) -> _core.Engine:
        """The engine of one rank of a group."""
        with self._lock:
            if identity.id not in self._made:
                self._made[identity.id] = self._make(len(identity.ranks), identity.tag)
            return self._made[identity.id][rank]

    def _make(self, size: int, tag: int) -> list[_core.Engine]:
        engines = _core.memory_engines(size, self._link_bytes, SLOT_BYTES, room_bytes(size), tag)
        for engine in engines:
            # In memory there is no health thread: a failure of one rank is told to the others
            # directly.
            _core.tell(engine, [other for other in engines if other is not engine])
        return engines


def memory_groups(
    size: int,
    *,
    timeout: float = 30.0,
    link_bytes: int = LINK_BYTES,
    records: str | None = None,
    shards: int = 2,
) -> list[Group]:
    """One group per rank, all in this process; each belongs to one thread at a time.

    `shards`: of the server that their stores share.
    """
    peers = [Peer(rank, "memory") for rank in range(size)]
    server = MemoryServer(size, shards)
    engines = MemoryEngines(link_bytes)
    world = Identity(None, tuple(range(size)))
    groups = [
        Group(
            Runner(
                functools.partial(engines.open, world, rank),
                rank,
                peers,
                records=(records, f"commute-memory-rank{rank}"),
            ),
            ReadyWiring("memory", server.links, engines.open),
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            host="memory",
            timeout=timeout,
        )
        for rank in range(size)
    ]
    for group in groups:
        group._share_memory()
    return groups


def run_threads(size: int, work: Callable[[Group], T], *, timeout: float = 30.0) -> list[T]:
    """Run work(group) on each rank in a thread of its own; the results in rank order.

    The first exception, in rank order, is raised when all threads have ended.
    """
    groups = memory_groups(size, timeout=timeout)
    results: list[T | None] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def body(rank: int) -> None:
        try:
            with groups[rank] as group:
                results[rank] = work(group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results  # type: ignore[return-value]
