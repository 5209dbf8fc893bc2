# SPDX-License-Identifier: Apache-2.0
"""Parsed examples in a file beside the data: later passes need no text.

    file = head | block | block ...         one file for each stream: data.vw.cache.0-of-2
    head = magic | length | JSON, padded    what it was made of, and how long the file is
    block = count | places | keys | flags   uint32 each; then arrays, each padded to 8 bytes:
            labels | weights? | offsets | keys | index | values?        left out where all are 1

Keys are those that differ, in the order of their hashes, which is the order in which they travel;
index has the number of its key for each place. So a pass from the cache tells no keys apart.

A cache stands for its files as they were (name, size, time of change), its recipe and its size of
batches. If one of them is another, it is refused and made again. It gets its name when it is
whole, so half of one is never read. A damaged block ends the run.
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

from commute import _core
from commute._errors import DataError
from commute.learn.reader import Parsed, Stream
from commute.learn.settings import BATCH_SHARE, Plan
from commute.learn.sources import Source

__all__ = ["Block", "cached"]

MAGIC = b"commute cache 3\n"
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
    grows: int = 0  # a batch is at most so small a part of what was read; 0: all are equal
    bytes: int = 0  # of the whole file


class Block(msgspec.Struct, frozen=True):
    """A batch as it lies in the file: each key once, and which of them is at each place."""

    count: int
    labels: Array
    weights: Array
    offsets: Array
    keys: Array
    index: Array
    values: Array | None


def cached(
    plan: Plan, stream: Stream, number: int, streams: int, say: Callable[[str], None]
) -> Iterator[Block]:
    """All passes over a stream: from its cache, or the first one from text, which makes it."""
    sources = plan.data
    batch = plan.training.batch
    grows = 0 if batch else BATCH_SHARE
    head = Head(tuple(sources), plan.recipe.digest(), batch, number, streams, grows)
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
            stream.examples += block.count
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


def _made(path: Path, head: Head, stream: Stream) -> Iterator[Block]:
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            _write_head(file, msgspec.structs.replace(head, bytes=1 << 62))
            for batch in stream:
                block = _numbered(batch)
                _write(file, block)
                yield block
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


def _numbered(batch: Parsed) -> Block:
    keys, index = _core.distinct_keys(batch.keys)
    return Block(batch.count, batch.labels, batch.weights, batch.offsets, keys, index, batch.values)


def _write(file: BinaryIO, block: Block) -> None:
    flags = 0 if (block.weights == 1).all() else HAS_WEIGHTS
    arrays = [block.labels, *([block.weights] if flags else [])]
    arrays += [block.offsets, block.keys, block.index]
    if block.values is not None:
        flags |= HAS_VALUES
        arrays.append(block.values)
    file.write(BLOCK.pack(block.count, len(block.index), len(block.keys), flags))
    for array in arrays:
        file.write(array.data)
        file.write(bytes(-array.nbytes % ALIGN))


def _blocks(path: Path) -> Iterator[tuple[Block, float]]:
    """Each with the part of the file that ends with it."""
    data = np.memmap(path, np.uint8, "r")
    with path.open("rb") as file:
        _head(file)
        file.seek(0)
        raw = file.read(len(MAGIC) + HEAD_LENGTH.size)
    (length,) = HEAD_LENGTH.unpack(raw[len(MAGIC) :])
    at = max(HEAD_BYTES, -(-(len(raw) + length) // ALIGN) * ALIGN)
    while at < len(data):
        try:
            block, at = _block(data, at)
        except ValueError as error:
            raise DataError(
                f"the cache {path} is damaged at byte {at:,}: {error}; remove it, and the next run"
                " makes it again"
            ) from error
        yield block, at / len(data)


def _block(data: Array, at: int) -> tuple[Block, int]:
    def take(length: int, dtype: Any) -> Array:
        nonlocal at
        size = length * np.dtype(dtype).itemsize
        if at + size > len(data):
            raise ValueError("a block is longer than the file")
        taken: Array = data[at : at + size].view(dtype)
        at += size + -size % ALIGN
        return taken

    count, places, keys, flags = take(4, np.uint32).tolist()
    labels = take(count, np.float32)
    weights = take(count, np.float32) if flags & HAS_WEIGHTS else np.ones(count, np.float32)
    offsets, distinct = take(count + 1, np.uint32), take(keys, np.uint64)
    index = take(places, np.uint32)
    values = take(places, np.float32) if flags & HAS_VALUES else None
    _check(offsets, index, keys)
    return Block(count, labels, weights, offsets, distinct, index, values), at


def _check(offsets: Array, index: Array, keys: int) -> None:
    """The core follows every number it is given."""
    if int(offsets[-1]) != len(index) or (offsets[:-1] > offsets[1:]).any():
        raise ValueError("its offsets lead nowhere")
    if len(index) and int(index.max()) >= keys:
        raise ValueError(f"expected {keys:,} keys, got number {index.max():,}")
