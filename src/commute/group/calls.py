# SPDX-License-Identifier: Apache-2.0
"""From a call to the core: what stands behind every collective of a Group.

    arguments   arrays become buffers, and what does not fit is refused with a sentence
    choosing    an algorithm by size and place; its plan is built, proved and bound once
    running     the operation is submitted; a blocking call waits for it, others get a Handle

`Group` has the names, the defaults and the docstrings. One lock, held while a plan is bound; the
rest may be called from several threads.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import numpy as np

from commute import _core
from commute import plan as plans
from commute._arrays import HALVES, Buffer, empty_like, overlap, reading, writing
from commute._handle import Handle
from commute._runner import Runner
from commute._wiring import Wiring
from commute.group.bound import core_plan
from commute.group.fast import FastCalls
from commute.group.reductions import SUM, OpLike, Reduction, reduction
from commute.group.shared_arrays import SharedArrays, SharedPart
from commute.plan import Collective

NOTHING: Final = Buffer(0, 0, 1, (), 0, None)
AXES_MAX: Final = 64  # as many as NumPy has
# What a scatter tells ahead (exchanges.py): dtype, whether it is a tensor, how many axes, lengths.
HEAD_WORDS: Final = 3 + AXES_MAX


class Call(NamedTuple):
    """A collective with its arguments checked."""

    collective: Collective
    source: Buffer
    target: Buffer
    elements: int  # per block
    result: Any
    op: Reduction = SUM
    root: int = 0

    def arguments(self) -> tuple[int, int, int, int, int, bool]:
        """As the core takes them."""
        at = self.source.address, self.target.address
        return (*at, self.elements, self.source.dtype, self.op.code, self.op.mean)


class Calls:
    """The mechanics of a group's calls."""

    def __init__(
        self, runner: Runner, wiring: Wiring, *, rank: int, size: int, timeout: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._runner = runner
        self._wiring = wiring
        self._bound: dict[tuple[Collective, str, int], _core.Executor] = {}
        self._binding = threading.Lock()
        self._fast: FastCalls | None = None  # the compiled call path, in shared memory
        self._shared: SharedArrays | None = None  # likewise

    @property
    def timeout(self) -> float:
        return self._timeout

    # ---- arguments ----

    def _in_place(
        self, collective: Collective, x: Any, out: Any, *, op: OpLike = "sum", root: int = 0
    ) -> Call:
        name = collective.label
        source = writing(x, name) if out is None else reading(x, name)
        target = source if out is None else self._target(out, source, source.shape, name)
        self._check_rank(root, "root", name)
        result = x if out is None else out
        combined = reduction(op, source, name)
        return Call(collective, source, target, source.elements, result, combined, root)

    def _reduce(self, x: Any, root: int, op: OpLike, out: Any) -> Call:
        if self.rank == root:
            return self._in_place(Collective.REDUCE, x, out, op=op, root=root)
        self._check_rank(root, "root", "reduce")
        source = reading(x, "reduce")
        combined = reduction(op, source, "reduce")
        result = x if out is None else out
        return Call(Collective.REDUCE, source, NOTHING, source.elements, result, combined, root)

    def _allgather(self, x: Any, out: Any) -> Call:
        source = reading(x, "allgather")
        shape = (self.size, *source.shape)
        result = empty_like(x, shape) if out is None else out
        target = self._target(result, source, shape, "allgather", apart=True)
        return Call(Collective.ALLGATHER, source, target, source.elements, result)

    def _reduce_scatter(self, x: Any, op: OpLike, out: Any) -> Call:
        source = reading(x, "reduce_scatter")
        combined = reduction(op, source, "reduce_scatter")
        self._check_leading(source, "reduce_scatter")
        shape = source.shape[1:]
        result = empty_like(x, shape) if out is None else out
        target = self._target(result, source, shape, "reduce_scatter", apart=True)
        return Call(Collective.REDUCE_SCATTER, source, target, target.elements, result, combined)

    def _barrier(self) -> Call:
        return Call(Collective.BARRIER, NOTHING, NOTHING, 0, None)

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

    def _check_rank(self, rank: int, what: str, name: str) -> None:
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.size:
            raise ValueError(f"{name} expected {what}= from 0 to {self.size - 1}, got {rank!r}")

    def _check_leading(self, source: Buffer, name: str) -> None:
        if not source.shape or source.shape[0] != self.size:
            raise ValueError(
                f"{name} expected a leading axis of length {self.size} (the group's size),"
                f" got shape {source.shape}; reshape x to ({self.size}, -1)"
            )

    # ---- running ----

    def _run(
        self, call: Call, algorithm: str | None, deterministic: bool, timeout: float | None
    ) -> Any:
        operation = self._submit(call, algorithm, deterministic, timeout, background=False)
        return Handle(self._runner, operation, call.result, call.op.error).wait()

    def _begin(
        self, call: Call, algorithm: str | None, deterministic: bool, timeout: float | None
    ) -> Handle:
        operation = self._submit(call, algorithm, deterministic, timeout, background=True)
        return Handle(self._runner, operation, call.result, call.op.error)

    def _submit(
        self,
        call: Call,
        algorithm: str | None,
        deterministic: bool,
        timeout: float | None,
        *,
        background: bool,
    ) -> _core.Operation:
        self._runner.check()
        limit = self.timeout if timeout is None else timeout
        executor, part = self._executor(call, algorithm, deterministic, limit)
        return self._runner.start(
            lambda: self._runner.engine.submit(
                executor,
                *call.arguments(),
                limit,
                background,
                call.op.combine,
                *(part or ()),
            ),
            keep=call,
        )

    def _executor(
        self, call: Call, algorithm: str | None, deterministic: bool, limit: float
    ) -> tuple[_core.Executor, SharedPart | None]:
        """The bound plan of the algorithm that is chosen; its links are opened at first use.

        Of a direct plan also the array that all ranks have, and which part of it is called with.
        """
        part = self._part(call)
        name = plans.choose(
            call.collective,
            self.size,
            call.source.nbytes,
            self._wiring.place if part is None else "arrays",
            deterministic,
            halves=call.source.dtype in HALVES,
            algorithm=algorithm,
            root=call.root,
            fetches=self._wiring.fetches,
        )
        key = (call.collective, name, call.root)
        found = self._bound.get(key)
        if found is None:
            found = self._bind(key, limit)
        fast = self._fast  # another thread may be closing the group
        if name == plans.DIRECT and part is not None:
            if fast is not None:
                fast.learn_direct(call.collective, found, call.target, part)
            return found, part
        if fast is not None and algorithm is None and not deterministic:
            fast.learn(call.collective, found, call.source.nbytes)
        return found, None

    def _part(self, call: Call) -> SharedPart | None:
        """Of the array that is worked on in place, if all ranks reach it."""
        if self._shared is None or call.source.address != call.target.address:
            return None
        return self._shared.find(call.target)

    def _bind(self, key: tuple[Collective, str, int], limit: float) -> _core.Executor:
        collective, name, root = key
        with self._binding:
            self._prepare(limit)
            plan = plans.build(collective, name, self.size, root)
            report = plans.prove(plan)
            settled = report is not None and report.settled[self.rank]
            for peer in plan.peers(self.rank):
                self._wiring.link(peer, limit, self._runner.check)
            mine = core_plan(plan, self.rank, settled=settled)
            executor = self._runner.engine.bind(mine, plans.tile_bytes(plan))
            self._bound[key] = executor
            return executor

    def _prepare(self, limit: float) -> None:
        """The first plan of a group in shared memory: see to outboxes and to the compiled calls."""
        if self._wiring.place == "memory" and self._fast is None:
            self._wiring.share(limit, self._runner.check)
            self._share_memory()

    # ---- shared memory ----

    def _forget_plans(self) -> None:
        """Bind every plan anew at its next use; all ranks call this between the same operations."""
        self._bound.clear()

    def _share_memory(self) -> None:
        """All ranks read each other's outboxes from now on; all of them call this."""
        self._wiring.place = "memory"
        self._shared = SharedArrays(self._runner.engine)
        self._fast = FastCalls(
            self._runner,
            {collective: getattr(self, collective.label) for collective in Collective},
            ranks=self.size,
            fetches=self._wiring.fetches,
            head_words=HEAD_WORDS,
            timeout=self.timeout,
        )
        for collective, call in self._fast.calls.items():
            self.__dict__[collective.label] = call

    def _drop_fast_calls(self) -> None:
        for collective in Collective:
            self.__dict__.pop(collective.label, None)  # it holds this group
        self._fast = None
