# SPDX-License-Identifier: Apache-2.0
"""Loading a store that was saved, on any number of ranks, servers and shards.

agree      all ranks have flushed, at equal clocks, with nothing half built
check      the manifest, every file, every checksum, and whether the tables declared here can
           take what is there; ranks share the work. Nothing has changed up to here
reset      rank 0 empties the tables and sets everybody's clock
load       each rank sends its share: rows go where their keys belong; of dense tables it makes
           the parts that there are here from the bytes that were saved
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commute._errors import CheckpointError
from commute.store.dense import DenseTable
from commute.store.manifest import Manifest, SavedTable, Site
from commute.store.saving import Progress, Together, arrays_of, check_quiet, kind_of, shape_of
from commute.store.segments import Segment, Tensor
from commute.store.sparse import SparseTable
from commute.store.table import Table
from commute.store.updates import core_update

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["load"]

ROWS_BYTES: Final = 4 << 20  # sent at a time
UNDER_WAY: Final = 16  # calls


def load(store: Store, path: Any, strict: bool, timeout: float) -> None:
    """See Store.load."""
    together = Together(store, timeout)
    site = Site(path)
    check_quiet(store, together, site.path, timeout, "load")
    saved = _Saved(site, together)
    try:
        tables = saved.check(store.tables(), strict)
        clocks = {table: saved.manifest.tables[table.name].clock for table in tables}
        together.first("resetting", lambda: _reset(clocks, timeout))
        for table, clock in clocks.items():
            store._links.endpoint.begin_at(table._number, clock)
        together("loading", lambda: _Loader(store, together, saved, timeout).load(tables))
    finally:
        saved.close()


def _reset(clocks: dict[Table, int], timeout: float) -> None:
    for table, clock in clocks.items():
        with table._links.calling():
            call = table._endpoint.reset(table._number, clock)
        table._finish(call, f"reset of {table.name!r}", timeout)


class _Saved:
    """A checkpoint: what is in it, and where."""

    manifest: Manifest

    def __init__(self, site: Site, together: Together) -> None:
        self._site = site
        self._together = together
        self.segments: list[Segment] = []
        self.tensors: dict[str, tuple[Segment, Tensor]] = {}
        self.slots: dict[str, list[str]] = {}  # of sparse tables, those with rows

    def check(self, declared: list[Table], strict: bool) -> list[Table]:
        """The tables to load; raises CheckpointError, on all ranks the same."""
        sums = self._together("checking", self._open)
        if len(set(sums)) > 1:
            raise CheckpointError(f"{self._site.path} is not the same folder on all ranks")
        tables: list[Table] = []
        self._together("checking", lambda: tables.extend(self._fit(declared, strict)))
        self._together("checking", self._check_blocks)
        return tables

    def close(self) -> None:
        for segment in self.segments:
            segment.close()

    def _open(self) -> str:
        self.manifest = self._site.manifest()
        for record in self.manifest.files:
            segment = Segment(self._site.path, record)
            self.segments.append(segment)
            for name, tensor in segment.tensors().items():
                self.tensors[name] = (segment, tensor)
                if name.endswith("/keys"):
                    table, slot, _ = name.rsplit("/", 2)
                    self.slots.setdefault(table, []).append(slot)
        return self.manifest.checksum

    def _check_blocks(self) -> None:
        progress = Progress(self._together.rank)
        blocks = [(s, i) for s in self.segments for i in range(len(s.record.blocks))]
        mine = blocks[self._together.rank :: self._together.size]
        for done, (segment, block) in enumerate(mine):
            segment.check(block)
            progress(f"checking {self._site.path}: {done} of {len(mine)} blocks")

    def _fit(self, declared: list[Table], strict: bool) -> list[Table]:
        path, saved = self._site.path, self.manifest.tables
        missing = [table.name for table in declared if table.name not in saved]
        unknown = [name for name in saved if name not in {table.name for table in declared}]
        if strict and missing:
            raise CheckpointError(
                f"{path} has no table {missing[0]!r}, which is declared here; it has"
                f" {sorted(saved)}. With strict=False it would stay as it is"
            )
        if strict and unknown:
            raise CheckpointError(
                f"{path} has a table {unknown[0]!r}, which is not declared here; with strict=False"
                " it would be left out"
            )
        tables = [table for table in declared if table.name in saved]
        for table in tables:
            wrong = _misfit(table, saved[table.name])
            if wrong:
                raise CheckpointError(f"{path} does not fit table {table.name!r}: {wrong}")
            self._check_tensors(table.name, saved[table.name])
        return tables

    def _check_tensors(self, name: str, table: SavedTable) -> None:
        """Whether there is everything that the manifest speaks of."""
        rows = 0
        whole = f"{self._site.path} lacks a part of table {name!r}"
        for slot in self.slots.get(name, ()) if table.kind == "sparse" else ():
            count = self.tensors[f"{name}/{slot}/keys"][1].shape[0]
            rows += count
            for array in table.arrays:
                found = self.tensors.get(f"{name}/{slot}/{array}")
                if found is None or found[1].shape[:1] != (count,):
                    raise CheckpointError(f"{whole}: {array} of slot {slot}")
        if rows != table.rows:
            raise CheckpointError(f"{whole}: {rows} of {table.rows} rows are there")
        for i, part in enumerate(table.parts):
            for array in table.arrays:
                found = self.tensors.get(f"{name}/{i:04}/{array}")
                if found is None or found[1].end - found[1].begin != part.bytes:
                    raise CheckpointError(f"{whole}: {array} of part {i}")


def _misfit(table: Table, saved: SavedTable) -> str:
    """Why a table cannot take what was saved of another; empty when it can."""
    kind = kind_of(table)
    update = core_update(table._update).describe()
    for what, here, there in (
        ("it is", kind, saved.kind),
        ("its dtype is", table.dtype, saved.dtype),
        ("its shape is" if kind == "dense" else "its width is", shape_of(table), saved.shape),
        ("its update is", _sort_of(update), _sort_of(saved.update)),
    ):
        if here != there:
            return f"{what} {here} here, and {there} there"
    lacking = [name for name in arrays_of(table) if name not in (*saved.arrays, "touched")]
    if lacking:
        return f"it needs {lacking[0]} of each row, which was not saved"
    return ""


def _sort_of(update: str) -> str:
    """An optimizer without its numbers: those that are declared here hold."""
    return update if update.startswith("Semiring") else update.partition("(")[0]


class _Loader:
    """One rank's share."""

    def __init__(self, store: Store, together: Together, saved: _Saved, timeout: float) -> None:
        self._store = store
        self._rank, self._size = together.rank, together.size
        self._saved = saved
        self._timeout = timeout
        self._progress = Progress(together.rank)
        self._calls: deque[tuple[Table, int]] = deque()

    def load(self, tables: list[Table]) -> None:
        for table in tables:
            if isinstance(table, SparseTable):
                self._load_rows(table)
            elif isinstance(table, DenseTable):
                self._load_parts(table)
        while self._calls:
            self._finish_one()
        self._store.flush(timeout=self._timeout)

    def _sent(self, table: Table, call: int) -> None:
        self._calls.append((table, call))
        if len(self._calls) > UNDER_WAY:
            self._finish_one()

    def _finish_one(self) -> None:
        table, call = self._calls.popleft()
        if call:
            table._finish(call, f"load of {table.name!r}", self._timeout)

    def _load_rows(self, table: SparseTable) -> None:
        saved = self._saved.manifest.tables[table.name]
        form = _row_form(table)
        most = max(1, ROWS_BYTES // form.itemsize)
        sent, share = 0, saved.rows / self._size
        for slot in sorted(self._saved.slots.get(table.name, ()))[self._rank :: self._size]:
            count = self._count(table, slot)
            for first in range(0, count, most):
                end = min(first + most, count)
                self._send_rows(table, slot, first, end, form, saved)
                sent += end - first
                self._progress(
                    f"loading {table.name}: {sent / 1e6:.1f} of about {share / 1e6:.1f} M rows of"
                    " this rank's share"
                )

    def _count(self, table: SparseTable, slot: str) -> int:
        return self._saved.tensors[f"{table.name}/{slot}/keys"][1].shape[0]

    def _send_rows(
        self,
        table: SparseTable,
        slot: str,
        first: int,
        end: int,
        form: np.dtype[Any],
        saved: SavedTable,
    ) -> None:
        def column(name: str) -> np.ndarray[Any, Any]:
            segment, tensor = self._saved.tensors[f"{table.name}/{slot}/{name}"]
            size = (tensor.end - tensor.begin) // tensor.shape[0]
            return segment.read(tensor.begin + first * size, tensor.begin + end * size)

        rows = np.zeros(end - first, form)  # what lies between the columns is zeros
        for name in form.names or ():
            if name in saved.arrays:
                rows[name] = column(name).view(form[name])
            else:  # expiry was not declared when it was saved
                rows[name] = np.array(saved.clock & 0xFFFFFFFF, np.uint32).view(form[name])
        keys = column("keys").view(np.uint64)
        with table._links.calling():
            order = table._endpoint.order_of(keys.ctypes.data, keys.size)
            call = table._endpoint.load_rows(
                table._number, order, rows.ctypes.data, self._count(table, slot)
            )
        self._sent(table, call)

    def _load_parts(self, table: DenseTable) -> None:
        saved = self._saved.manifest.tables[table.name]
        parts = table._endpoint.parts_of(table._number)
        for part in range(self._rank, len(parts), self._size):
            _, begin, size = parts[part]
            there = [
                (i, old)
                for i, old in enumerate(saved.parts)
                if old.begin < begin + size and begin < old.begin + old.bytes
            ]
            updates = max((old.updates for _, old in there or enumerate(saved.parts)), default=0)
            for which, name in enumerate(arrays_of(table)):
                pieces = [np.empty(0, np.uint8)]
                for i, old in there:
                    segment, tensor = self._saved.tensors[f"{table.name}/{i:04}/{name}"]
                    cut = max(0, begin - old.begin), min(old.bytes, begin + size - old.begin)
                    pieces.append(segment.read(tensor.begin + cut[0], tensor.begin + cut[1]))
                array = np.concatenate(pieces)
                with table._links.calling():
                    call = table._endpoint.load(
                        table._number, part, updates, which, array.ctypes.data, array.nbytes
                    )
                self._sent(table, call)


def _row_form(table: SparseTable) -> np.dtype[Any]:
    """Where the columns are in a row, as the core has it."""
    value, states, step, touched, size = table._spec.layout
    places = {"value": (value, 0)} | {f"state{i}": (value, value * (i + 1)) for i in range(states)}
    places |= {"step": (4, step)} if step >= 0 else {}
    places |= {"touched": (4, touched)} if touched >= 0 else {}
    return np.dtype(
        {
            "names": list(places),
            "formats": [f"V{width}" for width, _ in places.values()],
            "offsets": [at for _, at in places.values()],
            "itemsize": size,
        }
    )
