# SPDX-License-Identifier: Apache-2.0
"""The rank's side of a benchmark: wait for a turn, take it, report the times.

A rank connects to the Unix socket named by its first argument (a path, so it works from inside a
network namespace too) and then talks in JSON lines:

    rank   -> driver   {"rank": 0, "size": 2, "pid": 4711, "version": "torch 2.13.0"}    once
    driver -> rank     {"call": "allreduce", "bytes": 1024, "batch": 100, "samples": 12,
                        "variant": "in place"}
    rank   -> driver   {"seconds": [3.1e-06, ...]}            per sample: seconds per call
    driver -> rank     {"leave": true}                        or just closes the socket

Collectives have new buffers in every turn: where in memory they lie makes copies of some megabytes
up to a quarter slower or quicker, and a run should not hang on one such draw.

Between turns a rank is blocked in recv, so that it costs nothing while another library has its
turn. If the driver dies the socket closes and the rank ends: nothing is left behind.

A sample is `batch` calls back to back after a barrier. Each call has a buffer of its own, and all
of them are rewritten before the sample, so no call finds the result of an earlier one. Results are
checked: the whole array at the first sample of a size, its two ends and its middle at every other
(of every rank's part, where these differ); these places are spoilt before the sample.

The call "wait" is none of the library's: the last rank comes a second late to a barrier, and the
seconds of a sample are the CPU time that each of the other ranks used while it waited.
"""

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.workers.calls import WAIT, bytes_given, bytes_left, values_given

Array = NDArray[np.float32]
Call = Callable[[], object]

# Variants that only ours has: arrays of empty() in place, blocks out of them, an operation that is
# bound already (in place).
EMPTY, FROM_EMPTY, PERSISTENT = "empty", "from empty", "persistent"
# Buffers of a batch start on cache lines of their own, as separately allocated arrays would.
STRIDE_BYTES = 64
LATE_SECONDS = 1.0


class Rank(Protocol):
    """Who takes turns."""

    rank: int
    size: int
    version: str

    def barrier(self) -> object: ...


class Contender(Rank, Protocol):
    """What a library under test has to offer for its collectives to be measured."""

    def bind(self, call: str, source: Array, result: Array) -> Call:
        """The call by that name, from `source` into `result` (same array: in place)."""
        ...

    def expected(self, call: str) -> list[float]:
        """What the result holds when ranks give `values_given`: one value per equal part."""
        ...


class Work(Protocol):
    """What a rank does in a turn, bound to its buffers."""

    def sample(self) -> float:
        """Seconds per call."""
        ...


class Bound:
    """The buffers of one call, size and variant, with the calls bound to them."""

    def __init__(
        self, contender: Contender, *, call: str, bytes: int, batch: int, variant: str
    ) -> None:
        self._contender = contender
        rank, ranks = contender.rank, contender.size
        made: Any = contender  # has the variants of ours
        room = made.empty if variant in (EMPTY, FROM_EMPTY) else buffers
        bind = made.bind_persistent if variant == PERSISTENT else contender.bind
        sources = room(bytes_given(call, bytes, ranks), batch)
        in_place = variant not in ("out of place", FROM_EMPTY)
        results = sources if in_place else buffers(bytes_left(call, bytes, ranks), batch)
        pairs = list(zip(sources, results, strict=True))
        self._calls = [bind(call, source, result) for source, result in pairs]
        self._given = _parts(sources, values_given(call, rank, ranks))
        self._expected = _parts(results, contender.expected(call))
        self.sample(check_all=True)  # touches every page and opens every connection

    def sample(self, *, check_all: bool = False) -> float:
        for part, _ in self._expected:
            part[checked_places(part)] = 0  # or the result of the last sample would do
        for part, value in self._given:
            part.fill(value)
        self._contender.barrier()
        start = time.perf_counter()
        for call in self._calls:
            call()
        seconds = time.perf_counter() - start
        self._check(check_all)
        return seconds / len(self._calls)

    def _check(self, check_all: bool) -> None:
        for part, expected in self._expected:
            seen = part if check_all else part[checked_places(part)]
            if not bool((seen == np.float32(expected)).all()):
                raise AssertionError(f"wrong result: expected {expected}, got {seen[:4]}")


class Waiting:
    """One rank comes late to a barrier; a sample is the CPU time that another used meanwhile."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._is_late = contender.rank == contender.size - 1

    def sample(self) -> float:
        self._contender.barrier()
        if self._is_late:
            time.sleep(LATE_SECONDS)
            self._contender.barrier()
            return 0.0
        start, used = time.perf_counter(), time.process_time()
        self._contender.barrier()
        used = time.process_time() - used  # of all threads of this rank
        waited = time.perf_counter() - start
        if waited < LATE_SECONDS / 2:
            raise AssertionError(f"a barrier ended after {waited:.3f} s, before all had come")
        return used


def checked_places(part: Array) -> list[int]:
    return [0, len(part) // 2, -1]


def _parts(arrays: list[Array], values: list[float]) -> list[tuple[Array, float]]:
    """Each array's equal parts, one per value, with that value."""
    return [
        (part, value)
        for array in arrays
        if values
        for part, value in zip(array.reshape(len(values), -1), values, strict=True)
    ]


def buffers(bytes: int, count: int) -> list[Array]:
    stride = -(-bytes // STRIDE_BYTES) * STRIDE_BYTES
    block = np.zeros(stride * count + STRIDE_BYTES, dtype=np.uint8)
    skip = -block.ctypes.data % STRIDE_BYTES
    return [
        block[skip + i * stride : skip + i * stride + bytes].view(np.float32) for i in range(count)
    ]


def serve(contender: Contender) -> None:
    """Take turns with collectives until the driver says leave or goes away."""
    take_turns(contender, partial(_bind, contender), anew=True)


def take_turns(rank: Rank, bind: Callable[[dict[str, Any]], Work], *, anew: bool = False) -> None:
    """Take turns; what is done in one is what `bind` makes of the driver's message.

    It is bound once for each kind of work and variant, or `anew` for every turn.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(sys.argv[1])
        hello = {
            "rank": rank.rank,
            "size": rank.size,
            "pid": os.getpid(),
            "version": rank.version,
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        gc.disable()  # a collection inside a sample would be charged to the library
        _answer(connection, bind, anew)


def _answer(connection: socket.socket, bind: Callable[[dict[str, Any]], Work], anew: bool) -> None:
    bound: dict[str, Work] = {}
    bound_to: tuple[str, int, int] | None = None
    for line in connection.makefile("rb"):
        turn: dict[str, Any] = json.loads(line)
        if turn.get("leave"):
            return
        work = (turn["call"], turn["bytes"], turn["batch"])
        if anew or work != bound_to:
            bound.clear()  # one size at a time: 256 MB for six libraries would not fit
            gc.collect()
            bound_to = work
        variant = turn["variant"]
        if variant not in bound:
            bound[variant] = bind(turn)
        seconds = [bound[variant].sample() for _ in range(turn["samples"])]
        connection.sendall(json.dumps({"seconds": seconds}).encode() + b"\n")
    os._exit(1)  # the driver is gone: do not wait for the peers in any clean-up


def _bind(contender: Contender, turn: dict[str, Any]) -> Work:
    if turn["call"] == WAIT:
        return Waiting(contender)
    return Bound(
        contender,
        call=turn["call"],
        bytes=turn["bytes"],
        batch=turn["batch"],
        variant=turn["variant"],
    )
