# SPDX-License-Identifier: Apache-2.0
"""Store: a named set of tables, and the clock rules that hold in it.

Each worker has a clock per table: the number of contributions it has made to it. With staleness s
a pull waits until the slowest member's clock is at least mine - s, and a push that would put me
more than s + 1 ahead of the slowest waits. At 0 round n is the n-th contribution of every member,
applied once when all are there; above 0, and with None, each is applied as it arrives.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from commute import _core
from commute._arrays import CODES, STORED, reading
from commute._errors import ArrayError, ClosedError, SettingError, UnknownTableError
from commute._handle import Handle
from commute.store.dense import DenseTable
from commute.store.initial import core_initial
from commute.store.links import StoreLinks, seconds
from commute.store.sparse import SparseTable
from commute.store.table import NAMES, Table, number_as
from commute.store.updates import FTRL, Update, core_update

if TYPE_CHECKING:
    from commute.group import Group

__all__ = ["Store"]

_AS_STORE: Final = object()
NAME_MAX: Final = 255
AXES_MAX: Final = 64  # NumPy's
WIDTH_MAX: Final = 4096  # core/store/rows.h


class Store:
    """A named set of tables. Made by `Group.store`, by all ranks.

    Leaving the with-block, or `leave()`, tells the others not to wait for this worker any more.

    >>> import commute, numpy
    >>> with commute.init() as world, world.store(staleness=0) as store:
    ...     _ = store.dense("w", (3,), "float64")
    ...     store.push("w", numpy.ones(3))
    ...     store.pull("w")
    array([1., 1., 1.])

    Attributes:
        name, staleness: as asked for.
        timeout: seconds after which a wait is given up, unless the call says otherwise.
    """

    def __init__(
        self,
        links: StoreLinks,
        name: str,
        *,
        group: Group | None,
        staleness: int | None,
        deterministic: bool,
        on_loss: str | None,
        timeout: float,
    ) -> None:
        self.name = name
        self._group = group
        self.staleness = _checked_staleness(staleness)
        self.timeout = seconds(timeout)
        self._links = links
        self._deterministic = deterministic
        self._on_loss = on_loss
        self._tables: dict[str, Any] = {}
        self._left = False
        if on_loss not in (None, "raise", "continue"):
            raise SettingError(f'expected on_loss to be "raise" or "continue", got {on_loss!r}')
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX or "/" in name:
            raise SettingError(
                f"expected a name of 1 to {NAME_MAX} letters without '/' for the store, got"
                f" {str(name)[:NAME_MAX]!r}"
            )

    def __repr__(self) -> str:
        return f"<Store {self.name!r}, staleness {self.staleness}, {len(self._tables)} tables>"

    def dense(
        self,
        name: str,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        *,
        update: str | Update = "sum",
        init: Any = None,
        reduce: str = "sum",
        staleness: Any = _AS_STORE,
        deterministic: bool | None = None,
        reject_nan: bool = False,
        timeout: float | None = None,
    ) -> DenseTable:
        """Declare a dense table; every worker does, and all must agree.

        Args:
            shape, dtype: of the tensor.
            update: what a contribution does to the value: "sum", "assign", "min", "max", "prod", or
                commute.SGD(lr=...), Momentum, Adagrad, Adam, Semiring.
            init: the first value: an array, a number for all elements, or None for zeros. The one
                of the worker whose declaration comes first is used.
            reduce: "sum", or at staleness 0 "mean" over the members that pushed in the round.
            staleness: another than the store's.
            deterministic: at staleness 0, add a round up in rank order; by default as the store.
            reject_nan: refuse contributions with NaN, at the caller.

        Raises:
            MismatchError: another worker declared it differently; the message shows both.
            SettingError: it cannot be: an unknown update, a mean of integers.
        """
        sizes = _checked_shape(shape)
        spec, settings = self._spec(
            name, math.prod(sizes), dtype, update, reduce, staleness, deterministic, reject_nan
        )
        what = f"init of table {name!r} on {self._links.me}"
        if isinstance(update, FTRL) and init is not None:
            raise SettingError(
                f"{what}: the value of FTRL follows from its state and begins at 0; leave init out"
            )
        first = _first_value(init, sizes, settings["code"], what)
        number = self._declare(name, spec, f"dense {sizes} {spec.describe()}", first, timeout)
        if name not in self._tables:
            self._tables[name] = DenseTable(self, name, number, spec, sizes, **settings)
        return cast(DenseTable, self._tables[name])

    def sparse(
        self,
        name: str,
        width: int = 1,
        dtype: Any = "float32",
        *,
        update: str | Update = "sum",
        init: Any = None,
        seed: int = 0,
        reduce: str = "sum",
        staleness: Any = _AS_STORE,
        deterministic: bool | None = None,
        reject_nan: bool = False,
        admit: int = 1,
        expire_after: int | None = None,
        wire: str | None = None,
        cache_keys: bool = False,
        timeout: float | None = None,
    ) -> SparseTable:
        """Declare a sparse table: rows of `width` numbers by uint64 keys; every worker does.

        Args:
            width: elements of a row, 1 to 4,096.
            update: as for `dense`, also commute.FTRL. Each row is updated as a table of its own, by
                the contributions that name it: with Adam the others rest (lazy Adam).
            init: what a row holds before anybody has pushed it: a number, commute.Uniform or
                commute.Normal (from `seed` and the key alone), or None for zeros.
            admit: a row is made when its key is pushed for the so many-th time; what was pushed
                before is dropped. Rare keys then take no memory.
            expire_after: rows are dropped when nobody has pushed them for so many clocks.
            wire: "float16" or "bfloat16": values travel as that, at half the bytes.
            cache_keys: servers remember lists of keys, so that a list that was sent before travels
                as 16 bytes. For jobs that use the same lists again and again.
            reduce, staleness, deterministic, reject_nan: as for `dense`.

        Raises:
            MismatchError: another worker declared it differently; the message shows both.
            SettingError: it cannot be.
        """
        whole = isinstance(width, (int, np.integer)) and not isinstance(width, bool)
        if not whole or not 1 <= width <= WIDTH_MAX:
            raise SettingError(f"expected a width from 1 to {WIDTH_MAX}, got {width!r}")
        plain, settings = self._spec(
            name, int(width), dtype, update, reduce, staleness, deterministic, reject_nan
        )
        if isinstance(update, FTRL) and init is not None:
            raise SettingError(
                f"init of table {name!r}: the value of FTRL follows from its state and begins at"
                " 0; leave init out"
            )
        spec = plain.with_rows(
            _wire_code(wire, settings["code"]),
            *core_initial(init, NAMES[settings["code"]], seed),
            _count_of("admit", admit, 15),
            0 if expire_after is None else _count_of("expire_after", expire_after, 1 << 30),
        )
        number = self._declare(
            name, spec, f"sparse ({int(width)},) {spec.describe()}", None, timeout
        )
        if name not in self._tables:
            self._tables[name] = SparseTable(
                self, name, number, spec, int(width), cache_keys=bool(cache_keys), **settings
            )
        return cast(SparseTable, self._tables[name])

    def _spec(
        self,
        name: str,
        count: int,
        dtype: Any,
        update: str | Update,
        reduce: str,
        staleness: Any,
        deterministic: bool | None,
        reject_nan: bool,
    ) -> tuple[_core.TableSpec, dict[str, Any]]:
        """What all tables have, as the core knows it, and as the table keeps it."""
        self._check()
        _check_name(name)
        code = _dtype_code(dtype)
        late = self.staleness if staleness is _AS_STORE else _checked_staleness(staleness)
        self._check_rounds(late, reduce, deterministic)
        if deterministic and late != 0:
            raise SettingError(f"deterministic needs rounds, that is staleness 0; got {late}")
        if reduce not in ("sum", "mean"):
            raise SettingError(f'expected reduce to be "sum" or "mean", got {reduce!r}')
        rounds = self._deterministic if deterministic is None else bool(deterministic)
        spec = _core.TableSpec(
            code,
            count,
            core_update(update),
            -1 if late is None else late,
            mean=reduce == "mean",
            deterministic=rounds and late == 0,
            continues=(self._on_loss or ("raise" if late == 0 else "continue")) == "continue",
        )
        return spec, {
            "code": code,
            "update": update,
            "reduce": reduce,
            "staleness": late,
            "reject_nan": reject_nan,
        }

    def _declare(
        self, name: str, spec: _core.TableSpec, declaration: str, first: Any, timeout: float | None
    ) -> int:
        """All workers do this; the table's number."""
        deadline = time.monotonic() + (self.timeout if timeout is None else seconds(timeout))
        full_name = f"{self.name}/{name}"
        number = self._place(full_name, spec, declaration, deadline)
        if name not in self._tables:
            self._make(full_name, spec, first, deadline)
        return number

    def _place(
        self,
        full_name: str,
        spec: _core.TableSpec,
        declaration: str,
        deadline: float,
        instead_of: int = -1,
    ) -> int:
        """Ask the directory; the table's number."""
        links = self._links
        with links.calling():
            call = links.endpoint.declare_table(full_name, spec, declaration, instead_of)
        links.finish(call, self._declaring(full_name), _left(deadline))
        return links.endpoint.table_of(full_name)

    def _make(
        self,
        full_name: str,
        spec: _core.TableSpec,
        first: Any,
        deadline: float,
        patience: float = math.inf,
    ) -> None:
        """Make the parts, or wait until their maker has; for another one only so long."""
        links = self._links
        address, nbytes = (0, 0) if first is None else (first.address, first.nbytes)
        with links.calling():
            call = links.endpoint.declare(full_name, spec, address, nbytes)
        mine = links.endpoint.maker_of(full_name) == links.rank
        limit = _left(deadline) if mine else min(patience, _left(deadline))
        links.finish(call, self._declaring(full_name), limit)

    def _declaring(self, full_name: str) -> str:
        return f"declaring table {full_name.partition('/')[2]!r} on {self._links.me}"

    # ---- by name ----

    def __getitem__(self, name: str) -> Any:
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(map(repr, self._tables)) or "none"
            raise UnknownTableError(
                f"store {self.name!r} has no table {name!r} on {self._links.me}; declared"
                f" here: {known}"
            ) from None

    def push(self, name: str, *arrays: Any, **options: Any) -> None:
        """`push` of the table of this name: a gradient, or keys and gradients."""
        self[name].push(*arrays, **options)

    def push_async(self, name: str, *arrays: Any, **options: Any) -> Handle:
        """`push_async` of the table of this name."""
        handle: Handle = self[name].push_async(*arrays, **options)
        return handle

    def pull(self, name: str, *keys: Any, **options: Any) -> Any:
        """`pull` of the table of this name; of a sparse one with its keys."""
        return self[name].pull(*keys, **options)

    def pull_async(self, name: str, *keys: Any, **options: Any) -> Handle:
        """`pull_async` of the table of this name."""
        handle: Handle = self[name].pull_async(*keys, **options)
        return handle

    def push_pull(self, name: str, *arrays: Any, **options: Any) -> Any:
        """`push_pull` of the table of this name."""
        return self[name].push_pull(*arrays, **options)

    def push_pull_async(self, name: str, *arrays: Any, **options: Any) -> Handle:
        """`push_pull_async` of the table of this name."""
        handle: Handle = self[name].push_pull_async(*arrays, **options)
        return handle

    def tables(self) -> list[Table]:
        """The tables this worker has declared, in that order."""
        return list(self._tables.values())

    # ---- clocks ----

    def tick(self) -> None:
        """End an iteration: count an empty contribution for each table that has had none.

        What was pushed with `accumulate=True` becomes the contribution. It never waits.
        """
        self._check()
        for table in self._tables.values():
            table._check_trouble()
        with self._links.calling():
            self._links.endpoint.tick([table._number for table in self._tables.values()])

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until all pushes of this worker are committed; never for other workers' pushes."""
        self._check()
        self._links.flush(self.timeout if timeout is None else seconds(timeout))
        for table in self._tables.values():
            table._check_trouble()

    # ---- checkpoints ----

    def save(self, path: Any, *, timeout: float | None = None) -> None:
        """Write all tables into the folder `path`, with the updates' state and the clocks.

        All ranks call this, at equal clocks; it flushes first. Every rank writes its share, so on
        several hosts `path` must be on a file system that they share. A checkpoint that is there
        is replaced, in one step, when the new one is on disk.

        Args:
            path: a folder of its own; it is made, and so are those above it.
            timeout: of each wait on the way, for the others and for the servers.

        Raises:
            MismatchError: the ranks are not at equal clocks, or have declared different tables.
            CheckpointError: it cannot be written. What was at `path` is still there.
        """
        from commute.store.saving import save

        self._check()
        save(self, path, self.timeout if timeout is None else seconds(timeout))

    def load(self, path: Any, *, strict: bool = True, timeout: float | None = None) -> None:
        """Make all tables what they were when `path` was saved, and the clocks of all ranks.

        All ranks call this, after they have declared the tables, at equal clocks. There may be more
        or fewer ranks, servers and shards than at the time. What is declared here holds: an
        optimizer may have other numbers than it had, staleness may be another; kind, dtype, shape
        and the sort of update must be the same.

        Args:
            strict: raise if a table is declared here and not saved, or the other way round. If
                False, those that are only here stay as they are, those only there are left out.
            timeout: as for `save`.

        Raises:
            MismatchError: the ranks are not at equal clocks, or have declared different tables.
            CheckpointError: a file is missing, damaged or foreign, or does not fit. The message
                names it. Everything is checked first: no table has changed.
        """
        from commute.store.loading import load

        self._check()
        load(self, path, strict, self.timeout if timeout is None else seconds(timeout))

    def leave(self, *, timeout: float | None = None) -> None:
        """Flush, and take no part in later rounds; this is no loss to the others. Idempotent."""
        if self._left:
            return
        self.flush(timeout=timeout)
        self._left = True
        for table in self._tables.values():
            table._left()
        self._say_left(self.timeout if timeout is None else seconds(timeout))

    def _say_left(self, limit: float) -> None:
        with self._links.calling():
            call = self._links.endpoint.leave(self.name)
        self._links.finish(call, f"leaving store {self.name!r}", limit)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Who leaves because of an error is missed by the others, as it should be.
        if kind is None:
            self.leave()

    def _check_rounds(self, staleness: int | None, reduce: str, deterministic: Any) -> None:
        """Whether tables may be as asked for; a worker may have all that is."""

    def _check(self) -> None:
        self._links.check()
        if self._left:
            raise ClosedError(f"this worker has left the store {self.name!r}")


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        got = str(name)[:NAME_MAX]
        raise SettingError(f"expected a name of 1 to {NAME_MAX} letters for the table, got {got!r}")


def _count_of(what: str, given: Any, most: int) -> int:
    whole = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if whole and 1 <= given <= most:
        return int(given)
    raise SettingError(f"expected {what} to be a whole number from 1 to {most}, got {given!r}")


def _wire_code(wire: Any, code: int) -> int:
    if wire is None:
        return code
    if wire not in ("float16", "bfloat16") or NAMES[code] != "float32":
        raise SettingError(
            f'expected wire to be "float16" or "bfloat16" for a table of float32, got {wire!r} for'
            f" {NAMES[code]}"
        )
    return CODES[wire]


def _checked_staleness(staleness: Any) -> int | None:
    whole = isinstance(staleness, (int, np.integer)) and not isinstance(staleness, bool)
    if staleness is None or (whole and 0 <= staleness < 1 << 30):
        return None if staleness is None else int(staleness)
    raise SettingError(f"expected staleness to be 0, a whole number or None, got {staleness!r}")


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    fits = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in sizes)
    if isinstance(shape, str) or not fits or any(n < 0 for n in sizes):
        raise SettingError(f"expected a shape of whole numbers from 0 up, got {shape!r}")
    if len(sizes) > AXES_MAX:
        raise SettingError(f"expected at most {AXES_MAX} axes, got {len(sizes)}")
    if math.prod(sizes) >= 1 << 56:
        raise SettingError(f"a table of shape {sizes} is larger than any memory")
    return tuple(int(n) for n in sizes)


def _dtype_code(dtype: Any) -> int:
    name = str(dtype).removeprefix("torch.")
    if name not in STORED and dtype is not None:
        with contextlib.suppress(TypeError):
            found = np.dtype(dtype)
            name = found.name if found.isnative else str(found)
    if name not in STORED:
        raise SettingError(f"expected a dtype of {', '.join(STORED)}, got {dtype!r}")
    return STORED[name]


def _first_value(init: Any, shape: tuple[int, ...], code: int, what: str) -> Any:
    if init is None:
        return None
    dtype = next(known for known, number in CODES.items() if number == code)
    if isinstance(init, (int, float, np.generic)):
        return reading(number_as(init, dtype, what), what)
    buffer = reading(init, what)
    if buffer.shape != shape or buffer.dtype != code:
        got = next(known for known, number in CODES.items() if number == buffer.dtype)
        raise ArrayError(f"{what} expected shape {shape} of {dtype}, got {buffer.shape} of {got}")
    return buffer
