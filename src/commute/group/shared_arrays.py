# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory that all ranks of a group reach: `world.empty`.

Each rank has its own array, in the room of its own segment (core/arena.h), which its peers have
mapped since they met. `place` is collective: the ranks tell each other where their new arrays are,
and number them. So a call that is given such an array, or a contiguous part of one, knows where
the same part is on every other rank.

    taken     a block of the room; its pages are touched, by this rank and by its peers
    in use    as long as any array views it; calls find it by its address
    free      the last view has gone: the block is used again, by this rank alone

Nobody touches a peer's array but within a call that its owner has begun and not finished (the
verifier proves that of direct plans), so an owner may drop its array whenever no call uses it. An
entry here that has outlived its array does no harm: the next array at this address replaces it.
"""

from __future__ import annotations

import math
import os
import resource
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from commute import _core
from commute._arrays import Buffer

__all__ = ["GROUP_BYTES", "SharedArrays", "SharedPart", "room_bytes"]

Array = np.ndarray[Any, Any]
_NONE: Final = -1
# Of 128 TB of addresses that a process has: for the rooms of a world, and of each of its groups.
WORLD_BYTES: Final = 16 << 40
GROUP_BYTES: Final = 256 << 30


class SharedPart(NamedTuple):
    """A part of an array that all ranks have."""

    array: _core.SharedArray
    offset: int  # bytes


class _Entry(NamedTuple):
    begin: int
    end: int
    array: _core.SharedArray


class SharedArrays:
    """Those of one group."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._begins: list[int] = []
        self._entries: list[_Entry] = []
        self._placed = 0

    def place(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], gather: Callable[[Array], Array]
    ) -> Array | None:
        """A new array on every rank; None on all where one of them has no memory left.

        Args:
            gather: allgather; all ranks call this with the same shape and dtype.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        taken = _core.take_array(self._engine, nbytes)
        mine = _NONE if taken is None else taken[1]
        told = gather(np.array([mine, nbytes, self._placed], np.int64))
        _check_same(told)
        if taken is None or bool((told[:, 0] == _NONE).any()):
            return None
        array = _core.share_array(self._engine, self._placed, told[:, 0].tolist(), nbytes)
        self._placed += 1
        raw: Array = taken[0]
        self._enter(_Entry(raw.ctypes.data, raw.ctypes.data + nbytes, array))
        return raw.view(dtype).reshape(shape)

    def find(self, buffer: Buffer) -> SharedPart | None:
        """The array that this buffer is part of."""
        at = bisect_right(self._begins, buffer.address) - 1
        if at < 0 or buffer.address + buffer.nbytes > self._entries[at].end:
            return None
        return SharedPart(self._entries[at].array, buffer.address - self._entries[at].begin)

    def _enter(self, new: _Entry) -> None:
        kept = [one for one in self._entries if one.end <= new.begin or new.end <= one.begin]
        self._entries = sorted([*kept, new], key=lambda entry: entry.begin)
        self._begins = [entry.begin for entry in self._entries]


def _check_same(told: Array) -> None:
    differs = np.flatnonzero((told[:, 1:] != told[0, 1:]).any(axis=1))
    if len(differs):
        rank = int(differs[0])
        raise ValueError(
            f"empty expected the same shape and dtype on all ranks: rank 0 asked for"
            f" {told[0, 1]} bytes, rank {rank} for {told[rank, 1]}"
        )


def room_bytes(ranks: int, mapped: int = WORLD_BYTES) -> int:
    """How much room for arrays a segment has: all memory there is; it takes none until it is used.

    But every rank maps the rooms of all: together they are at most so large. Where a process may
    have only so much address space, or only files of some size, there is none.
    """
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    return min(os.sysconf("SC_PHYS_PAGES") * page, mapped // ranks // page * page)
