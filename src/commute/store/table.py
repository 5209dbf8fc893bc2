# SPDX-License-Identifier: Apache-2.0
"""Table: what dense and sparse tables share; and the handle of a call under way.

A call goes two ways: arguments become addresses (checked against the table's shape and dtype
before anything is sent), the endpoint in the core does the rest (slicing, numbering, sending), and
`StoreLinks.finish` waits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commute import _core
from commute._arrays import CODES, FLOATS, Buffer, overlap, writing
from commute._errors import ArrayError, OperationTimeoutError, SettingError
from commute._handle import Handle
from commute.store.links import STANDING, Calling, refusal, seconds
from commute.store.updates import Update, core_update, with_set

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["NAMES", "StoreHandle", "Table", "TableInfo", "number_as"]

_RANKED: Final = np.dtype([("index", "<u8"), ("value", "<f8")])
_RANKED_MAX: Final = 1 << 16  # as many as an answer holds (core/store/message.h)
# Pushes that are copied and not committed yet; beyond that a push waits.
_KEPT_BYTES_MAX: Final = 64 << 20
_ANSWER_BYTES_MAX: Final = (1 << 20) + 4096  # core/store/message.h
NAMES: Final = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class TableInfo:
    """What is known of a table on this worker.

    Attributes:
        shape: of a sparse table that of a row.
        bytes: of the value, an update's state comes on top; of a sparse table all its memory.
        rows: of a sparse table.
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
    rows: int | None = None


class Sending(Calling):
    """As around any call; and what was to be sent may hold a NaN that its table rejects."""

    __slots__ = ("_table",)

    def __init__(self, table: Table) -> None:
        super().__init__(table._links)
        self._table = table

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError) and error.args == ("NaN",):
            raise self._table._with_nan() from None
        super().__exit__(kind, error, traceback)


class StoreHandle(Handle):
    """A push or pull under way; `wait` returns the pulled array, and None for a push.

    A push is done when it is committed: held by every shard it goes to. The arrays of the call
    belong to it until it is done.
    """

    def __init__(self, table: Table, call: int, what: str, result: Any) -> None:
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


class Table:
    """What dense and sparse tables share: settings, questions, and how a call ends.

    Attributes:
        name, dtype: as declared.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        number: int,
        spec: _core.TableSpec,
        *,
        code: int,
        update: str | Update,
        reduce: str,
        staleness: int | None,
        reject_nan: bool,
    ) -> None:
        self.name = name
        self.dtype = NAMES[code]
        self._store = store
        self._links = store._links
        self._endpoint = store._links.endpoint
        self._code = code
        self._number = number
        self._spec = spec
        self._update = update
        self._reduce = reduce
        self._staleness = staleness
        self._reject_nan = reject_nan and code in FLOATS
        self._copies = 0
        self._copied_bytes = 0

    # ---- settings and questions ----

    def set(self, **numbers: Any) -> None:
        """Change numbers of the update, e.g. `set(lr=0.01)`, from the next round on.

        One worker does it for all. It returns when it is committed.
        """
        self._store._check()
        changed, change = with_set(self._update, numbers)
        self._check_set(numbers)
        with self._links.calling():
            call = self._endpoint.set(self._number, change)
        self._finish(call, f"set of {self.name!r}", None)
        self._update = changed

    def clocks(self) -> dict[int, int]:
        """How many contributions each rank has made that has not left, as a server knows it."""
        self._store._check()
        with self._links.calling():
            call = self._endpoint.who(self._number)
        answers = self._finish(call, f"clocks of {self.name!r}", None)
        return {rank: clock for rank, _, clock in STANDING.iter_unpack(answers)}

    def norm(self) -> float:
        """The Euclidean norm, computed where the table lies."""
        return math.sqrt(sum(row[1] for row in self._summaries()))

    def sum(self) -> float | int:
        """The sum of all elements, in float64; of integers exact, as a 64-bit number."""
        rows = self._summaries()
        if self._code in FLOATS:
            return math.fsum(row[0] for row in rows)
        whole: int = sum(row[2] for row in rows) & (2**64 - 1)
        signed = self.dtype.startswith("int") and whole >= 2**63
        return whole - 2**64 if signed else whole

    def nonzero(self) -> int:
        """How many elements are not zero."""
        return sum(row[3] for row in self._summaries())

    def info(self) -> TableInfo:
        """Bytes and rows, update, where it lives, and what this worker has done with it."""
        shape, size, rows = self._extent()
        return TableInfo(
            name=self.name,
            shape=shape,
            dtype=self.dtype,
            bytes=size,
            update=core_update(self._update).describe(),
            reduce=self._reduce,
            staleness=self._staleness,
            clock=self._endpoint.clock(self._number),
            slots=self._places(),
            copies=self._copies,
            copied_bytes=self._copied_bytes,
            cache_hits=self._endpoint.cache_hits(self._number),
            rows=rows,
        )

    # ---- within ----

    def _left(self) -> None:
        """This worker has left the store."""

    def _extent(self) -> tuple[tuple[int, ...], int, int | None]:
        """Its shape, or that of a row; its bytes; and of a sparse one how many rows there are."""
        raise NotImplementedError

    def _check_set(self, numbers: dict[str, Any]) -> None:
        """Whether these numbers of the update can be changed."""

    def _places(self) -> dict[str, int]:
        """Where its parts live, and how many are there."""
        places: dict[str, int] = {}
        for shard in self._endpoint.shards_of(self._number):
            where = self._links.where(shard)
            places[where] = places.get(where, 0) + 1
        return places

    def _item_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    def _new(self, shape: tuple[int, ...]) -> Any:
        if self.dtype != "bfloat16":
            return np.empty(shape, dtype=self.dtype)
        torch = sys.modules.get("torch")
        if torch is None:
            raise ArrayError("NumPy has no bfloat16; pass out= with a torch tensor")
        return torch.empty(shape, dtype=torch.bfloat16)

    def _target(
        self, out: Any, shape: tuple[int, ...], call: str, beside: Sequence[Buffer] = ()
    ) -> tuple[Buffer, Any]:
        """Where an answer goes: `out`, or a new array; apart from what is read meanwhile."""
        if out is None:
            out = self._new(shape)
        buffer = writing(out, self._here(call))
        self._fit(buffer, shape, call)
        for other in beside:
            if overlap(buffer, other) and buffer.address != other.address:
                raise ArrayError(
                    f"{self._here(call)} got an out= that overlaps the gradient; pass the same"
                    " array, or another"
                )
        return buffer, out

    def _fit(self, got: Buffer, shape: tuple[int, ...], call: str) -> None:
        if got.shape != shape or got.dtype != self._code:
            raise ArrayError(
                f"{self._here(call)} expected shape {shape} of {self.dtype}, got {got.shape} of"
                f" {NAMES[got.dtype]}; nothing was sent"
            )

    def _must_wait(self) -> bool:
        """Whether a push that was sent must be waited for."""
        with self._links.calling():
            if self._endpoint.kept_bytes() > _KEPT_BYTES_MAX:
                return True
            return self._staleness is not None and self._endpoint.ahead(self._number)

    def _sending(self) -> Sending:
        """Around a call that sends a contribution."""
        return Sending(self)

    def _here(self, call: str) -> str:
        return f"{call} of table {self.name!r} on {self._links.me}"

    def _with_nan(self) -> ArrayError:
        return ArrayError(
            f"push to {self.name!r} on {self._links.me} got a contribution with NaN, which"
            " this table rejects (reject_nan=True); nothing was sent"
        )

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

    def _ask(self, top: int, *, sizes: bool = False) -> bytes:
        self._store._check()
        with self._links.calling():
            call = self._endpoint.ask(self._number, top, sizes)
        return self._finish(call, f"a question about {self.name!r}", None)

    def _ask_saved(self, part: int, start: int) -> Callable[[], np.ndarray[Any, Any]]:
        """Asks for what is saved of a part (core/store/client.h, `items`); waits when called."""
        self._store._check()
        answer = np.empty(_ANSWER_BYTES_MAX, np.uint8)
        with self._links.calling():
            call = self._endpoint.items(
                self._number, part, start, answer.ctypes.data, self._links.kept, answer
            )

        def wait() -> np.ndarray[Any, Any]:
            self._finish(call, f"reading {self.name!r}", None)
            return answer

        return wait

    def _summaries(self) -> list[tuple[Any, ...]]:
        """Of each part: sum, sum of squares, exact sum of integers, how many are not zero."""
        raise NotImplementedError

    def _ranked(self, k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        if not isinstance(k, (int, np.integer)) or not 1 <= k < 1 << 32:
            raise SettingError(f"expected top(k) with a whole number k from 1 up, got {k!r}")
        rows = np.frombuffer(self._ask(int(k)), dtype=_RANKED)
        if k > _RANKED_MAX <= len(rows):  # a part may have had more
            raise SettingError(
                f"expected top(k) with k up to {_RANKED_MAX} of table {self.name!r}, got {k!r}; it"
                " is larger than that"
            )
        best = np.lexsort((rows["index"], -np.abs(rows["value"])))[:k]
        return rows["index"][best], rows["value"][best]
