# SPDX-License-Identifier: Apache-2.0
"""Writing a large file from front to back, past the page cache where the file system can.

What is saved is seldom read soon: in the page cache it would push out what is, and of memory that
was free every page costs more than the disk takes to write it (67 MB: 180 ms of a core, on a
virtual machine whose host gives memory page by page).

    room     what is left of before | what is taken now | free
                  whole blocks are written  ...  the rest, less than a block, is left

The file system asks that address, place and length be multiples of a block. Where it does not know
of such writes (O_DIRECT), or refuses one, the same goes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

__all__ = ["BLOCK_BYTES", "Appender"]

BLOCK_BYTES: Final = 4096
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)

Array = np.ndarray[Any, Any]


class Appender:
    """Appends bytes to an open file, which stays the caller's; trouble is an OSError.

    Args:
        at: where in the file the first byte goes; a multiple of BLOCK_BYTES.
    """

    def __init__(self, fd: int, at: int) -> None:
        self._fd = fd
        self._at = at  # of what is left
        self._left = 0  # bytes, at the front of the room
        self._taken = 0  # bytes after them
        self._room = _aligned(BLOCK_BYTES)
        self._direct = _set_direct(fd, True)

    def take(self, pieces: Sequence[Array]) -> Array:
        """Copies bytes, to be written next; returns them in one piece, which holds until then."""
        begin = self._left
        end = begin + sum(piece.nbytes for piece in pieces)
        if end > self._room.nbytes:
            room = _aligned(end)
            room[:begin] = self._room[:begin]
            self._room = room
        self._taken = end - begin
        found = self._room[begin:end]
        if pieces:
            np.concatenate(pieces, out=found)
        return found

    def write(self) -> None:
        """What was taken, but for the rest of a block."""
        end = self._left + self._taken
        whole = end // BLOCK_BYTES * BLOCK_BYTES
        self._write(self._room[:whole])
        self._left, self._taken = end - whole, 0
        self._room[: self._left] = self._room[whole:end].copy()

    def finish(self) -> None:
        """The rest. From here on the file is written through the cache again."""
        self._through_cache()
        self._write(self._room[: self._left])
        self._left = 0

    def _write(self, data: Array) -> None:
        while data.nbytes:
            try:
                written = os.pwrite(self._fd, data.data, self._at)
            except OSError as error:
                if error.errno not in _REFUSED or not self._direct:
                    raise
                self._through_cache()
                continue
            data = data[written:]
            self._at += written

    def _through_cache(self) -> None:
        if self._direct:
            self._direct = False
            _set_direct(self._fd, False)


def _aligned(size: int) -> Array:
    """New memory of whole blocks that begins with one."""
    return np.frombuffer(mmap.mmap(-1, -(-size // BLOCK_BYTES) * BLOCK_BYTES), np.uint8)


def _set_direct(fd: int, direct: bool) -> bool:
    """Whether that could be done."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
    except OSError:
        return False
    return True
