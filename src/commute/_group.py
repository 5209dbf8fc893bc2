# SPDX-License-Identifier: Apache-2.0
"""Group: an ordered set of processes, and the collectives between them.

A call goes three ways: arguments become buffers (_arrays), the algorithm is chosen and its plan
bound once (plan, then the core), the operation is submitted and awaited (_runner). Every
collective has an `_async` twin that returns a Handle; both keep program order, so they may be
mixed freely. All ranks must make the same calls in the same order.

Threads: several may call one group at once, but then it is up to the program that all ranks
submit in the same order.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commute import _core
from commute import plan as plans
from commute._arrays import HALVES, Buffer, empty_like, overlap, reading, writing
from commute._bound import core_plan
from commute._errors import CommuteError
from commute._fast import TAKEN_OVER, FastCalls
from commute._handle import Handle
from commute._messages import Messages
from commute._reductions import SUM, OpLike, Reduction, reduction
from commute._runner import Runner
from commute._wiring import Wiring
from commute.plan import Collective

if TYPE_CHECKING:
    from commute.store.links import StoreLinks
    from commute.store.store import Store

_log = logging.getLogger("commute")

LEAVE_SECONDS: Final = 30.0
_NOTHING: Final = Buffer(0, 0, 1, (), 0, None)


class _Call(NamedTuple):
    """A collective with its arguments checked."""

    collective: Collective
    source: Buffer
    target: Buffer
    elements: int  # per block
    result: Any
    op: Reduction = SUM
    root: int = 0


class Group(Messages):
    """An ordered set of processes; my place among them; what they do together.

    Made by `commute.init()`. As a context manager it closes at the end of the block.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     world.allreduce(numpy.arange(3.0))
    array([0., 1., 2.])

    Attributes:
        rank, size: my place, and how many there are.
        local_rank, local_size: the same among the ranks of this host.
        host: the name of this host.
        timeout: seconds after which an operation is given up, unless the call says otherwise.
    """

    def __init__(
        self,
        runner: Runner,
        wiring: Wiring,
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        local_size: int = 1,
        host: str = "localhost",
        timeout: float = 1800.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = host
        self._timeout = timeout
        self._runner = runner
        self._wiring = wiring
        self._bound: dict[tuple[Collective, str, int], _core.Executor] = {}
        self._binding = threading.Lock()
        self._fast: FastCalls | None = None  # the compiled call path, in shared memory
        self._stores: list[Store] = []
        self._store_links: StoreLinks | None = None  # to the servers, which all stores share
        self._opening_store = threading.Lock()

    def __repr__(self) -> str:
        state = ", closed" if self._runner.closed else ""
        return f"<Group rank {self.rank} of {self.size} on {self.host}{state}>"

    @property
    def timeout(self) -> float:
        return self._timeout

    # ---- collectives ----

    def allreduce(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine x over all ranks; every rank gets the result, bit for bit the same.

        Works in place and returns x; with `out` x is left alone and out is returned.

        Args:
            op: "sum", "mean" (not of integers), "prod", "min", "max" (not of complex numbers),
                "and", "or" or "xor" (of integers and bool); or your own, see docs/collectives.md: a
                NumPy ufunc, or the address of a compiled function, which must be commutative and
                associative.
            algorithm: force one, e.g. "ring"; `commute show plan` lists them.
            deterministic: sum in rank order, so that equal inputs on a group of equal size give
                equal bits, always.
            timeout: seconds after which the operation is given up and the group is broken.

        Raises:
            MismatchError: the ranks called different things; on all ranks.
            PeerLostError: a rank died, left or fell silent; on all ranks.
            OperationTimeoutError, AbandonedError: it took too long, here or on another rank.
        """
        call = self._in_place(Collective.ALLREDUCE, x, out, op=op)
        return self._run(call, algorithm, deterministic, timeout)

    def allreduce_async(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Handle:
        """As `allreduce`, returning at once; x belongs to the operation until it is done."""
        call = self._in_place(Collective.ALLREDUCE, x, out, op=op)
        return self._begin(call, algorithm, deterministic, timeout)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Give every rank the root's x; in place, returns x (or out)."""
        call = self._in_place(Collective.BROADCAST, x, out, root=root)
        return self._run(call, algorithm, False, timeout)

    def broadcast_async(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `broadcast`, returning at once."""
        call = self._in_place(Collective.BROADCAST, x, out, root=root)
        return self._begin(call, algorithm, False, timeout)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine x over all ranks into the root's x (or out); the others' x is left alone."""
        call = self._reduce(x, root, op, out)
        return self._run(call, algorithm, deterministic, timeout)

    def reduce_async(
        self,
        x: Any,
        root: int = 0,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Handle:
        """As `reduce`, returning at once."""
        call = self._reduce(x, root, op, out)
        return self._begin(call, algorithm, deterministic, timeout)

    def allgather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x, one after the other along a new leading axis of length size."""
        return self._run(self._allgather(x, out), algorithm, False, timeout)

    def allgather_async(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `allgather`, returning at once."""
        return self._begin(self._allgather(x, out), algorithm, False, timeout)

    def reduce_scatter(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine x, of leading length size, over all ranks; rank r gets part r of the result."""
        call = self._reduce_scatter(x, op, out)
        return self._run(call, algorithm, deterministic, timeout)

    def reduce_scatter_async(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> Handle:
        """As `reduce_scatter`, returning at once."""
        call = self._reduce_scatter(x, op, out)
        return self._begin(call, algorithm, deterministic, timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank has called it."""
        self._run(self._barrier(), None, False, timeout)

    def barrier_async(self, *, timeout: float | None = None) -> Handle:
        """As `barrier`, returning at once; the handle is done when every rank has called it."""
        return self._begin(self._barrier(), None, False, timeout)

    # ---- life ----

    def store(
        self,
        name: str = "default",
        *,
        staleness: int | None = 0,
        deterministic: bool = False,
        on_loss: str | None = None,
        timeout: float | None = None,
    ) -> Store:
        """A named set of tables on servers, to push to and pull from; all ranks call this.

        The first store of a group starts its servers: one per host, or as many as `commute run
        --servers` says. In a world of one there is none; the tables are in this process.

        Args:
            staleness: how many contributions a worker may be ahead of the slowest when it pulls: 0
                keeps all in step, None never waits. Tables may override it.
            deterministic: at staleness 0, add each round up in rank order, so that equal inputs
                give equal bits.
            on_loss: "raise" when a worker is lost (the default at staleness 0), or "continue"
                without it (the default otherwise).
            timeout: of the store's waits; by default the group's.
        """
        from commute.store.store import Store

        self._runner.check()
        with self._opening_store:
            if self._store_links is None:
                self._store_links = self._wiring.stores(self)
        made = Store(
            self._store_links,
            name,
            group=self,
            staleness=staleness,
            deterministic=deterministic,
            on_loss=on_loss,
            timeout=self.timeout if timeout is None else timeout,
        )
        self._stores.append(made)
        return made

    def close(self) -> None:
        """Leave: local, bounded and idempotent. Operations that are under way here are given up.

        A rank that started servers waits for their end, that is until the last worker has left.
        """
        self._close("")

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(_why_left(error))

    def records(self) -> list[dict[str, Any]]:
        """The last operations of this rank, oldest first: what the recorder holds."""
        from commute.watch.recorder import rows

        return rows(self._runner.engine.records())

    def _forget_plans(self) -> None:
        """Bind every plan anew at its next use; all ranks call this between the same operations."""
        self._bound.clear()

    def _share_memory(self) -> None:
        """All ranks read each other's outboxes from now on; all of them call this."""
        self._wiring.place = "memory"
        self._fast = FastCalls(
            self._runner,
            {collective: getattr(self, collective.label) for collective in TAKEN_OVER},
            roots=self.size,
            sizes=[plans.LINE_BYTES, (1 << 63) - 1],
            timeout=self.timeout,
        )
        for collective, call in self._fast.calls.items():
            self.__dict__[collective.label] = call

    def _close(self, failed: str) -> None:
        for collective in TAKEN_OVER:
            self.__dict__.pop(collective.label, None)  # it holds this group
        self._fast = None
        links, self._store_links = self._store_links, None
        if links is not None and not failed and links.usable:
            self._leave_stores()
        self._runner.close(failed)
        self._wiring.close()
        if links is not None:
            links.close(well=not failed)
        atexit.unregister(self._close_at_exit)

    def _leave_stores(self) -> None:
        for store in self._stores:
            try:
                store.leave(timeout=min(LEAVE_SECONDS, store.timeout))
            except CommuteError as error:
                _log.warning("rank %d could not leave %r well: %s", self.rank, store.name, error)

    def _close_at_exit(self) -> None:
        """A program that ends without closing still says goodbye, and whether it failed."""
        # Set by the interpreter when it has printed an exception that nobody caught.
        error = getattr(sys, "last_value", None)
        self._close(f"it ended with {type(error).__name__}: {error}" if error is not None else "")

    # ---- arguments ----

    def _in_place(
        self, collective: Collective, x: Any, out: Any, *, op: OpLike = "sum", root: int = 0
    ) -> _Call:
        name = collective.label
        source = writing(x, name) if out is None else reading(x, name)
        target = source if out is None else self._target(out, source, source.shape, name)
        self._check_rank(root, "root", name)
        result = x if out is None else out
        combined = reduction(op, source, name)
        return _Call(collective, source, target, source.elements, result, combined, root)

    def _reduce(self, x: Any, root: int, op: OpLike, out: Any) -> _Call:
        if self.rank == root:
            return self._in_place(Collective.REDUCE, x, out, op=op, root=root)
        self._check_rank(root, "root", "reduce")
        source = reading(x, "reduce")
        combined = reduction(op, source, "reduce")
        result = x if out is None else out
        return _Call(Collective.REDUCE, source, _NOTHING, source.elements, result, combined, root)

    def _allgather(self, x: Any, out: Any) -> _Call:
        source = reading(x, "allgather")
        shape = (self.size, *source.shape)
        result = empty_like(x, shape) if out is None else out
        target = self._target(result, source, shape, "allgather", apart=True)
        return _Call(Collective.ALLGATHER, source, target, source.elements, result)

    def _reduce_scatter(self, x: Any, op: OpLike, out: Any) -> _Call:
        source = reading(x, "reduce_scatter")
        combined = reduction(op, source, "reduce_scatter")
        if not source.shape or source.shape[0] != self.size:
            raise ValueError(
                f"reduce_scatter expected a leading axis of length {self.size} (the group's size),"
                f" got shape {source.shape}; reshape x to ({self.size}, -1)"
            )
        shape = source.shape[1:]
        result = empty_like(x, shape) if out is None else out
        target = self._target(result, source, shape, "reduce_scatter", apart=True)
        return _Call(Collective.REDUCE_SCATTER, source, target, target.elements, result, combined)

    def _barrier(self) -> _Call:
        return _Call(Collective.BARRIER, _NOTHING, _NOTHING, 0, None)

    def _target(
        self, out: Any, source: Buffer, shape: tuple[int, ...], name: str, *, apart: bool = False
    ) -> Buffer:
        target = writing(out, name)
        if target.shape != shape or target.dtype != source.dtype:
            raise ValueError(
                f"{name} expected out= of shape {shape} and the dtype of x, got shape"
                f" {target.shape} and {'the same' if target.dtype == source.dtype else 'another'}"
                " dtype; allocate it like the result"
            )
        same = target.address == source.address and not apart
        if not same and overlap(source, target):
            raise ValueError(f"{name} got an out= that overlaps x; pass separate memory")
        return target

    # ---- running ----

    def _run(
        self, call: _Call, algorithm: str | None, deterministic: bool, timeout: float | None
    ) -> Any:
        operation = self._submit(call, algorithm, deterministic, timeout, background=False)
        return Handle(self._runner, operation, call.result, call.op.error).wait()

    def _begin(
        self, call: _Call, algorithm: str | None, deterministic: bool, timeout: float | None
    ) -> Handle:
        operation = self._submit(call, algorithm, deterministic, timeout, background=True)
        return Handle(self._runner, operation, call.result, call.op.error)

    def _submit(
        self,
        call: _Call,
        algorithm: str | None,
        deterministic: bool,
        timeout: float | None,
        *,
        background: bool,
    ) -> _core.Operation:
        self._runner.check()
        limit = self.timeout if timeout is None else timeout
        executor = self._executor(call, algorithm, deterministic, limit)
        return self._runner.start(
            lambda: self._runner.engine.submit(
                executor,
                call.source.address,
                call.target.address,
                call.elements,
                call.source.dtype,
                call.op.code,
                call.op.mean,
                limit,
                background,
                call.op.combine,
            ),
            keep=call,
        )

    def _executor(
        self, call: _Call, algorithm: str | None, deterministic: bool, limit: float
    ) -> _core.Executor:
        """The bound plan of the algorithm that is chosen; its links are opened at first use."""
        name = plans.choose(
            call.collective,
            self.size,
            call.source.nbytes,
            self._wiring.place,
            deterministic,
            halves=call.source.dtype in HALVES,
            algorithm=algorithm,
            root=call.root,
        )
        key = (call.collective, name, call.root)
        found = self._bound.get(key)
        if found is None:
            found = self._bind(key, limit)
        fast = self._fast  # another thread may be closing the group
        if fast is not None and algorithm is None and not deterministic:
            fast.learn(call.collective, found, call.source.nbytes)
        return found

    def _bind(self, key: tuple[Collective, str, int], limit: float) -> _core.Executor:
        collective, name, root = key
        with self._binding:
            plan = plans.build(collective, name, self.size, root)
            report = plans.prove(plan)
            settled = report is not None and report.settled[self.rank]
            for peer in plan.peers(self.rank):
                self._wiring.link(peer, limit, self._runner.check)
            mine = core_plan(plan, self.rank, settled=settled)
            executor = self._runner.engine.bind(mine, plans.tile_bytes(plan))
            self._bound[key] = executor
            return executor


def _why_left(error: BaseException | None) -> str:
    """Empty when the block ended well, else what peers are told."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    message = str(error)
    return f"it left with {type(error).__name__}" + (f": {message}" if message else "")
