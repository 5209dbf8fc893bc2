# SPDX-License-Identifier: Apache-2.0
"""Persistent operations: a call that is bound once and started again and again.

`allreduce_init(x)` does what every `allreduce(x)` would do before bytes move: it looks at the
array, chooses the algorithm, proves and binds the plan, opens its links. `start` and `wait` are
left, and are compiled (core/bindings/persistent.cc). In the order of calls an operation counts
from its start: all ranks must start the same ones, among all their calls, in the same order.

States: made -> under way (`start`) -> finished (`wait`) -> under way ...; a wait that times out
leaves it under way.
"""

from __future__ import annotations

from typing import Any

from commute import _core
from commute._errors import ArrayError, CommuteError
from commute._handle import Handle
from commute._runner import Runner
from commute.group.calls import Call
from commute.group.exchanges import Exchanges
from commute.group.reductions import OpLike
from commute.plan import Collective


class Persistent:
    """A call bound to its arrays, to be started as often as one likes.

    Between `start` and the end of `wait` the arrays belong to the operation; between `wait` and the
    next `start` they are the caller's, to read and to write. Anything else about the call is as it
    was when it was made.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     x = numpy.ones(3)
    ...     total = world.allreduce_init(x)
    ...     for step in range(3):
    ...         x[:] = step
    ...         total.start()
    ...         y = total.wait()  # x, with the sum over all ranks in it
    >>> y
    array([2., 2., 2.])
    """

    def __init__(self, bound: _core.Persistent) -> None:
        self._bound = bound
        # Called without a frame of Python.
        self.__dict__.update(start=bound.start, wait=bound.wait)

    def start(self) -> None:
        """Begin the operation and return at once.

        Raises:
            CommuteError: it was started before, and not waited for.
            PeerLostError, MismatchError, AbandonedError, ClosedError: the group is broken.
        """
        self._bound.start()

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the call, once it is there; the same array each time.

        Raises:
            OperationTimeoutError: it is not there after `timeout` seconds; the operation goes on,
                and `wait` can be called again.
            CommuteError: it was never started.
            PeerLostError, MismatchError, AbandonedError, ClosedError: as the blocking call.
        """
        return self._bound.wait(timeout)

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._bound.done()

    def __repr__(self) -> str:
        state = "under way" if self._bound.under_way else "not under way"
        return f"<Persistent {self._bound.operation.describe()}, {state}>"


class PersistentCalls(Exchanges):
    """The `_init` twins of a group's collectives; arguments are those of the plain calls."""

    def allreduce_init(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Persistent:
        """An `allreduce` of this array that can be started again and again.

        Local, but for links that it opens. Every rank starts it as often as the others.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     total = world.allreduce_init(numpy.ones(2))
        ...     total.start()
        ...     total.wait()
        array([1., 1.])
        """
        call = self._in_place(Collective.ALLREDUCE, x, out, op=op)
        return self._persist(call, algorithm, deterministic, timeout)

    def broadcast_init(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Persistent:
        """A `broadcast` of this array that can be started again and again."""
        call = self._in_place(Collective.BROADCAST, x, out, root=root)
        return self._persist(call, algorithm, False, timeout)

    def reduce_init(
        self,
        x: Any,
        root: int = 0,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Persistent:
        """A `reduce` of this array that can be started again and again."""
        return self._persist(self._reduce(x, root, op, out), algorithm, deterministic, timeout)

    def allgather_init(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Persistent:
        """An `allgather` of this array that can be started again and again.

        Without `out` the result is made once, here; every `wait` returns it.
        """
        return self._persist(self._allgather(x, out), algorithm, False, timeout)

    def reduce_scatter_init(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Persistent:
        """A `reduce_scatter` of this array that can be started again and again.

        Without `out` the result is made once, here; every `wait` returns it.
        """
        return self._persist(self._reduce_scatter(x, op, out), algorithm, deterministic, timeout)

    def gather_init(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Persistent:
        """A `gather` of this array that can be started again and again.

        Without `out` the root's result is made once, here; every `wait` returns it. On the other
        ranks `wait` returns None.
        """
        return self._persist(self._gather(x, root, out), algorithm, False, timeout)

    def scatter_init(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Persistent:
        """A `scatter` of the root's array that can be started again and again.

        Only the root's x counts. All other ranks pass None and `out`, which is bound here, before
        anybody could be told what the root has.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     x = numpy.array([[1.0, 2.0]]) if world.rank == 0 else None
        ...     part = world.scatter_init(x, out=numpy.empty(2))
        ...     part.start()
        ...     part.wait()
        array([1., 2.])
        """
        return self._persist(self._scatter_known(x, root, out), algorithm, False, timeout)

    def alltoall_init(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Persistent:
        """An `alltoall` of this array that can be started again and again.

        Without `out` the result is made once, here; every `wait` returns it.
        """
        return self._persist(self._alltoall(x, out), algorithm, False, timeout)

    def barrier_init(self, *, timeout: float | None = None) -> Persistent:
        """A `barrier` that can be started again and again."""
        return self._persist(self._barrier(), None, False, timeout)

    def _persist(
        self, call: Call, algorithm: str | None, deterministic: bool, timeout: float | None
    ) -> Persistent:
        runner = self._runner
        runner.check()
        if call.source.copied:
            raise ArrayError(
                f"{call.collective.label}_init keeps its array, got one of shape"
                f" {call.source.shape} that is not contiguous in C order; pass a contiguous one and"
                " copy into it before each start"
            )
        limit = self.timeout if timeout is None else timeout
        executor, part = self._executor(call, algorithm, deterministic, limit)
        array, offset = part or (None, 0)
        return Persistent(
            _core.Persistent(
                runner.engine,
                executor,
                *call.arguments(),
                limit,
                call.op.combine,
                array,
                offset,
                _Finish(runner, call),
                _Refusal(runner, call.collective.label),
                runner.park,
                call,
                call.result,
            )
        )


class _Finish:
    """Waits for an operation that takes longer, and raises what went wrong."""

    def __init__(self, runner: Runner, call: Call) -> None:
        self._runner = runner
        self._call = call

    def __call__(self, operation: _core.Operation, timeout: float | None) -> None:
        Handle(self._runner, operation, None, self._call.op.error).wait(timeout)


class _Refusal:
    """Raises what is wrong with a call of start or wait."""

    def __init__(self, runner: Runner, name: str) -> None:
        self._runner = runner
        self._name = name

    def __call__(self, starting: bool) -> None:
        self._runner.check()
        if starting:
            raise CommuteError(
                f"this {self._name} is under way already; wait for it before it is started again"
            )
        raise CommuteError(f"this {self._name} was never started; call start() before wait()")
