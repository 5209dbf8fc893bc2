# SPDX-License-Identifier: Apache-2.0
"""Group: an ordered set of processes, and the collectives between them.

What happens behind a call is told in _calls. Every collective has an `_async` twin that returns a
Handle; both keep program order, so they may be mixed freely. All ranks must make the same calls in
the same order.

Threads: several may call one group at once, but then it is up to the program that all ranks
submit in the same order.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from commute._errors import CommuteError
from commute._handle import Handle
from commute._runner import Runner
from commute._wiring import Wiring
from commute.group.family import Family, Identity
from commute.group.persistent import PersistentCalls
from commute.group.ranks import Ranks
from commute.group.reductions import OpLike
from commute.group.uneven import UnevenExchanges
from commute.plan import Collective

if TYPE_CHECKING:
    from commute.store.links import StoreLinks
    from commute.store.store import Store

_log = logging.getLogger("commute")

LEAVE_SECONDS: Final = 30.0


class Group(Ranks, UnevenExchanges, PersistentCalls):
    """An ordered set of processes; my place among them; what they do together.

    Made by `commute.init()`. As a context manager it closes at the end of the block.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     world.allreduce(numpy.arange(3.0))
    array([0., 1., 2.])

    A group of some of its ranks is made by `group`, by `split`, or from two groups by `|`, `&` and
    `-`. It has its own links and its own order of calls; several may work at once, from several
    threads.

    Attributes:
        rank, size: my place, and how many there are; -1 in a group that this process is not in.
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
        family: Family | None = None,
        identity: Identity | None = None,
    ) -> None:
        super().__init__(
            runner,
            wiring,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            host=host,
            timeout=timeout,
            family=family,
            identity=identity,
        )
        self._stores: list[Store] = []
        self._store_links: StoreLinks | None = None  # to the servers, which all stores share
        self._opening_store = threading.Lock()

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

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Wait until every rank has called it."""
        self._run(self._barrier(), algorithm, False, timeout)

    def barrier_async(
        self, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Handle:
        """As `barrier`, returning at once; the handle is done when every rank has called it."""
        return self._begin(self._barrier(), algorithm, False, timeout)

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

        The world closes its groups with it.
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

    def _close(self, failed: str) -> None:
        self._drop_fast_calls()
        links, self._store_links = self._store_links, None
        if links is not None and not failed and links.usable:
            self._leave_stores()
        self._runner.close(failed)
        self._family.remove(self._runner)
        if self._identity.parent is None:
            self._family.close()
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


def _why_left(error: BaseException | None) -> str:
    """Empty when the block ended well, else what peers are told."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    message = str(error)
    return f"it left with {type(error).__name__}" + (f": {message}" if message else "")
