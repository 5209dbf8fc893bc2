# SPDX-License-Identifier: Apache-2.0
"""SparseTable: rows by uint64 keys, of which a batch touches a few; push, pull, tickets, questions.

Keys come as users have them, unsorted and repeated; the core sends each once, to the shard that
keeps it, and combines what was pushed for it twice by the table's operation. A row that nobody has
pushed is not there: a pull gives what `init` says, and stores nothing.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from commute import _core
from commute._arrays import Buffer, reading
from commute._errors import ArrayError, SettingError
from commute._handle import Handle
from commute._runner import SLICE_SECONDS
from commute.store.table import StoreHandle, Table, number_as

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["RowBlock", "SparseTable", "Ticket"]

_SUMMARY: Final = struct.Struct("<ddqQQQ")
_ITEMS: Final = struct.Struct("<QII")
_KEYS_MAX: Final = (1 << 32) - 2
_LAST: Final = 2  # Client::Remember of core/store/client.h


class RowBlock(NamedTuple):
    """Some rows of one shard in the order of their hashes, with their state.

    Attributes:
        following: where the next block begins; 0: nowhere.
        runs: slots, and how many rows of each.
        columns: bytes, in the order of `SparseTable._columns`.
    """

    following: int
    runs: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]
    columns: list[np.ndarray[Any, Any]]


class Ticket:
    """The keys of a pull, remembered here and by the servers together with where their rows are.

    `table.push(ticket, gradients)` sends no keys, and the servers need not look the rows up again.
    It holds for as long as it is kept, and for any number of calls; what a server has forgotten in
    between it asks for.
    """

    def __init__(self, table: SparseTable, keys: _core.Keys, shape: tuple[int, ...]) -> None:
        self._table = table
        self._keys = keys
        self._shape = shape

    def __len__(self) -> int:
        return self._keys.given

    def __repr__(self) -> str:
        return f"<Ticket of {len(self)} keys of table {self._table.name!r}>"


class SparseTable(Table):
    """A map from uint64 to rows of numbers, kept by the servers. Made by `Store.sparse`.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     e = world.store().sparse("e", width=2, update=commute.SGD(lr=0.5))
    ...     e.push([7, 1 << 60, 7], numpy.ones((3, 2), "float32"))
    ...     e.pull([1 << 60, 7, 8])
    array([[-0.5, -0.5],
           [-1. , -1. ],
           [ 0. ,  0. ]], dtype=float32)

    Attributes:
        name, width, dtype: as declared.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        number: int,
        spec: _core.TableSpec,
        width: int,
        *,
        cache_keys: bool,
        **settings: Any,
    ) -> None:
        super().__init__(store, name, number, spec, **settings)
        self.width = width
        self._cache_keys = cache_keys

    def __repr__(self) -> str:
        return f"<SparseTable {self.name!r} of rows of {self.width} {self.dtype}>"

    # ---- the two verbs ----

    def push(
        self,
        keys: Any,
        gradients: Any,
        *,
        accumulate: bool = False,
        scale: float | None = None,
        last: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Contribute to the rows of these keys; returns when the arrays may be used again.

        Args:
            keys: integers from 0 to 2^64 - 1, in any order, repeated or not, or none at all; or the
                ticket of a pull.
            gradients: an array of the keys' shape with one more axis of length `width` (rows of one
                element may leave it out), or a list of them, one per device.
            accumulate: a piece of the contribution being built; it does not count as one.
            scale: multiply by this first, with a Semiring by its multiplication.
            last: these keys will not come again, so the servers need not remember a ticket's.
        """
        self._limit(timeout)  # a bad one is refused before anything is sent
        remember = _LAST if last and self._remembers(keys) else self._remembers(keys)
        call = self._push(keys, gradients, scale, "push", remember, piece=accumulate, asked=False)
        if call and self._must_wait():
            self._finish(call, f"push to {self.name!r}", timeout)
            self._check_trouble()

    def push_async(
        self, keys: Any, gradients: Any, *, accumulate: bool = False, scale: float | None = None
    ) -> Handle:
        """As `push`, returning at once; `wait()` waits until it is committed."""
        remember = self._remembers(keys)
        call = self._push(
            keys, gradients, scale, "push_async", remember, piece=accumulate, asked=True
        )
        return StoreHandle(self, call, f"push to {self.name!r}", None)

    def pull(
        self, keys: Any, *, out: Any = None, ticket: bool = False, timeout: float | None = None
    ) -> Any:
        """The rows of these keys; waits until the slowest member is at most `staleness` behind me.

        Args:
            keys: as for `push`.
            out: an array to write into; by default a new one.
            ticket: return (rows, ticket), where the ticket stands for the keys from then on.
        """
        self._limit(timeout)
        order, shape = self._order(keys, "pull")
        target, result = self._target(out, (*shape, self.width), "pull")
        call = self._ask_rows(order, target, keys, ticket, SLICE_SECONDS)
        if call:
            self._finish(call, f"pull of {self.name!r}", timeout)
        return (result, self._ticket(keys, order, shape)) if ticket else result

    def pull_async(
        self, keys: Any, *, out: Any = None, ticket: bool = False, background: bool = True
    ) -> Handle:
        """As `pull`, returning at once; `wait()` gives the rows.

        Args:
            background: a thread takes what comes. If False it is taken by `wait()`, or on the way
                by other calls: for those who wait soon, that is less to do.
        """
        order, shape = self._order(keys, "pull_async")
        target, result = self._target(out, (*shape, self.width), "pull_async")
        call = self._ask_rows(order, target, keys, ticket, -1.0 if background else 0.0)
        value = (result, self._ticket(keys, order, shape)) if ticket else result
        return StoreHandle(self, call, f"pull of {self.name!r}", value)

    def ticket(self, keys: Any) -> Ticket:
        """The keys put in order, to be pulled and pushed by; nothing is sent.

        Putting them in order is a good part of the work of a call. Any thread may do it ahead.
        """
        order, shape = self._order(keys, "ticket")
        return self._ticket(keys, order, shape)

    def distinct(self, keys: Any) -> tuple[Ticket, np.ndarray[Any, Any]]:
        """A ticket of the distinct keys, and for each key given the number of its row.

        For those who use a row at many places: rows are pulled and pushed once each, in the order
        in which they travel, so nothing is copied to and fro. As `ticket`, it sends nothing.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     e = world.store().sparse("e", width=1)
        ...     ticket, index = e.distinct([7, 1 << 60, 7])
        ...     sums = numpy.bincount(index, [1.0, 2.0, 3.0]).astype("float32")
        ...     e.push(ticket, sums)
        ...     e.pull(ticket)[index].ravel()
        array([4., 2., 4.], dtype=float32)

        Returns:
            the ticket, whose length is how many keys differ; and an array of uint32 of the keys'
            shape: `rows[index]` are the rows of the keys, where `rows` are those of the ticket.
        """
        self._store._check()
        array = _as_keys(keys, self._here("distinct"))
        index = np.empty(array.shape, np.uint32)
        order = self._endpoint.distinct_of(
            array.ctypes.data, array.size, index.ctypes.data, self._cache_keys
        )
        return Ticket(self, order, (order.given,)), index

    def push_pull(
        self,
        keys: Any,
        gradients: Any,
        *,
        out: Any = None,
        scale: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        """`push` and then `pull` of the same keys, in one exchange."""
        self._limit(timeout)
        call, result = self._push_pull(keys, gradients, out, scale, "push_pull", SLICE_SECONDS)
        if call:
            self._finish(call, f"push_pull of {self.name!r}", timeout)
        return result

    def push_pull_async(
        self, keys: Any, gradients: Any, *, out: Any = None, scale: float | None = None
    ) -> Handle:
        """As `push_pull`, returning at once; `wait()` gives the rows."""
        call, result = self._push_pull(keys, gradients, out, scale, "push_pull_async", -1.0)
        return StoreHandle(self, call, f"push_pull of {self.name!r}", result)

    def drop(self, keys: Any, *, timeout: float | None = None) -> None:
        """Forget these rows; later pulls see initial rows. It returns when it is committed.

        As `set`, it takes effect after the caller's last contribution, in step after that round.
        """
        limit = self._limit(timeout)
        order, _ = self._order(keys, "drop")
        with self._links.calling():
            call = self._endpoint.drop_rows(self._number, order)
        if call:
            self._finish(call, f"drop of rows of {self.name!r}", limit)

    def reserve(self, rows: int, *, timeout: float | None = None) -> None:
        """There will be about so many rows: the next time servers need room they make enough.

        Without it a table grows a few times on its way, which takes a fifth of the time of making
        its rows. Only a wish: it changes nothing that can be seen, and half of a server's free
        memory is left. One worker does it for all.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     e = world.store().sparse("e", width=1)
        ...     e.reserve(100_000)
        ...     e.push(numpy.arange(100_000), numpy.ones(100_000, "float32"))
        ...     e.count()
        100000
        """
        limit = self._limit(timeout)
        self._store._check()
        if not isinstance(rows, int | np.integer) or not 0 <= rows < 1 << 64:
            raise SettingError(f"{self._here('reserve')}: expected a number of rows, got {rows!r}")
        with self._links.calling():
            call = self._endpoint.reserve(self._number, int(rows))
        self._finish(call, f"reserve of {self.name!r}", limit)

    # ---- questions ----

    def count(self) -> int:
        """How many rows there are."""
        return self._extent()[2]

    def top(self, k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The keys of the k rows of largest norm, and the norms.

        Rows of one element are compared by magnitude, and come with their sign.
        """
        return self._ranked(k)

    def items(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """All rows, in blocks of at most 1 MB: keys, and rows in the same order.

        Blocks are taken one after the other: what others push meanwhile may be in it or not. Each
        row that is there all the time comes exactly once.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     e = world.store().sparse("e", width=1)
        ...     e.push([3, 4], numpy.array([1.5, 2.5], "float32"))
        ...     sorted((int(k), float(r)) for keys, rows in e.items() for k, r in zip(keys, rows))
        [(3, 1.5), (4, 2.5)]
        """
        for shard in range(len(self._endpoint.shards_of(self._number))):
            start = -1
            while start:
                block = self._block(self._ask_saved(shard, max(start, 0))())
                start = block.following
                if len(block.keys):
                    yield block.keys, self._as_rows(block.columns[0], len(block.keys))

    # ---- within ----

    def _extent(self) -> tuple[tuple[int, ...], int, int]:
        summaries = list(_SUMMARY.iter_unpack(self._ask(0, sizes=True)))
        return (
            (self.width,),
            sum(part[5] for part in summaries),
            sum(part[4] for part in summaries),
        )

    def _check_set(self, numbers: dict[str, Any]) -> None:
        if numbers.get("lr_decay") and self._spec.layout[2] < 0:
            raise SettingError(
                f"set of {self.name!r}: rows that were declared without lr_decay do not count their"
                " steps; declare the table with a small one"
            )

    def _order(self, keys: Any, call: str) -> tuple[_core.Keys, tuple[int, ...]]:
        self._store._check()
        if isinstance(keys, Ticket):
            if keys._table is not self:
                raise ArrayError(f"{self._here(call)} got a ticket of table {keys._table.name!r}")
            return keys._keys, keys._shape
        array = _as_keys(keys, self._here(call))
        return self._endpoint.order_of(array.ctypes.data, array.size), array.shape

    def _ticket(self, keys: Any, order: _core.Keys, shape: tuple[int, ...]) -> Ticket:
        return keys if isinstance(keys, Ticket) else Ticket(self, order, shape)

    def _remembers(self, keys: Any, ticket: bool = False) -> bool:
        return ticket or self._cache_keys or isinstance(keys, Ticket)

    def _rows(self, array: Any, shape: tuple[int, ...], call: str) -> Buffer:
        buffer = reading(array, self._here(call))
        if self.width == 1 and buffer.shape == shape:
            buffer = buffer._replace(shape=(*shape, 1))
        self._fit(buffer, (*shape, self.width), call)
        return buffer

    def _given(
        self, keys: Any, gradients: Any, scale: float | None, call: str
    ) -> tuple[_core.Keys, tuple[int, ...], list[Buffer], Any]:
        order, shape = self._order(keys, call)
        devices = gradients if isinstance(gradients, (list, tuple)) else (gradients,)
        if not devices:
            raise ArrayError(f"{self._here(call)} expected at least one array, got none")
        buffers = [self._rows(array, shape, call) for array in devices]
        what = f"scale of {self._here(call)}"
        return order, shape, buffers, None if scale is None else number_as(scale, self.dtype, what)

    def _push(
        self,
        keys: Any,
        gradients: Any,
        scale: float | None,
        call: str,
        remember: int,
        *,
        piece: bool,
        asked: bool,
    ) -> int:
        order, _, buffers, factor = self._given(keys, gradients, scale, call)
        self._check_trouble()
        self._copies += 1
        self._copied_bytes += buffers[0].nbytes
        flags = (bool(piece), remember, asked, self._reject_nan)
        return self._send(order, buffers, factor, 0, flags, -1.0, None)

    def _push_pull(
        self,
        keys: Any,
        gradients: Any,
        out: Any,
        scale: float | None,
        call: str,
        seconds: float,
    ) -> tuple[int, Any]:
        order, shape, buffers, factor = self._given(keys, gradients, scale, call)
        target, result = self._target(out, (*shape, self.width), call, beside=buffers)
        self._copies += 1
        self._copied_bytes += buffers[0].nbytes
        flags = (False, self._remembers(keys), True, self._reject_nan)
        address = target.address if order.given else 0
        return self._send(order, buffers, factor, address, flags, seconds, target), result

    def _send(
        self,
        order: _core.Keys,
        buffers: Sequence[Buffer],
        factor: Any,
        out: int,
        flags: tuple[bool, int, bool, bool],
        seconds: float,
        arrays: Any,
    ) -> int:
        addresses = [buffer.address for buffer in buffers]
        scale = 0 if factor is None else factor.ctypes.data
        with self._sending():
            return self._endpoint.push_rows(
                self._number,
                order,
                addresses,
                scale,
                out,
                *flags,
                seconds,
                self._links.kept,
                arrays,
            )

    def _ask_rows(
        self, order: _core.Keys, target: Buffer, keys: Any, ticket: bool, seconds: float
    ) -> int:
        remember = self._remembers(keys, ticket)
        with self._links.calling():
            return self._endpoint.pull_rows(
                self._number, order, target.address, remember, seconds, self._links.kept, target
            )

    def _columns(self) -> dict[str, int]:
        """What a row is made of, beside its key: names, and bytes of each."""
        value, states, step, touched, _ = self._spec.layout
        columns = {"value": value, **{f"state{i}": value for i in range(states)}}
        return (
            columns | ({"step": 4} if step >= 0 else {}) | ({"touched": 4} if touched >= 0 else {})
        )

    def _block(self, answer: np.ndarray[Any, Any]) -> RowBlock:
        following, count, run_count = _ITEMS.unpack(answer[: _ITEMS.size].tobytes())
        at = _ITEMS.size
        runs = answer[at : at + 8 * run_count].view(np.uint32).reshape(run_count, 2)
        at += 8 * run_count
        keys = answer[at : at + 8 * count].view(np.uint64)
        at += 8 * count
        columns = []
        for size in self._columns().values():
            columns.append(answer[at : at + count * size].reshape(count, size))
            at += count * size
        return RowBlock(following, runs, keys, columns)

    def _as_rows(self, values: np.ndarray[Any, Any], count: int) -> Any:
        if self.dtype != "bfloat16":
            return values.view(self.dtype).reshape(count, self.width)
        torch = sys.modules.get("torch")
        if torch is None:
            raise ArrayError("NumPy has no bfloat16; import torch for the rows of such a table")
        flat = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.bfloat16)
        return flat.reshape(count, self.width)

    def _summaries(self) -> list[tuple[Any, ...]]:
        return list(_SUMMARY.iter_unpack(self._ask(0)))


def _as_keys(keys: Any, here: str) -> np.ndarray[Any, Any]:
    """The keys as an array of uint64; without a copy where they are that already."""
    if not isinstance(keys, np.ndarray):
        if hasattr(keys, "detach"):
            keys = keys.detach().cpu().numpy()
        else:
            try:
                keys = np.asarray(keys, dtype=np.uint64 if _all_whole(keys) else None)
            except (OverflowError, ValueError, TypeError):
                raise ArrayError(
                    f"{here} expected an array of keys from 0 to 2^64 - 1, got {str(keys)[:80]}"
                ) from None
    if keys.size == 0:
        return np.empty(keys.shape, np.uint64)
    if keys.dtype.kind not in "iu":
        raise ArrayError(f"{here} expected integers as keys, got {keys.dtype}")
    if keys.dtype.kind == "i" and keys.min() < 0:
        raise ArrayError(
            f"{here} expected keys from 0 to 2^64 - 1, got {keys.min()}; hash what is not a"
            " number, or view the array as uint64"
        )
    if keys.size > _KEYS_MAX:
        raise ArrayError(f"{here} expected at most {_KEYS_MAX} keys in a call, got {keys.size}")
    # Not ascontiguousarray, which would give a single key an axis.
    return np.asarray(keys, dtype=np.uint64, order="C")


def _all_whole(keys: Any) -> bool:
    """Python's integers from 2^63 up would become floats in NumPy's hands.

    Raises OverflowError for negative ones, of which older NumPys make large ones.
    """
    if isinstance(keys, int):
        if keys < 0:
            raise OverflowError
        return not isinstance(keys, bool)
    return isinstance(keys, (list, tuple, range)) and all(_all_whole(key) for key in keys)
