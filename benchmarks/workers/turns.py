# SPDX-License-Identifier: Apache-2.0
"""The rank's side of a benchmark: wait for a turn, take it, report the times.

A rank connects to the Unix socket named by its first argument (a path, so it works from inside a
network namespace too) and then talks in JSON lines:

    rank   -> driver   {"rank": 0, "size": 2, "pid": 4711, "version": "torch 2.13.0"}    once
    driver -> rank     {"bytes": 1024, "batch": 100, "samples": 12, "variant": "in place"}
    rank   -> driver   {"seconds": [3.1e-06, ...]}            per sample: seconds per call
    driver -> rank     {"leave": true}                        or just closes the socket

Between turns a rank is blocked in recv, so that it costs nothing while another library has its
turn. If the driver dies the socket closes and the rank ends: nothing is left behind.

A sample is `batch` calls back to back after a barrier. Each call has a buffer of its own, and all
of them are rewritten before the sample, so no call finds the result of an earlier one. Results are
checked: the whole array at the first sample of a size, its two ends and its middle at every other.
"""

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Call = Callable[[], object]

# Buffers of a batch start on cache lines of their own, as separately allocated arrays would.
STRIDE_BYTES = 64


class Contender(Protocol):
    """What a library under test has to offer to be measured."""

    rank: int
    size: int
    version: str

    def barrier(self) -> object: ...

    def bind(self, source: Array, result: Array) -> Call:
        """The call that leaves the sum of all `source`s in `result` (same array: in place)."""
        ...

    def expected(self) -> float:
        """What every element of the result is when rank r's elements are r + 1."""
        ...


def sum_of_ranks(size: int) -> float:
    return size * (size + 1) / 2


class Bound:
    """The buffers of one size and variant, with the calls bound to them."""

    def __init__(self, contender: Contender, *, bytes: int, batch: int, variant: str) -> None:
        self._contender = contender
        self._sources = _buffers(bytes, batch)
        in_place = variant == "in place"
        self._results = self._sources if in_place else _buffers(bytes, batch)
        self._calls = [
            contender.bind(source, result)
            for source, result in zip(self._sources, self._results, strict=True)
        ]
        self.sample(check_all=True)  # touches every page and opens every connection

    def sample(self, *, check_all: bool = False) -> float:
        for source in self._sources:
            source.fill(self._contender.rank + 1)
        self._contender.barrier()
        start = time.perf_counter()
        for call in self._calls:
            call()
        seconds = time.perf_counter() - start
        self._check(check_all)
        return seconds / len(self._calls)

    def _check(self, check_all: bool) -> None:
        expected = np.float32(self._contender.expected())
        for result in self._results:
            seen = result if check_all else result[[0, len(result) // 2, -1]]
            if not bool((seen == expected).all()):
                raise AssertionError(f"wrong result: expected {expected}, got {seen[:4]}")


def _buffers(bytes: int, count: int) -> list[Array]:
    stride = -(-bytes // STRIDE_BYTES) * STRIDE_BYTES
    block = np.zeros(stride * count + STRIDE_BYTES, dtype=np.uint8)
    skip = -block.ctypes.data % STRIDE_BYTES
    return [
        block[skip + i * stride : skip + i * stride + bytes].view(np.float32) for i in range(count)
    ]


def serve(contender: Contender) -> None:
    """Take turns until the driver says leave or goes away."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(sys.argv[1])
        hello = {
            "rank": contender.rank,
            "size": contender.size,
            "pid": os.getpid(),
            "version": contender.version,
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        gc.disable()  # a collection inside a sample would be charged to the library
        _take_turns(contender, connection)


def _take_turns(contender: Contender, connection: socket.socket) -> None:
    bound: dict[str, Bound] = {}
    bound_size = (0, 0)
    for line in connection.makefile("rb"):
        turn: dict[str, Any] = json.loads(line)
        if turn.get("leave"):
            return
        size = (turn["bytes"], turn["batch"])
        if size != bound_size:
            bound.clear()  # one size at a time: 256 MB for six libraries would not fit
            gc.collect()
            bound_size = size
        variant = turn["variant"]
        if variant not in bound:
            bound[variant] = Bound(contender, bytes=size[0], batch=size[1], variant=variant)
        seconds = [bound[variant].sample() for _ in range(turn["samples"])]
        connection.sendall(json.dumps({"seconds": seconds}).encode() + b"\n")
    os._exit(1)  # the driver is gone: do not wait for the peers in any clean-up
