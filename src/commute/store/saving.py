# SPDX-License-Identifier: Apache-2.0
"""Saving a store: all its ranks write, each the slots of its share.

    agree      all ranks have flushed, at equal clocks, with nothing half built
    prepare    rank 0 makes a folder beside the path
    write      each rank writes one segment: of sparse tables the rows of its slots, asked for by
               range of hashes; of dense ones the parts that lie in its slots
    complete   rank 0 writes the manifest, and puts the folder in its place

After each step the ranks tell each other how it went: when one has failed, all raise the same. The
last exchange is also what keeps ranks from pushing before all have read.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np

from commute._errors import CheckpointError, MismatchError
from commute.store.dense import DenseTable
from commute.store.links import SLOTS
from commute.store.manifest import Manifest, SavedPart, SavedTable, Site, discard, segment_name
from commute.store.segments import FileRecord, SegmentWriter, header_room
from commute.store.sparse import SparseTable
from commute.store.table import Table
from commute.store.updates import core_update

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["Progress", "Together", "arrays_of", "check_quiet", "kind_of", "save", "shape_of"]

PROGRESS_SECONDS: Final = 5.0
SAVED: Final = struct.Struct("<QQ")  # before an array of a dense part: updates, which
_SPAN: Final = (1 << 64) // SLOTS  # hashes of a slot
_ROOM_MAX: Final = 50_000_000  # bytes of a header
_ASKED: Final = 8  # parts of a dense table, at a time


class Together:
    """Steps that all ranks of a store take; each learns how it went everywhere."""

    def __init__(self, store: Store, timeout: float) -> None:
        self._group = store._group
        self._timeout = timeout
        # A client of `commute serve` is alone.
        self.rank = 0 if self._group is None else store._links.rank
        self.size = 1 if self._group is None else self._group.size

    def __call__(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """What the step gave on each rank, as JSON knows it; raises the same on all of them."""
        mine: Any = None
        error: Exception | None = None
        try:
            mine = step()
        except Exception as failed:
            error = failed
        text = "" if error is None else self._in_words(what, error)
        told = self._gathered({"value": mine, "error": text})
        failures = [each["error"] for each in told if each["error"]]
        if error is not None and not isinstance(error, (CheckpointError, OSError)):
            raise error
        if failures:
            raise CheckpointError(failures[0]) from error
        return [each["value"] for each in told]

    def first(self, what: str, step: Callable[[], Any]) -> Any:
        """A step of rank 0 alone."""
        return self(what, lambda: step() if self.rank == 0 else None)[0]

    def _in_words(self, what: str, error: Exception) -> str:
        if isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            return f"rank {self.rank} failed at {what}: {where}{error.strerror or error}"
        if isinstance(error, CheckpointError):
            return str(error)
        return f"rank {self.rank} failed at {what}: {type(error).__name__}: {error}"

    def _gathered(self, mine: Any) -> list[Any]:
        if self._group is None:
            return [json.loads(json.dumps(mine))]
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        sizes = self._group.allgather(np.array([text.size]), timeout=self._timeout)[:, 0]
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: text.size] = text
        everyone = self._group.allgather(padded, timeout=self._timeout)
        pairs = zip(everyone, sizes, strict=True)
        return [json.loads(each[:size].tobytes()) for each, size in pairs]


class Progress:
    """A line on rank 0's stderr every few seconds; nothing of what is quick."""

    def __init__(self, rank: int) -> None:
        self._next = time.monotonic() + PROGRESS_SECONDS if rank == 0 else float("inf")

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_SECONDS
            print(f"commute: {line}", file=sys.stderr, flush=True)


def check_quiet(store: Store, together: Together, path: str, timeout: float, verb: str) -> None:
    """Flush; then all must have the same tables, at equal clocks, and no piece left over."""

    def state() -> dict[str, Any]:
        store.flush(timeout=timeout)
        endpoint = store._links.endpoint
        return {
            "path": path,
            "clocks": {t.name: endpoint.clock(t._number) for t in store.tables()},
            "building": [t.name for t in store.tables() if endpoint.building(t._number)],
        }

    told = together("flush", state)
    here = f"{verb} of store {store.name!r}"
    first = told[0]
    for rank, other in enumerate(told):
        if other["path"] != first["path"]:
            raise MismatchError(
                f"{here}: rank 0 has the path {first['path']}, rank {rank} {other['path']}"
            )
        if other["clocks"].keys() != first["clocks"].keys():
            raise MismatchError(
                f"{here}: rank 0 has declared the tables {sorted(first['clocks'])}, rank {rank}"
                f" {sorted(other['clocks'])}"
            )
        if other["building"]:
            raise MismatchError(
                f"{here}: rank {rank} has pushed pieces to {other['building'][0]!r}"
                " (accumulate=True) that no push has completed"
            )
    for name in told[0]["clocks"]:
        clocks = [each["clocks"][name] for each in told]
        if len(set(clocks)) > 1:
            shown = ", ".join(f"rank {rank} is at {clock}" for rank, clock in enumerate(clocks))
            raise MismatchError(
                f"{here}: the clocks of table {name!r} differ: {shown}; all ranks must call it"
                " after equally many contributions"
            )


def arrays_of(table: Table) -> list[str]:
    """What is saved of each part of a dense table, or of each row, by name."""
    if isinstance(table, SparseTable):
        return ["keys", *table._columns()]
    return ["value", *(f"state{i}" for i in range(table._spec.layout[1]))]


def kind_of(table: Table) -> str:
    return "dense" if isinstance(table, DenseTable) else "sparse"


def shape_of(table: Table) -> list[int]:
    """Of a sparse table that of a row."""
    if isinstance(table, DenseTable):
        return list(table.shape)
    return [cast(SparseTable, table).width]


# ---- saving ----


def save(store: Store, path: Any, timeout: float) -> None:
    """See Store.save."""
    together = Together(store, timeout)
    site = Site(path)
    check_quiet(store, together, site.path, timeout, "save")
    folder = together.first("making a folder", site.prepare)
    try:
        written = together("writing", lambda: _Writer(store, together, folder).write())
        manifest = _manifest(store, written)
        together.first("putting it in place", lambda: site.complete(folder, manifest))
    except BaseException:
        if together.rank == 0:
            discard(folder)
        raise


class _Writer:
    """One rank's share."""

    def __init__(self, store: Store, together: Together, folder: str) -> None:
        self._tables = store.tables()
        self._progress = Progress(together.rank)
        self._about = {"format": "commute checkpoint 1", "store": store.name}
        self._folder = folder
        # One segment for each rank; more where a header would become too long for the format.
        count = min(max(together.size, -(-self._room(SLOTS) // _ROOM_MAX)), SLOTS)
        self._segments = range(together.rank, count, together.size)
        self._count = count
        self._first = self._end = 0  # slots of the segment that is written
        self._rows: dict[str, int] = {}
        self._updates: dict[str, list[tuple[int, int]]] = {}

    def write(self) -> dict[str, Any]:
        """The files' records, rows of sparse tables, and updates of dense parts."""
        records = [self._write_segment(index) for index in self._segments]
        return {"files": records, "rows": self._rows, "updates": self._updates}

    def _write_segment(self, index: int) -> dict[str, Any]:
        self._first, self._end = (SLOTS * i // self._count for i in (index, index + 1))
        path = os.path.join(self._folder, segment_name(index, self._count))
        segment = SegmentWriter(path, self._room(self._end - self._first))
        try:
            for table in self._tables:
                if isinstance(table, SparseTable):
                    self._write_rows(segment, table)
                elif isinstance(table, DenseTable):
                    self._write_parts(segment, table)
            return msgspec.structs.asdict(segment.finish(self._about))
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            segment.close()

    def _room(self, slots: int) -> int:
        """For a header about so many slots."""
        room = 4096
        for table in self._tables:
            name_bytes = len(json.dumps(table.name)) + 16
            room += header_room(slots * len(arrays_of(table)), name_bytes)
        return room

    def _write_rows(self, segment: SegmentWriter, table: SparseTable) -> None:
        shards = deque(
            _slots_of(table, shard, self._first, self._end)
            for shard in range(len(table._endpoint.shards_of(table._number)))
        )
        names, done, rows = arrays_of(table), 0, 0
        while shards:
            found = next(shards[0], None)
            if found is None:
                shards.popleft()
                continue
            shards.rotate(-1)
            slot, pieces = found
            count = sum(len(piece[0]) for piece in pieces)
            for i, name in enumerate(names):
                dtype, shape = _column(table, name, count)
                columns = [piece[i] for piece in pieces]
                segment.add(f"{table.name}/{slot:04}/{name}", dtype, shape, columns)
            done, rows = done + 1, rows + count
            self._progress(self._line(table.name, rows, done, segment.data_bytes))
        self._rows[table.name] = self._rows.get(table.name, 0) + rows

    def _line(self, name: str, rows: int, slots: int, size: int) -> str:
        share = slots / (self._end - self._first)
        return (
            f"saving {name}: {rows / 1e6:.1f} of about {rows / share / 1e6:.1f} M rows of this"
            f" segment, {size / 1e6:.0f} MB written"
        )

    def _write_parts(self, segment: SegmentWriter, table: DenseTable) -> None:
        parts = table._endpoint.parts_of(table._number)
        mine = [i for i, (slot, _, _) in enumerate(parts) if self._first <= slot < self._end]
        names = arrays_of(table)
        wanted = [(part, which) for part in mine for which in range(len(names))]
        asked: deque[Callable[[], np.ndarray[Any, Any]]] = deque()
        updates = {}
        for done, (part, which) in enumerate(wanted):
            while len(asked) < _ASKED and done + len(asked) < len(wanted):
                asked.append(table._ask_saved(*wanted[done + len(asked)]))
            answer = asked.popleft()()
            updates[part], _ = SAVED.unpack(answer[: SAVED.size].tobytes())
            size = parts[part][2]
            shape = (size // table._item_bytes(),)
            value = answer[SAVED.size : SAVED.size + size].copy()  # the answer has room for 1 MB
            segment.add(f"{table.name}/{part:04}/{names[which]}", table.dtype, shape, [value])
            self._progress(f"saving {table.name}: part {part} of {len(parts)}")
        self._updates.setdefault(table.name, []).extend(updates.items())


def _column(table: SparseTable, name: str, count: int) -> tuple[str, tuple[int, ...]]:
    if name == "keys":
        return "uint64", (count,)
    if name in ("step", "touched"):
        return "uint32", (count,)
    return table.dtype, (count, table.width)


def _slots_of(
    table: SparseTable, shard: int, first: int, end: int
) -> Iterator[tuple[int, list[list[np.ndarray[Any, Any]]]]]:
    """The slots of a shard that have rows: each with its columns, in pieces.

    The first block is asked for at once, each other one before the one before it is used.
    """
    return _from(table, shard, end, table._ask_saved(shard, first * _SPAN))


def _from(
    table: SparseTable,
    shard: int,
    end: int,
    wait: Callable[[], np.ndarray[Any, Any]],
) -> Iterator[tuple[int, list[list[np.ndarray[Any, Any]]]]]:
    pieces: list[list[np.ndarray[Any, Any]]] = []
    slot, more = -1, True
    while more:
        block = table._block(wait())
        more = 0 < block.following < end * _SPAN
        if more:
            wait = table._ask_saved(shard, block.following)
        at = 0
        for run, count in block.runs.tolist():
            if run >= end:
                break
            if run != slot and pieces:
                yield slot, pieces
                pieces = []
            slot = run
            pieces.append([column[at : at + count] for column in (block.keys, *block.columns)])
            at += count
    if pieces:
        yield slot, pieces


def _manifest(store: Store, written: list[dict[str, Any]]) -> Manifest:
    tables = {table.name: _saved_table(table, written) for table in store.tables()}
    files = [FileRecord(**record) for each in written for record in each["files"]]
    return Manifest(store=store.name, slots=SLOTS, tables=tables, files=files)


def _saved_table(table: Table, written: list[dict[str, Any]]) -> SavedTable:
    endpoint = table._endpoint
    parts = []
    if isinstance(table, DenseTable):
        updates = dict(pair for each in written for pair in each["updates"].get(table.name, ()))
        for i, (_, begin, size) in enumerate(endpoint.parts_of(table._number)):
            parts.append(SavedPart(begin, size, updates[i]))
    return SavedTable(
        kind=kind_of(table),
        dtype=table.dtype,
        shape=shape_of(table),
        update=core_update(table._update).describe(),
        declaration=table._spec.describe(),
        staleness=table._staleness,
        clock=endpoint.clock(table._number),
        arrays=arrays_of(table),
        rows=sum(each["rows"].get(table.name, 0) for each in written),
        parts=parts,
    )
