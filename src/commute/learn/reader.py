# SPDX-License-Identifier: Apache-2.0
"""Examples of a stream, batch by batch; the core parses, a thread of its own stays ahead.

    pieces ──> texts ──> core.Parser ──> Examples ──> queue (2) ──> the trainer

A batch has `size(examples read before)` examples; it has fewer where a file, or a block of a
packed one, ends.
Lines that cannot be read are skipped and counted. The first ones are kept with file and line, and
when there are more than allowed, reading ends with a DataError that names them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from commute import _core
from commute._errors import DataError
from commute.learn.recipe import Recipe, split_cells
from commute.learn.sources import Piece, Text, texts

__all__ = ["BadLines", "Batch", "Parsed", "Stream", "ahead", "line_number"]

T = TypeVar("T")
AHEAD = 2  # batches
SHOWN = 5  # bad lines
# By how much a thread that stays ahead is nicer than those that others wait for, as for a server on
# the same cores: two workers beside it learn a tenth faster with 5, and 3 to 7% more with 10. Not
# nicer: beside a stranger's program on the same cores it would hardly read at all.
GIVES_WAY = 10


class Batch(Protocol):
    """Examples in rows: the features of example i are at places offsets[i] to offsets[i + 1]."""

    @property
    def count(self) -> int: ...
    @property
    def labels(self) -> np.ndarray[Any, Any]: ...
    @property
    def weights(self) -> np.ndarray[Any, Any]: ...
    @property
    def offsets(self) -> np.ndarray[Any, Any]: ...
    @property
    def values(self) -> np.ndarray[Any, Any] | None: ...  # None: all are 1


class Parsed(Batch, Protocol):
    """A batch as the text has it: a key at each place."""

    @property
    def keys(self) -> np.ndarray[Any, Any]: ...


class BadLines:
    """Lines that could not be read."""

    def __init__(self, most: int, hint: str = " (--bad-lines allows others)") -> None:
        self.count = 0
        self.shown: list[str] = []
        self._most, self._hint = most, hint

    def add(self, where: Callable[[], str], what: str, text: str) -> None:
        """One more. Raises DataError when these are too many."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where()}: {what}: {text!r}")
        if self.count > self._most:
            raise DataError(
                f"more than {self._most} lines cannot be read{self._hint}; the first are\n  "
                + "\n  ".join(self.shown)
            )


class Stream:
    """The batches of a stream's pieces, one pass at each iteration."""

    def __init__(
        self,
        recipe: Recipe,
        pieces: Sequence[Piece],
        *,
        size: Callable[[int], int],
        bad: BadLines,
        labels_needed: bool = True,
    ) -> None:
        self._recipe, self._pieces, self._size, self._bad = recipe, pieces, size, bad
        self._labels_needed = labels_needed
        self.examples = 0  # read, in all passes
        self._bytes = sum(piece.bytes for piece in pieces)
        self.passes = 0.0  # that are done, the one under way counted in part

    def __iter__(self) -> Iterator[Parsed]:
        begun = int(self.passes)
        for piece in self._pieces:
            for text in texts(piece):
                yield from self._parse(piece, text, begun == 0)
        self.passes = begun + 1

    def _parse(self, piece: Piece, text: Text, first_pass: bool) -> Iterator[Parsed]:
        parser = self._recipe.parser(self._header(piece), labels_needed=self._labels_needed)
        array = np.frombuffer(text.data, np.uint8)
        at, line = text.begin, 0
        if self._recipe.header and text.at == 0:
            at, line = _line_end(text), 1
        while at < text.end:
            most = self._size(self.examples)
            examples = parser.parse(array.ctypes.data + at, text.end - at, most, True)
            for number, what, said in examples.bad if first_pass else ():
                where = self._where(piece, text, line + number)
                self._bad.add(where, what, said)
            at += examples.consumed
            line += examples.lines
            self.examples += examples.count
            self.passes += min(examples.consumed / max(self._bytes, 1), 1.0)
            if examples.count:
                yield examples
            if examples.consumed == 0:
                return

    def _header(self, piece: Piece) -> list[str]:
        if not self._recipe.header:
            return []
        first = Piece(piece.source, 0, 1 if piece.source.packed else piece.source.bytes)
        text = next(texts(first), None)
        if text is None:  # an empty file, packed
            return []
        line = bytes(text.data[text.begin : _line_end(text)]).decode("utf-8", "replace")
        return split_cells(line.removeprefix("\ufeff"), self._recipe.separator)

    def _where(self, piece: Piece, text: Text, line: int) -> Callable[[], str]:
        return lambda: f"{piece.source.path}:{line_number(piece, text) + line + 1}"


def line_number(piece: Piece, text: Text) -> int:
    """Lines of the file before this text."""
    if piece.source.packed:
        before = (t for t in texts(Piece(piece.source, 0, 1)) if t.at < text.at)
        return sum(bytes(t.data[t.begin : t.end]).count(b"\n") for t in before)
    return int(np.count_nonzero(np.frombuffer(text.data, np.uint8)[: text.begin] == ord("\n")))


def _line_end(text: Text) -> int:
    end: int = text.data.find(b"\n", text.begin, text.end)
    return text.end if end < 0 else end + 1


def names_of(
    recipe: Recipe, pieces: Sequence[Piece], keys: np.ndarray[Any, Any], most_bytes: int
) -> dict[int, str]:
    """What the features of these keys are called, as far as the first bytes tell."""
    keys = np.ascontiguousarray(keys, np.uint64)
    found: dict[int, str] = {}
    stream = Stream(recipe, pieces, size=lambda _: 1, bad=BadLines(0))
    for piece in pieces:
        parser = recipe.parser(stream._header(piece))
        for text in texts(piece):
            if most_bytes <= 0 or len(found) == len(keys):
                return found
            size = min(text.end - text.begin, most_bytes)
            most_bytes -= size
            address = np.frombuffer(text.data, np.uint8).ctypes.data + text.begin
            found.update(_names(parser, address, size, keys, len(found)))
    return found


def _names(
    parser: _core.Parser, address: int, size: int, keys: np.ndarray[Any, Any], before: int
) -> dict[int, str]:
    """In steps, for most names come up soon."""
    found: dict[int, str] = {}
    step, at = 1 << 20, 0
    while at < size and before + len(found) < len(keys):
        found.update(parser.names(address + at, min(step, size - at), keys.ctypes.data, len(keys)))
        at += step
    return found


_END = object()


def ahead(batches: Iterator[T]) -> Iterator[T]:
    """The same items, made by a thread that stays a little ahead. Close it to end the thread.

    Queues of C, one for items and one for the room there is for them: a queue.Queue takes twenty
    calls of Python for an item, while it is needed elsewhere.
    """
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended = threading.Event()
    for _ in range(AHEAD):
        room.put(None)

    def fill() -> None:
        with contextlib.suppress(OSError):  # only a wish
            os.nice(GIVES_WAY)  # of this thread alone
        last: Any = _END
        try:
            for batch in batches:
                room.get()
                if ended.is_set():
                    return
                ready.put(batch)
        except BaseException as error:  # raised again where the batches are used
            last = error
        ready.put(last)

    thread = threading.Thread(target=fill, name="commute-reader", daemon=True)
    thread.start()
    try:
        while (batch := ready.get()) is not _END:
            room.put(None)
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        ended.set()
        room.put(None)
        thread.join()
