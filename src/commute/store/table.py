# SPDX-License-Identifier: Apache-2.0
"""DenseTable: a tensor on the servers, with its update; push, pull and what can be asked of it.

A call goes two ways: arguments become addresses (checked against the table's shape and dtype
before anything is sent), the endpoint in the core does the rest (slicing, numbering, sending), and
`StoreLinks.finish` waits.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commute import _core
from commute._arrays import CODES, FLOATS, Buffer, overlap, reading, writing
from commute._errors import ArrayError, OperationTimeoutError, SettingError
from commute._handle import Handle
from commute._runner import SLICE_SECONDS
from commute.store.links import StoreLinks, refusal, seconds
from commute.store.updates import Update, core_update, with_set

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["DenseTable", "StoreHandle", "TableInfo"]

_SUMMARY: Final = struct.Struct("<ddqQ")
_RANKED: Final = np.dtype([("index", "<u8"), ("value", "<f8")])
# Pushes that are copied and not committed yet; beyond that a push waits.
_KEPT_BYTES_MAX: Final = 64 << 20
_NAMES: Final = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class TableInfo:
    """What is known of a table on this worker.

    Attributes:
        bytes: of the value; an update's state comes on top.
        slots: where its parts live, and how many are there.
        copies, copied_bytes: of contributions, made by this worker (`push_pull` makes none).
        cache_hits: pulls that were answered here.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    update: str
    reduce: str
    staleness: int | None
    clock: int
    slots: dict[str, int]
    copies: int
    copied_bytes: int
    cache_hits: int


class StoreHandle(Handle):
    """A push or pull under way; `wait` returns the pulled array, and None for a push.

    A push is done when it is committed: held by every shard it goes to. The arrays of the call
    belong to it until it is done.
    """

    def __init__(self, table: DenseTable, call: int, what: str, result: Any) -> None:
        self._table = table
        self._call = call
        self._what = what
        self._value = result
        self._failed: Exception | None = None
        self._finished = call == 0
        table._links.let_go()

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the call, once it is there.

        Raises:
            OperationTimeoutError: it is not there after `timeout` seconds; the call goes on.
            PeerLostError, SlotLostError, ClosedError: as the blocking call.
        """
        if self._failed is not None:
            raise self._failed
        if not self._finished:
            try:
                self._table._finish(self._call, self._what, timeout)
            except OperationTimeoutError:
                raise
            except Exception as error:
                self._failed = error
                raise
            self._finished = True
        return self._value

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        if self._finished or self._failed is not None:
            return True
        try:
            return self._table._endpoint.done(self._call)
        except _core.CoreError:
            return True  # `wait` raises why

    def __repr__(self) -> str:
        return f"<Handle of {self._what}, {'done' if self.done() else 'under way'}>"


def number_as(value: Any, dtype: str, what: str) -> np.ndarray[Any, Any]:
    """One number as an array without axes; raises ArrayError where it does not fit the dtype."""
    if dtype == "bfloat16":
        raise ArrayError(f"{what}: NumPy has no bfloat16; pass a tensor")
    given = np.asarray(value)
    if given.ndim or given.dtype.kind not in "iufb":
        raise ArrayError(f"{what} expected one number, got {value!r}")
    with np.errstate(all="ignore"):
        cast = given.astype(dtype)
    whole = cast.dtype.kind in "iu"
    same = bool(cast == given) if whole else bool(np.isfinite(cast)) == bool(np.isfinite(given))
    if not same:
        raise ArrayError(f"{what} expected a number that fits {dtype}, got {value!r}")
    return cast


class DenseTable:
    """A tensor kept by the servers. Made by `Store.dense`.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     w = world.store().dense("w", (2,), update=commute.SGD(lr=0.5), init=1.0)
    ...     w.push_pull(numpy.array([1, 2], "float32"))
    array([0.5, 0. ], dtype=float32)

    Attributes:
        name, shape, dtype: as declared.
    """

    def __init__(
        self,
        store: Store,
        links: StoreLinks,
        name: str,
        shape: tuple[int, ...],
        code: int,
        number: int,
        *,
        update: str | Update,
        reduce: str,
        staleness: int | None,
        reject_nan: bool,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = _NAMES[code]
        self._store = store
        self._links = links
        self._endpoint = links.endpoint
        self._code = code
        self._count = math.prod(shape)
        self._number = number
        self._update = update
        self._reduce = reduce
        self._staleness = staleness
        self._reject_nan = reject_nan and code in FLOATS
        self._copies = 0
        self._copied_bytes = 0
        # The quick way of plain calls; none where every array must be looked at, or after leaving.
        self._plain: _core.PlainTable | None = None
        if self.dtype != "bfloat16" and not self._reject_nan:
            form = np.empty(0, dtype=self.dtype).data.format
            self._plain = _core.PlainTable(links.endpoint, number, form, list(shape), links.kept)

    def __repr__(self) -> str:
        return f"<DenseTable {self.name!r} {self.shape} {self.dtype}>"

    # ---- the two verbs ----

    def push(
        self,
        gradient: Any,
        *,
        accumulate: bool = False,
        scale: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Contribute; returns when the array may be used again.

        It waits only when this worker would be more than staleness + 1 ahead of the slowest, or has
        64 MB of pushes under way.

        Args:
            gradient: an array of the table's shape and dtype, or a list of them, one per device.
            accumulate: a piece of the contribution being built; it does not count as one.
            scale: multiply by this first, with a Semiring by its multiplication.
        """
        self._limit(timeout)  # a bad one is refused before anything is sent
        buffers, factor = self._contribution(gradient, scale, "push")
        call = self._send(buffers, factor, accumulate, asked=False, copy=True)
        self._copies += 1
        self._copied_bytes += buffers[0].nbytes
        with self._links.calling():
            wait = self._endpoint.kept_bytes() > _KEPT_BYTES_MAX
            wait = wait or (self._staleness is not None and self._endpoint.ahead(self._number))
        if wait:
            self._finish(call, f"push to {self.name!r}", timeout)
            self._check_trouble()

    def push_async(
        self, gradient: Any, *, accumulate: bool = False, scale: float | None = None
    ) -> Handle:
        """As `push`, returning at once; `wait()` waits until it is committed."""
        buffers, factor = self._contribution(gradient, scale, "push_async")
        call = self._send(buffers, factor, accumulate, asked=True, copy=False)
        return StoreHandle(self, call, f"push to {self.name!r}", None)

    def pull(self, *, out: Any = None, fresh: bool = False, timeout: float | None = None) -> Any:
        """The combined value; waits until the slowest member is at most `staleness` behind me.

        Args:
            out: an array to write into; by default a new one.
            fresh: ask the servers even where what is held here is good enough.
        """
        if out is None:
            out = self._empty()
        if not fresh and timeout is None and self._plain is not None:
            call = self._plain.pull(out)
            if call == 0:
                return out
            if call > 0:
                self._finish(call, f"pull of {self.name!r}", timeout)
                return out
        self._store._check()
        self._limit(timeout)  # a bad one is refused before anything is sent
        target, result = self._target(out, "pull")
        with self._links.calling():
            call = self._endpoint.pull(
                self._number, target.address, bool(fresh), SLICE_SECONDS, self._links.kept, target
            )
        if call:
            self._finish(call, f"pull of {self.name!r}", timeout)
        return result

    def pull_async(self, *, out: Any = None, fresh: bool = False) -> Handle:
        """As `pull`, returning at once; `wait()` gives the array."""
        self._store._check()
        target, result = self._target(out, "pull_async")
        with self._links.calling():
            call = self._endpoint.pull(
                self._number, target.address, bool(fresh), -1.0, self._links.kept, target
            )
        return StoreHandle(self, call, f"pull of {self.name!r}", result)

    def push_pull(
        self,
        gradient: Any,
        *,
        out: Any = None,
        scale: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        """`push` and then `pull`, in one exchange; nothing is copied on the way."""
        if out is None:
            out = self._empty()
        if scale is None and timeout is None and self._plain is not None:
            call = self._plain.push_pull(gradient, out)
            if call == 0:
                return out
            if call > 0:
                self._finish(call, f"push_pull of {self.name!r}", timeout)
                return out
        self._limit(timeout)
        buffers, factor = self._contribution(gradient, scale, "push_pull")
        target, result = self._target(out, "push_pull", beside=buffers)
        call = self._exchange(buffers, factor, target, SLICE_SECONDS)
        if call:
            self._finish(call, f"push_pull of {self.name!r}", timeout)
        return result

    def push_pull_async(
        self, gradient: Any, *, out: Any = None, scale: float | None = None
    ) -> Handle:
        """As `push_pull`, returning at once; `wait()` gives the array."""
        buffers, factor = self._contribution(gradient, scale, "push_pull_async")
        target, result = self._target(out, "push_pull_async", beside=buffers)
        call = self._exchange(buffers, factor, target, -1.0)
        what = f"push_pull of {self.name!r}"
        return StoreHandle(self, call, what, result)

    # ---- settings and questions ----

    def set(self, **numbers: Any) -> None:
        """Change numbers of the update, e.g. `set(lr=0.01)`, from the next round on.

        One worker does it for all. It returns when it is committed.
        """
        self._store._check()
        changed, change = with_set(self._update, numbers)
        with self._links.calling():
            call = self._endpoint.set(self._number, change)
        self._finish(call, f"set of {self.name!r}", None)
        self._update = changed

    def norm(self) -> float:
        """The Euclidean norm, computed where the table lies."""
        return math.sqrt(sum(row[1] for row in self._summaries()))

    def sum(self) -> float | int:
        """The sum of all elements, in float64; of integers exact, as a 64-bit number."""
        rows = self._summaries()
        if self._code in FLOATS:
            return math.fsum(row[0] for row in rows)
        whole = sum(row[2] for row in rows) & (2**64 - 1)
        signed = self.dtype.startswith("int") and whole >= 2**63
        return whole - 2**64 if signed else whole

    def nonzero(self) -> int:
        """How many elements are not zero."""
        return sum(row[3] for row in self._summaries())

    def top(self, k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The k elements of largest magnitude: their indices in C order, and their values."""
        if not isinstance(k, (int, np.integer)) or not 1 <= k < 1 << 32:
            raise SettingError(f"expected top(k) with a whole number k from 1 up, got {k!r}")
        rows = np.frombuffer(self._ask(int(k)), dtype=_RANKED)
        best = np.lexsort((rows["index"], -np.abs(rows["value"])))[:k]
        return rows["index"][best].astype(np.int64), rows["value"][best]

    def info(self) -> TableInfo:
        """Bytes, update, where it lives, and what this worker has done with it."""
        places: dict[str, int] = {}
        for shard in self._endpoint.shards_of(self._number):
            where = self._links.where(shard)
            places[where] = places.get(where, 0) + 1
        return TableInfo(
            name=self.name,
            shape=self.shape,
            dtype=self.dtype,
            bytes=self._nbytes(),
            update=core_update(self._update).describe(),
            reduce=self._reduce,
            staleness=self._staleness,
            clock=self._endpoint.clock(self._number),
            slots=places,
            copies=self._copies,
            copied_bytes=self._copied_bytes,
            cache_hits=self._endpoint.cache_hits(self._number),
        )

    # ---- within ----

    def _contribution(
        self, gradient: Any, scale: float | None, call: str
    ) -> tuple[list[Buffer], Any]:
        self._store._check()
        devices = gradient if isinstance(gradient, (list, tuple)) else (gradient,)
        if not devices:
            raise ArrayError(f"{self._here(call)} expected at least one array, got none")
        buffers = [self._reading(array, call) for array in devices]
        if scale is None:
            return buffers, None
        return buffers, number_as(scale, self.dtype, f"scale of {self._here(call)}")

    def _reading(self, array: Any, call: str) -> Buffer:
        if not self.shape and isinstance(array, (int, float, np.generic)):
            array = number_as(array, self.dtype, self._here(call))
        buffer = reading(array, self._here(call))
        if buffer.shape != self.shape or buffer.dtype != self._code:
            raise self._misfit(call, buffer)
        return buffer

    def _target(self, out: Any, call: str, beside: Sequence[Buffer] = ()) -> tuple[Buffer, Any]:
        if out is None:
            out = self._empty()
        buffer = writing(out, self._here(call))
        if buffer.shape != self.shape or buffer.dtype != self._code:
            raise self._misfit(call, buffer)
        for other in beside:
            if overlap(buffer, other) and buffer.address != other.address:
                raise ArrayError(
                    f"{self._here(call)} got an out= that overlaps the gradient; pass the same"
                    " array, or another"
                )
        return buffer, out

    def _empty(self) -> Any:
        if self.dtype != "bfloat16":
            return np.empty(self.shape, dtype=self.dtype)
        torch = sys.modules.get("torch")
        if torch is None:
            raise ArrayError("NumPy has no bfloat16; pass out= with a torch tensor")
        return torch.empty(self.shape, dtype=torch.bfloat16)

    def _here(self, call: str) -> str:
        return f"{call} of table {self.name!r} on {self._links.me}"

    def _with_nan(self) -> ArrayError:
        return ArrayError(
            f"push to {self.name!r} on {self._links.me} got a contribution with NaN, which"
            " this table rejects (reject_nan=True); nothing was sent"
        )

    def _misfit(self, call: str, got: Buffer) -> ArrayError:
        return ArrayError(
            f"{self._here(call)} expected shape {self.shape} of {self.dtype}, got {got.shape} of"
            f" {_NAMES[got.dtype]}; nothing was sent"
        )

    def _nbytes(self) -> int:
        widths = {"bfloat16": 2}
        return self._count * (widths.get(self.dtype) or np.dtype(self.dtype).itemsize)

    def _send(
        self, buffers: list[Buffer], factor: Any, piece: bool, *, asked: bool, copy: bool
    ) -> int:
        self._check_trouble()
        addresses = [buffer.address for buffer in buffers]
        scale = 0 if factor is None else factor.ctypes.data
        arrays = None if copy else (buffers, factor)
        flags = (bool(piece), asked, copy, self._reject_nan)
        try:
            with self._links.calling():
                return self._endpoint.push(
                    self._number, addresses, scale, *flags, self._links.kept, arrays
                )
        except ValueError as error:
            raise self._with_nan() if error.args == ("NaN",) else error from None

    def _ask_value(self, target: Buffer, fresh: bool, seconds: float) -> int:
        kept = self._links.kept
        with self._links.calling():
            return self._endpoint.pull(
                self._number, target.address, bool(fresh), seconds, kept, target
            )

    def _exchange(self, buffers: list[Buffer], factor: Any, target: Buffer, seconds: float) -> int:
        addresses = [buffer.address for buffer in buffers]
        scale = 0 if factor is None else factor.ctypes.data
        try:
            with self._links.calling():
                return self._endpoint.push_pull(
                    self._number,
                    addresses,
                    scale,
                    target.address,
                    seconds,
                    self._reject_nan,
                    self._links.kept,
                    (buffers, factor, target),
                )
        except ValueError as error:
            raise self._with_nan() if error.args == ("NaN",) else error from None

    def _limit(self, timeout: float | None) -> float:
        return self._store.timeout if timeout is None else seconds(timeout)

    def _finish(self, call: int, what: str, timeout: float | None) -> bytes:
        limit = self._limit(timeout)
        return self._links.finish(call, what, limit, table=self._number)

    def _check_trouble(self) -> None:
        """What became of pushes and ticks that nobody waited for."""
        with self._links.calling():
            code, about, why, _ = self._endpoint.trouble(self._number)
        if code:
            raise refusal(code, about, f"an earlier push to {self.name!r}: {why}")

    def _ask(self, top: int) -> bytes:
        self._store._check()
        with self._links.calling():
            call = self._endpoint.ask(self._number, top)
        return self._finish(call, f"a question about {self.name!r}", None)

    def _summaries(self) -> list[tuple[float, float, int, int]]:
        return list(_SUMMARY.iter_unpack(self._ask(0)))
