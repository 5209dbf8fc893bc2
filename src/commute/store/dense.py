# SPDX-License-Identifier: Apache-2.0
"""DenseTable: a tensor on the servers, with its update; push, pull and what can be asked of it."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commute import _core
from commute._arrays import Buffer, reading
from commute._errors import ArrayError
from commute._handle import Handle
from commute._runner import SLICE_SECONDS
from commute.store.table import StoreHandle, Table, number_as

if TYPE_CHECKING:
    from commute.store.store import Store

__all__ = ["DenseTable"]

_SUMMARY: Final = struct.Struct("<ddqQ")


class DenseTable(Table):
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
        name: str,
        number: int,
        spec: _core.TableSpec,
        shape: tuple[int, ...],
        **settings: Any,
    ) -> None:
        super().__init__(store, name, number, spec, **settings)
        self.shape = shape
        # The quick way of plain calls; none where every array must be looked at, or after leaving.
        self._plain: _core.PlainTable | None = None
        if self.dtype != "bfloat16" and not self._reject_nan:
            form = np.empty(0, dtype=self.dtype).data.format
            links = self._links
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
        if self._must_wait():
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
            out = self._new(self.shape)
        if not fresh and timeout is None and self._plain is not None:
            call = self._plain.pull(out)
            if call == 0:
                return out
            if call > 0:
                self._finish(call, f"pull of {self.name!r}", timeout)
                return out
        self._store._check()
        self._limit(timeout)  # a bad one is refused before anything is sent
        target, result = self._target(out, self.shape, "pull")
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
        target, result = self._target(out, self.shape, "pull_async")
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
            out = self._new(self.shape)
        if scale is None and timeout is None and self._plain is not None:
            call = self._plain.push_pull(gradient, out)
            if call == 0:
                return out
            if call > 0:
                self._finish(call, f"push_pull of {self.name!r}", timeout)
                return out
        self._limit(timeout)
        buffers, factor = self._contribution(gradient, scale, "push_pull")
        target, result = self._target(out, self.shape, "push_pull", beside=buffers)
        call = self._exchange(buffers, factor, target, SLICE_SECONDS)
        if call:
            self._finish(call, f"push_pull of {self.name!r}", timeout)
        return result

    def push_pull_async(
        self, gradient: Any, *, out: Any = None, scale: float | None = None
    ) -> Handle:
        """As `push_pull`, returning at once; `wait()` gives the array."""
        buffers, factor = self._contribution(gradient, scale, "push_pull_async")
        target, result = self._target(out, self.shape, "push_pull_async", beside=buffers)
        call = self._exchange(buffers, factor, target, -1.0)
        what = f"push_pull of {self.name!r}"
        return StoreHandle(self, call, what, result)

    # ---- questions ----

    def top(self, k: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The k elements of largest magnitude: their indices in C order, and their values."""
        indices, values = self._ranked(k)
        return indices.astype(np.int64), values

    # ---- within ----

    def _extent(self) -> tuple[tuple[int, ...], int, int | None]:
        return self.shape, math.prod(self.shape) * self._item_bytes(), None

    def _left(self) -> None:
        self._plain = None

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
        self._fit(buffer, self.shape, call)
        return buffer

    def _send(
        self, buffers: list[Buffer], factor: Any, piece: bool, *, asked: bool, copy: bool
    ) -> int:
        self._check_trouble()
        addresses = [buffer.address for buffer in buffers]
        scale = 0 if factor is None else factor.ctypes.data
        arrays = None if copy else (buffers, factor)
        flags = (bool(piece), asked, copy, self._reject_nan)
        with self._sending():
            return self._endpoint.push(
                self._number, addresses, scale, *flags, self._links.kept, arrays
            )

    def _exchange(self, buffers: list[Buffer], factor: Any, target: Buffer, seconds: float) -> int:
        addresses = [buffer.address for buffer in buffers]
        scale = 0 if factor is None else factor.ctypes.data
        with self._sending():
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

    def _summaries(self) -> list[tuple[Any, ...]]:
        return list(_SUMMARY.iter_unpack(self._ask(0)))
