# SPDX-License-Identifier: Apache-2.0
"""Parsed examples in a file beside the data: later passes need no text.

    file = head | block | block ...         one file for each stream: data.vw.cache.0-of-2
    head = magic | length | JSON, padded    what it was made of, and how long the file is
    block = count | keys | flags | 0        uint32 each; then arrays, each padded to 8 bytes:
            labels | weights? | offsets | keys | values?        left out where all are 1

A cache stands for its files as they were (name, size, time of change), its recipe and its size of
batches. If one of them is another, it is refused and made again. It gets its name when it is
whole, so half of one is never read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from commute._errors import DataError
from commute.learn.reader import Batch, Stream
from commute.learn.settings import Plan
from commute.learn.sources import Source

__all__ = ["cached"]

MAGIC = b"commute cache 1\n"
HEAD_BYTES = 4096
HEAD_LENGTH = struct.Struct("<I")
BLOCK = struct.Struct("<IIII")
ALIGN = 8
HAS_WEIGHTS, HAS_VALUES = 1, 2

Array = np.ndarray[Any, Any]


class Head(msgspec.Struct, frozen=True):
    """What a cache was made of."""

    sources: tuple[Source, ...]
    recipe: str
    batch: int
    stream: int
    streams: int
    bytes: int = 0  # of the whole file


class Block(msgspec.Struct, frozen=True):
    """A batch as it lies in the file."""

    count: int
    labels: Array
    weights: Array
    offsets: Array
    keys: Array
    values: Array | None


def cached(
    plan: Plan, stream: Stream, number: int, streams: int, say: Callable[[str], None]
) -> Iterator[Batch]:
    """All passes over a stream: from its cache, or the first one from text, which makes it."""
    sources = plan.data
    head = Head(tuple(sources), plan.recipe.digest(), plan.training.batch, number, streams)
    path = Path(f"{sources[0].path}.cache.{number}-of-{streams}")
    left = plan.training.epochs
    why = _refused(path, head)
    if why is not None:
        say(why)
    if why is not None or not path.exists():
        yield from _made(path, head, stream)
        left -= 1
    for begun in range(plan.training.epochs - left, plan.training.epochs):
        for block, share in _blocks(path):
            stream.passes = begun + share
            yield block


def _refused(path: Path, wanted: Head) -> str | None:
    """Why a cache that is there cannot be used."""
    try:
        with path.open("rb") as file:
            found = _head(file)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{path.name} is no cache, and made again: {error}"
    if found.sources != wanted.sources:
        return f"{path.name} is of other data, or the file has changed: it is made again"
    if size != found.bytes:
        return f"{path.name} has {size:,} bytes instead of {found.bytes:,}: it is made again"
    if msgspec.structs.replace(found, bytes=0) != wanted:
        return f"{path.name} was made with other settings: it is made again"
    return None


def _head(file: BinaryIO) -> Head:
    raw = file.read(HEAD_BYTES)
    if not raw.startswith(MAGIC):
        raise ValueError("it begins with something else")
    at = len(MAGIC) + HEAD_LENGTH.size
    if len(raw) < at:
        raise ValueError("it ends too soon")
    (length,) = HEAD_LENGTH.unpack(raw[len(MAGIC) : at])
    if length > HEAD_BYTES - at:
        raw += file.read(length)
    return msgspec.json.decode(raw[at : at + length], type=Head)


def _made(path: Path, head: Head, stream: Stream) -> Iterator[Batch]:
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            _write_head(file, msgspec.structs.replace(head, bytes=1 << 62))
            for batch in stream:
                _write(file, batch)
                yield batch
            whole = msgspec.structs.replace(head, bytes=file.tell())
            file.seek(0)
            _write_head(file, whole)
        new.replace(path)
    except OSError as error:
        raise DataError(
            f"the cache {new} cannot be written: {error.strerror}; leave --cache out, or make room"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def _write_head(file: BinaryIO, head: Head) -> None:
    """Takes the same room however many bytes the file has: the number is padded with blanks."""
    text = msgspec.json.encode(head)
    text = text[:-1] + b" " * (20 - len(str(head.bytes))) + text[-1:]
    start = MAGIC + HEAD_LENGTH.pack(len(text)) + text
    file.write(start.ljust(max(HEAD_BYTES, -(-len(start) // ALIGN) * ALIGN), b"\0"))


def _write(file: BinaryIO, batch: Batch) -> None:
    flags = 0 if (batch.weights == 1).all() else HAS_WEIGHTS
    arrays = [batch.labels, *([batch.weights] if flags else []), batch.offsets, batch.keys]
    if batch.values is not None:
        flags |= HAS_VALUES
        arrays.append(batch.values)
    file.write(BLOCK.pack(batch.count, len(batch.keys), flags, 0))
    for array in arrays:
        file.write(array.data)
        file.write(bytes(-array.nbytes % ALIGN))


def _blocks(path: Path) -> Iterator[tuple[Batch, float]]:
    """Each with the part of the file that ends with it."""
    data = np.memmap(path, np.uint8, "r")
    with path.open("rb") as file:
        _head(file)
        file.seek(0)
        raw = file.read(len(MAGIC) + HEAD_LENGTH.size)
    (length,) = HEAD_LENGTH.unpack(raw[len(MAGIC) :])
    at = max(HEAD_BYTES, -(-(len(raw) + length) // ALIGN) * ALIGN)
    while at < len(data):
        block, at = _block(data, at)
        yield block, at / len(data)


def _block(data: Array, at: int) -> tuple[Block, int]:
    count, keys, flags, _ = BLOCK.unpack(data[at : at + BLOCK.size].tobytes())
    at += BLOCK.size

    def take(length: int, dtype: Any) -> Array:
        nonlocal at
        size = length * np.dtype(dtype).itemsize
        taken: Array = data[at : at + size].view(dtype)
        at += size + -size % ALIGN
        return taken

    labels = take(count, np.float32)
    weights = take(count, np.float32) if flags & HAS_WEIGHTS else np.ones(count, np.float32)
    offsets, placed = take(count + 1, np.uint32), take(keys, np.uint64)
    values = take(keys, np.float32) if flags & HAS_VALUES else None
    return Block(count, labels, weights, offsets, placed, values), at
