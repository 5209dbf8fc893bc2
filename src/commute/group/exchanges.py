# SPDX-License-Identifier: Apache-2.0
"""gather, scatter and alltoall: the calls of a group that move blocks and add nothing.

`Exchanges` is the part of `Group` that has them; see calls.py for how a call goes on.

A rank that takes part in a scatter with nothing but None does not know what it will get. So each
scatter begins with a broadcast of its *head*, the root's shape and dtype, as nobody but a rank
itself knows whether it needs to be told. The root, and ranks with `out=`, do not wait for it: it
travels ahead of the blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commute._arrays import Buffer, empty_like, empty_of, is_tensor, reading, writing
from commute._handle import Handle
from commute.group.calls import AXES_MAX, HEAD_WORDS, NOTHING, Call, Calls
from commute.plan import Collective, choose


class Exchanges(Calls):
    """The calls of a group that move blocks between ranks."""

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x at the root, along a new leading axis of length size; elsewhere None.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     world.gather(numpy.arange(3))
        array([[0, 1, 2]])

        Args:
            out: where the root's result goes; it has no use on other ranks.
            algorithm: force one, e.g. "binomial".
        """
        return self._run(self._gather(x, root, out), algorithm, False, timeout)

    def gather_async(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `gather`, returning at once."""
        return self._begin(self._gather(x, root, out), algorithm, False, timeout)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Part r of the root's x, which has a leading axis of length size, for each rank r.

        Only the root's x counts; elsewhere pass None. Without `out` a rank gets a new array of the
        root's dtype: a tensor if the root's x is one and torch is loaded here.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     world.scatter(numpy.array([[1.0, 2.0]]) if world.rank == 0 else None)
        array([1., 2.])

        Args:
            out: where this rank's part goes.
            algorithm: force one, e.g. "binomial".
        """
        call = self._scatter(x, root, out, algorithm, timeout, background=False)
        return self._run(call, algorithm, False, timeout)

    def scatter_async(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `scatter`, returning at once; off the root with `out=` only, else once the root calls.

        A rank without `out` has to hear from the root how large its part is.
        """
        call = self._scatter(x, root, out, algorithm, timeout, background=True)
        return self._begin(call, algorithm, False, timeout)

    def alltoall(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Part r of x to each rank r; what rank r had for this one becomes part r of the result.

        x has a leading axis of length size. Over the ranks it is a transpose.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     world.alltoall(numpy.array([[1.0, 2.0]]))
        array([[1., 2.]])
        """
        return self._run(self._alltoall(x, out), algorithm, False, timeout)

    def alltoall_async(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `alltoall`, returning at once."""
        return self._begin(self._alltoall(x, out), algorithm, False, timeout)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """A new array, whose values are arbitrary, in memory that peers on this host reach.

        All ranks call this, with the same shape and dtype. `allreduce` and `broadcast` of such
        arrays, or of contiguous parts of them, copy nothing that is not the result: of large ones
        they are two to three times as fast. Every rank must then pass the same part of the same
        array. Large blocks that `alltoall` and `scatter` take out of such arrays, or contiguous
        parts of them, are read where they are. In all else it is an array as any other:
        `torch.from_numpy` views it, and its memory is used again when its last view has gone. A
        peer that dies during a call leaves it half written, and the call raises.

        Where not all ranks share memory it is an ordinary array, with which the same calls work.

        >>> import commute
        >>> with commute.init() as world:
        ...     x = world.empty((2, 3), "float64")
        ...     x[:] = world.rank
        ...     world.allreduce(x)
        array([[0., 0., 0.],
               [0., 0., 0.]])
        """
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(map(int, shape))
        found = np.dtype(dtype)
        self._runner.check()
        with self._binding:
            self._prepare(self.timeout)
        if self._shared is None or 0 in shape:
            return np.empty(shape, found)
        array = self._shared.place(shape, found, self._gathered)
        if self._fast is not None:
            self._fast.forget_direct()
        return np.empty(shape, found) if array is None else array

    def _gathered(self, told: Any) -> Any:
        return self._run(self._allgather(told, None), None, False, None)

    # ---- arguments ----

    def _gather(self, x: Any, root: int, out: Any) -> Call:
        self._check_rank(root, "root", "gather")
        source = reading(x, "gather")
        result, target = None, NOTHING
        if self.rank == root:
            shape = (self.size, *source.shape)
            result = empty_like(x, shape) if out is None else out
            target = self._target(result, source, shape, "gather", apart=True)
        return Call(Collective.GATHER, source, target, source.elements, result, root=root)

    def _scatter(
        self,
        x: Any,
        root: int,
        out: Any,
        algorithm: str | None,
        timeout: float | None,
        *,
        background: bool,
    ) -> Call:
        self._check_rank(root, "root", "scatter")
        # A name that nobody knows is refused before anybody waits for the head.
        wiring, scatter = self._wiring, Collective.SCATTER
        choose(scatter, self.size, 0, wiring.place, algorithm=algorithm, fetches=wiring.fetches)
        if self.rank == root:
            call = self._scatter_from_here(x, out)
            self._send_head(_head(call.source, is_tensor(x)), root, timeout, background)
            return call
        head = np.zeros(HEAD_WORDS, np.int64)
        if out is None:
            self._run(self._head_call(head, root), None, False, timeout)
            return self._scatter_into(_told(head), root)
        call = self._scatter_into(out, root)
        self._send_head(head, root, timeout, background)
        return call

    def _scatter_known(self, x: Any, root: int, out: Any) -> Call:
        """A scatter before which nobody needs to be told anything."""
        self._check_rank(root, "root", "scatter_init")
        if self.rank == root:
            return self._scatter_from_here(x, out)
        if out is None:
            raise ValueError(
                f"scatter_init on rank {self.rank} expected out= like its part of rank {root}'s x,"
                " got None; it is bound before anybody could be told the shape"
            )
        return self._scatter_into(out, root)

    def _scatter_from_here(self, x: Any, out: Any) -> Call:
        source = reading(x, "scatter")
        self._check_leading(source, "scatter")
        result = empty_like(x, source.shape[1:]) if out is None else out
        target = self._target(result, source, source.shape[1:], "scatter", apart=True)
        return Call(Collective.SCATTER, source, target, target.elements, result, root=self.rank)

    def _scatter_into(self, out: Any, root: int) -> Call:
        target = writing(out, "scatter")
        # What the root has, as far as the choice of a plan depends on it.
        whole = self.size * target.nbytes
        source = target._replace(address=0, nbytes=whole, owner=None)
        return Call(Collective.SCATTER, source, target, target.elements, out, root=root)

    def _send_head(self, head: Any, root: int, timeout: float | None, background: bool) -> None:
        call = self._head_call(head, root)
        self._submit(call, None, False, timeout, background=background)

    def _head_call(self, head: Any, root: int) -> Call:
        return self._in_place(Collective.BROADCAST, head, None, root=root)

    def _alltoall(self, x: Any, out: Any) -> Call:
        source = reading(x, "alltoall")
        self._check_leading(source, "alltoall")
        result = empty_like(x, source.shape) if out is None else out
        target = self._target(result, source, source.shape, "alltoall", apart=True)
        elements = source.elements // self.size
        return Call(Collective.ALLTOALL, source, target, elements, result)


def _head(source: Buffer, tensor: bool) -> Any:
    """What a rank needs to know to make room for its part."""
    axes = source.shape[1:]
    if len(axes) > AXES_MAX:
        raise ValueError(f"scatter expected parts of at most {AXES_MAX} axes, got {len(axes)}")
    head = np.zeros(HEAD_WORDS, np.int64)
    head[:3] = source.dtype, tensor, len(axes)
    head[3 : 3 + len(axes)] = axes
    return head


def _told(head: Any) -> Any:
    """Room for a part that is described so."""
    dtype, tensor, axes = (int(word) for word in head[:3])
    return empty_of(dtype, tuple(head[3 : 3 + axes].tolist()), tensor=bool(tensor))
