# SPDX-License-Identifier: Apache-2.0
"""Segments: the files of a checkpoint. Each is a file in the safetensors format.

    file    = header length (8 bytes, little endian) | header | data
    header  = JSON, filled up with spaces: {name: {"dtype", "shape", "data_offsets"}, ...}
    data    = the tensors one after the other, without gaps

A segment is written as its tensors come, so that it need not fit into memory; as their number is
not known before the end, room is left for the header, which is written last. A small segment is
held until the end, and has a header that fits.

What a manifest says of a file (`FileRecord`) has a checksum of everything before the data, and one
of each block of 16 MB of the data: damage is found with its place, and the ranks of a job share
the work. Checksums are XXH64 with seed 0, 16 hexadecimal digits.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from commute import _core
from commute._errors import CheckpointError
from commute.store.appender import BLOCK_BYTES as APPENDED_BYTES
from commute.store.appender import Appender

__all__ = [
    "BLOCK_BYTES",
    "FileRecord",
    "Segment",
    "SegmentWriter",
    "Tensor",
    "checksum",
    "header_room",
    "item_bytes",
]

BLOCK_BYTES: Final = 16 << 20
HELD_BYTES: Final = 2 << 20  # written at once; of more, memory new to the process takes longer
HEADER_BYTES_MAX: Final = 100_000_000  # the format's
_LENGTH: Final = struct.Struct("<Q")
_ALIGNED_BYTES: Final = 64  # where the data of a small segment begins
_ENTRY_BYTES: Final = 128  # of the header for a tensor, at most, beside its name

# The names that the format has for NumPy's dtypes, and bfloat16.
DTYPES: Final = {
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_ITEM_BYTES: Final = {short: int(short.lstrip("BIUF")) // 8 for short in DTYPES.values()}


class Tensor(NamedTuple):
    """Where a tensor is: bytes `begin` to `end` of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class FileRecord(msgspec.Struct, frozen=True):
    """What a manifest says of a file.

    Attributes:
        header: the checksum of all before the data.
        blocks: the checksums of the data.
    """

    name: str
    bytes: int
    data_begin: int
    header: str
    blocks: list[str]


def item_bytes(dtype: str) -> int:
    """Of NumPy's name, or bfloat16."""
    return _ITEM_BYTES[DTYPES[dtype]]


def header_room(names: int, name_bytes: int) -> int:
    """Room for the entries of so many tensors, whose names have so many bytes."""
    return names * (_ENTRY_BYTES + name_bytes)


def checksum(*pieces: Any) -> str:
    """Of bytes, or arrays of them, one after the other.

    >>> from commute.store.segments import checksum
    >>> checksum(b"a", b"bc")
    '44bc2cf5ad770999'
    """
    total = _core.Checksum()
    for piece in pieces:
        _add(total, np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece)
    return _digits(total)


def _add(total: _core.Checksum, piece: np.ndarray[Any, Any]) -> None:
    total.add(piece.ctypes.data, piece.nbytes)


def _digits(total: _core.Checksum) -> str:
    return f"{total.value():016x}"


# ---- writing ----


class SegmentWriter:
    """Writes one file; what goes wrong on the way is an OSError.

    Args:
        room: for the header, if the data is more than is held.
    """

    def __init__(self, path: str, room: int) -> None:
        self.path = path
        self.data_bytes = 0
        self._room = room
        self._begin = 0  # of the data, once it is known
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._tensors: dict[str, Tensor] = {}
        self._held: list[np.ndarray[Any, Any]] = []
        self._held_bytes = 0
        self._appender: Appender | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._blocks: list[str] = []
        self._block = _core.Checksum()
        self._block_bytes = 0

    def add(
        self, name: str, dtype: str, shape: Sequence[int], pieces: Sequence[np.ndarray[Any, Any]]
    ) -> None:
        """A tensor, whose bytes are those of the pieces; they are kept until they are written."""
        begin = self.data_bytes
        for piece in pieces:
            if piece.nbytes:
                self._held.append(piece.reshape(-1).view(np.uint8))
                self._held_bytes += piece.nbytes
                self.data_bytes += piece.nbytes
        self._tensors[name] = Tensor(DTYPES[dtype], tuple(shape), begin, self.data_bytes)
        if self._held_bytes >= HELD_BYTES:
            self._write_meanwhile()

    def finish(self, about: dict[str, str]) -> FileRecord:
        """Write what is left and the header, and wait until the disk has it."""
        header = _header(self._tensors, about)
        if self._appender is None:
            self._begin = _whole(len(header) + _LENGTH.size, _ALIGNED_BYTES)
        self._wait()
        header = header.ljust(self._begin - _LENGTH.size)
        before = _LENGTH.pack(len(header)) + header
        if len(before) != self._begin or len(header) > HEADER_BYTES_MAX:
            raise OSError(f"{self.path}: there is no room for a header of {len(header)} bytes")
        if self._appender is not None:
            self._append(self._held)
            self._appender.finish()
            self._write(before, 0)
        else:
            data = b"".join(piece.data for piece in self._held)
            self._sum_up(np.frombuffer(data, np.uint8))
            self._write(before + data, 0)
        os.fsync(self._fd)
        self.close()
        if self._block_bytes:
            self._blocks.append(_digits(self._block))
        size = self._begin + self.data_bytes
        name = os.path.basename(self.path)
        return FileRecord(name, size, self._begin, checksum(before), self._blocks)

    def close(self) -> None:
        """Idempotent; the file of a writer that has not finished is of no use."""
        if self._thread is not None:
            self._thread.shutdown()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # Of what is large, a thread writes while the caller asks for more.

    def _write_meanwhile(self) -> None:
        if self._appender is None:
            self._begin = _whole(self._room + _LENGTH.size, APPENDED_BYTES)
            self._appender = Appender(self._fd, self._begin)
            self._thread = ThreadPoolExecutor(1, "commute-saving")
        self._wait()
        held, self._held = self._held, []
        self._held_bytes = 0
        assert self._thread is not None
        self._writing = self._thread.submit(self._append, held)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _append(self, pieces: list[np.ndarray[Any, Any]]) -> None:
        assert self._appender is not None
        self._sum_up(self._appender.take(pieces))
        self._appender.write()

    def _sum_up(self, piece: np.ndarray[Any, Any]) -> None:
        while piece.nbytes:
            room = BLOCK_BYTES - self._block_bytes
            now, piece = piece[:room], piece[room:]
            _add(self._block, now)
            self._block_bytes += now.nbytes
            if self._block_bytes == BLOCK_BYTES:
                self._blocks.append(_digits(self._block))
                self._block, self._block_bytes = _core.Checksum(), 0

    def _write(self, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(self._fd, data, at)
            data, at = data[written:], at + written


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _header(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    for name, (dtype, shape, begin, end) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps(entries, separators=(",", ":")).encode()


# ---- reading ----


class Segment:
    """One file that was written, to be read; all that is wrong with it is a CheckpointError."""

    def __init__(self, folder: str, record: FileRecord) -> None:
        self.path = os.path.join(folder, record.name)
        self.record = record
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if size != record.bytes:
            self.close()
            raise CheckpointError(
                f"{self.path} is damaged: it has {size} bytes, the manifest says {record.bytes}"
            )

    def tensors(self) -> dict[str, Tensor]:
        """What is in it, by name; the header is checked."""
        before = self._bytes(0, self.record.data_begin)
        if checksum(before) != self.record.header:
            raise self._damaged(0, self.record.data_begin)
        try:
            return _parsed(before.tobytes(), self.record.bytes - self.record.data_begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} has a header that makes no sense: {error}"
            ) from None

    def check(self, block: int) -> None:
        """Whether a block of the data is as it was written."""
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.record.bytes - self.record.data_begin)
        if checksum(self.read(begin, end)) != self.record.blocks[block]:
            raise self._damaged(begin + self.record.data_begin, end + self.record.data_begin)

    def read(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Bytes of the data."""
        return self._bytes(begin + self.record.data_begin, end + self.record.data_begin)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _bytes(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        found = np.empty(end - begin, np.uint8)
        at = 0
        while at < found.nbytes:
            try:
                got = os.preadv(self._fd, [found[at:].data], begin + at)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
            if got == 0:
                raise self._damaged(begin + at, end)
            at += got
        return found

    def _damaged(self, begin: int, end: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged somewhere in bytes {begin} to {end}: they are not what was"
            " saved"
        )


def _parsed(before: bytes, data_bytes: int) -> dict[str, Tensor]:
    """The tensors of a header; ValueError and its like for one that makes no sense."""
    (length,) = _LENGTH.unpack_from(before)
    if length != len(before) - _LENGTH.size:
        raise ValueError(f"its length is said to be {length}")
    tensors = {}
    for name, entry in json.loads(before[_LENGTH.size :]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensor = Tensor(entry["dtype"], tuple(entry["shape"]), begin, end)
        count = 1
        for size in tensor.shape:
            count *= size
        if not 0 <= begin <= end <= data_bytes or count * _ITEM_BYTES[tensor.dtype] != end - begin:
            raise ValueError(f"{name} is {entry}")
        tensors[name] = tensor
    return tensors
