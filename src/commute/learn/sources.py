# SPDX-License-Identifier: Apache-2.0
"""Files of text, and how they are dealt to streams.

A *stream* is a share of the data that is read in order; a worker reads one, or several by turns.
Shares are byte ranges of equal length; a line belongs to the share in which it begins:

    file A (700 bytes)                     file B (300 bytes)        two streams
    |----- stream 0: 0 to 500 -----|- stream 1: 500 to 700 -|- stream 1: 0 to 300 -|

Large files are dealt in blocks by turns, each block as above: so streams stay together.
A compressed file cannot be entered in the middle. It is unpacked by every stream that shares it,
and its text is dealt in blocks by turns.
"""

from __future__ import annotations

import glob
import gzip
import mmap
import os
import shutil
import stat
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import msgspec

from commute._errors import SettingError

__all__ = [
    "Piece",
    "Source",
    "deal",
    "find",
    "first_lines",
    "format_of",
    "remove_spooled",
    "texts",
]

STANDARD_INPUT = "-"
TURN_BYTES = 16 << 20  # a block that is dealt has at least so many
BLOCK_BYTES = 4 << 20  # of an unpacked file
SAMPLE_LINES = 10_000
PACKED_TIMES = 4  # text is about so many times longer than its packed form
GZIP = b"\x1f\x8b\x08"  # the first bytes of such a file: its number, and the one method there is


class Source(msgspec.Struct, frozen=True):
    """A file, and what tells whether it is still the same."""

    path: str
    bytes: int
    changed_ns: int
    packed: bool
    spooled: bool = False  # a copy of standard input: whoever found it removes it


class Piece(msgspec.Struct, frozen=True):
    """The share of a stream in a file: bytes from begin to end, or every `every`-th block."""

    source: Source
    begin: int
    end: int
    every: int = 1

    @property
    def bytes(self) -> int:
        """Of text; of a packed file a guess."""
        if self.source.packed:
            return self.source.bytes * PACKED_TIMES // self.every
        return self.end - self.begin


class Text(msgspec.Struct, frozen=True):
    """Whole lines, or lines up to the end of the data; `at` is where they are in the file."""

    data: Any  # a buffer
    begin: int
    end: int
    at: int


def find(patterns: Sequence[str]) -> list[Source]:
    """The files that these names and patterns stand for; standard input is kept in a file."""
    sources: list[Source] = []
    for pattern in patterns:
        if pattern == STANDARD_INPUT:
            continue
        found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not found:
            raise SettingError(f"no file is called {pattern}")
        sources += map(_source, found)
    if STANDARD_INPUT in patterns:  # last, when nothing can go wrong any more
        sources.append(msgspec.structs.replace(_source(_spooled()), spooled=True))
    if not sources:
        raise SettingError("there is no data: name a file, a pattern like 'day*.vw', or - ")
    return sources


def remove_spooled(sources: Sequence[Source]) -> None:
    """Removes the copies of standard input, and no other file."""
    for source in sources:
        if source.spooled:
            Path(source.path).unlink(missing_ok=True)


def _source(path: str) -> Source:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SettingError(f"{path} is no file; what comes from a pipe is read as -")
            packed = file.read(len(GZIP)) == GZIP
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from error
    return Source(os.path.abspath(path), status.st_size, status.st_mtime_ns, packed)


def _spooled() -> str:
    """Standard input can be read once, by one process: the workers read a copy."""
    with tempfile.NamedTemporaryFile(prefix="commute-stdin-", delete=False) as file:
        shutil.copyfileobj(sys.stdin.buffer, file, BLOCK_BYTES)
    return file.name


def format_of(path: str) -> str | None:
    """What the end of a file's name says about its format.

    >>> format_of("clicks.csv.gz")
    'csv'
    """
    name = Path(path.removesuffix(".gz"))
    return {
        ".svm": "svm",
        ".libsvm": "svm",
        ".svmlight": "svm",
        ".vw": "vw",
        ".csv": "csv",
        ".tsv": "tsv",
        ".tab": "tsv",
    }.get(name.suffix.lower())


def first_lines(source: Source, most: int = SAMPLE_LINES) -> list[str]:
    """The beginning of a file, for guessing."""
    opened = gzip.open if source.packed else open
    try:
        with opened(source.path, "rb") as file:
            lines = [line.decode("utf-8", "replace") for line in islice(file, most)]
    except (OSError, EOFError) as error:
        raise SettingError(f"{source.path} cannot be read: {error}") from error
    return [line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(lines)]


def deal(sources: Sequence[Source], streams: int) -> list[list[Piece]]:
    """The pieces of each stream: large files are dealt out block by block, so that all streams are
    at about the same place, and what was written last is learned last.

    >>> file = Source("a", 1000, 0, False)
    >>> [(p.begin, p.end) for [p] in deal([file], 2)]
    [(0, 500), (500, 1000)]
    """
    plain = [source for source in sources if not source.packed]
    ends = list(accumulate(source.bytes for source in plain))
    total = ends[-1] if ends else 0
    turns = max(1, total // (streams * TURN_BYTES)) if streams > 1 else 1
    dealt: list[list[Piece]] = []
    for stream in range(streams):
        pieces: list[Piece] = []
        for block in range(stream, turns * streams, streams):
            begin, end = (total * i // (turns * streams) for i in (block, block + 1))
            pieces += _between(plain, ends, begin, end)
        pieces += [Piece(s, stream, streams, streams) for s in sources if s.packed]
        dealt.append(pieces)
    return dealt


def _between(
    sources: Sequence[Source], ends: Sequence[int], begin: int, end: int
) -> Iterator[Piece]:
    """What lies there, if the sources are thought of as one after the other."""
    for i in range(bisect_right(ends, begin), len(sources)):
        at = ends[i] - sources[i].bytes
        if at >= end:
            return
        first, last = max(begin - at, 0), min(end - at, sources[i].bytes)
        if first < last:
            yield Piece(sources[i], first, last)


def texts(piece: Piece) -> Iterator[Text]:
    """The lines of a piece, as one text or several."""
    if piece.source.packed:
        yield from _blocks(piece)
        return
    with open(piece.source.path, "rb") as file:
        if os.fstat(file.fileno()).st_size < piece.end:
            raise SettingError(f"{piece.source.path} became shorter while it was read")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = _line_at(data, piece.begin)
    end = len(data) if piece.end == len(data) else _line_at(data, piece.end)
    if begin < end:
        yield Text(data, begin, end, begin)


def _line_at(data: mmap.mmap, at: int) -> int:
    """Where the first line begins that does not begin before `at`."""
    if at == 0:
        return 0
    newline = data.find(b"\n", at - 1)
    return len(data) if newline < 0 else newline + 1


def _blocks(piece: Piece) -> Iterator[Text]:
    number, at, rest = 0, 0, b""
    try:
        with gzip.open(piece.source.path, "rb") as file:
            while True:
                read = file.read(BLOCK_BYTES)
                block = rest + read
                cut = block.rfind(b"\n") + 1 if read else len(block)
                rest = block[cut:]
                if cut and number % piece.every == piece.begin:
                    yield Text(block[:cut], 0, cut, at)
                at += cut
                number += bool(cut)
                if not read:
                    return
    except (OSError, EOFError) as error:
        raise SettingError(f"{piece.source.path} cannot be unpacked: {error}") from error
