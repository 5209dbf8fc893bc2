# SPDX-License-Identifier: Apache-2.0
"""Gives operations to the core and waits for them: the part of a group that touches the engine.

Waiting is cut into slices of 100 ms. Between them Ctrl-C works and, after 10 seconds, a line in
the log names the ranks that are waited for. A caller that leaves early (Ctrl-C, an exception out
of a signal handler) breaks the group: the core may be writing into its array, and the other ranks
must not wait for it. `failure` turns what the core says into one exception that names names.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from commute import _core
from commute._errors import (
    AbandonedError,
    ClosedError,
    CommuteError,
    ForkedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

if TYPE_CHECKING:
    from pathlib import Path

SLICE_SECONDS: Final = 0.1
SLOW_SECONDS: Final = 10.0
GOODBYE_SECONDS: Final = 0.5
LINGER_SECONDS: Final = 3.0

# The core's failure codes (core/failure.h).
MISMATCH, TIMEOUT, INTERRUPTED, PEER_LOST, PROTOCOL, CLOSED = range(1, 7)

_log = logging.getLogger("commute")
_numbers = count(1)  # of groups in this process, for the names of files


@dataclass(frozen=True)
class Peer:
    """Who a rank is, for messages."""

    rank: int
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        where = [f"pid {self.pid}"] * bool(self.pid) + [f"on {self.host}"] * bool(self.host)
        return f"rank {self.rank}" + (f" ({' '.join(where)})" if where else "")


class Watcher(Protocol):
    """What hears of the other ranks, and tells them of this one."""

    def silent_for(self, rank: int) -> float:
        """Seconds since the last word of a rank; negative when nobody listens to it."""

    def close(self, failed: bool, why: str, linger_seconds: float) -> None:
        """Say goodbye."""


class Runner:
    """The engine of one group and what it takes to wait for it.

    Args:
        open_engine: gives the engine; asked once, at its first use.
        group: what the group is called, for messages; empty for the world.
    """

    def __init__(
        self,
        open_engine: Callable[[], _core.Engine],
        rank: int,
        peers: Sequence[Peer],
        *,
        health: Watcher | None = None,
        records: tuple[str | None, str] = (None, "commute"),
        group: str = "",
    ) -> None:
        self._open_engine = open_engine
        self._opening = threading.Lock()
        self._rank = rank
        self.peers = tuple(peers)
        self._group = group
        self._health = health
        self._records = records  # directory and name of the recorder's dump
        self._dumped: Path | None = None
        self._pid = os.getpid()
        # Arrays of asynchronous operations, kept alive until the core is done with them.
        self._pending: deque[tuple[_core.Operation, Any]] = deque()
        self.closed = False

    @cached_property
    def engine(self) -> _core.Engine:
        with self._opening:  # several threads may be the first
            if "engine" not in self.__dict__:
                self.__dict__["engine"] = self._open_engine()
            return self.engine

    def beside(
        self,
        open_engine: Callable[[], _core.Engine],
        rank: int,
        peers: Sequence[Peer],
        health: Watcher | None,
        group: str,
    ) -> Runner:
        """A runner for another group of the same world."""
        folder, name = self._records
        number = next(_numbers)  # so that no two groups dump into one file
        records = (folder, f"{name}-group{number}")
        return Runner(open_engine, rank, peers, health=health, records=records, group=group)

    def check(self) -> None:
        """Raise if the group cannot be used any more."""
        self.check_open()
        if self.engine.failure is not None:
            raise self.failure(self.engine.failure, "")

    def check_open(self) -> None:
        """Raise if the group is closed, or another process's."""
        self._check_process()
        if self.closed:
            raise ClosedError("the group is closed; make a new one with commute.init()")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this group was made before a fork and cannot be used in the child; call"
                " commute.init() in the child, or start processes by spawn"
            )

    def start(self, submit: Callable[[], _core.Operation], keep: Any) -> _core.Operation:
        """Submit an operation; `keep` lives until it has finished."""
        self._let_go()
        try:
            operation = submit()
        except _core.CoreError as error:
            raise self.failure(error.args, "") from None
        self._pending.append((operation, keep))
        return operation

    def _let_go(self) -> None:
        """Of what finished operations used. Threads may do this at once, so one is looked at when
        it is out: whoever looked first could take another's away.
        """
        while self._pending:
            try:
                first = self._pending.popleft()
            except IndexError:
                return
            if not first[0].finished:
                self._pending.appendleft(first)
                return

    def park(self, operation: _core.Operation, keep: Any) -> None:
        """Keep what an operation uses that nobody will wait for."""
        self._pending.append((operation, keep))

    def finish(self, operation: _core.Operation, timeout: float | None = None) -> None:
        """Wait until the operation has finished; raise what went wrong."""
        self._check_process()  # a handle may be waited for in a child; nobody moves it there
        if not operation.finished and not self._wait(operation, timeout):
            raise OperationTimeoutError(
                f"{_describe(operation)} has not finished after {timeout:.3g} s on rank"
                f" {self._rank}{self._waiting_for()}; it goes on, wait for it again"
            )
        self._let_go()  # compiled calls may follow, which never come here
        if operation.failure is not None:
            raise self.failure(operation.failure, _describe(operation))

    def _wait(self, operation: _core.Operation, timeout: float | None) -> bool:
        wait = self.engine.wait
        begun = time.monotonic()
        deadline = float("inf") if timeout is None else begun + timeout
        next_line = begun + SLOW_SECONDS
        try:
            now = begun
            while not wait(operation, max(0.0, min(SLICE_SECONDS, deadline - now))):
                now = time.monotonic()
                if now >= deadline:
                    return False
                if now >= next_line:
                    next_line += SLOW_SECONDS
                    _log.warning(
                        "rank %d%s: %s has been waiting for %.0f s%s",
                        self._rank,
                        f" of {self._group}" if self._group else "",
                        _describe(operation),
                        now - begun,
                        self._waiting_for(),
                    )
        except BaseException as error:
            self.abandon(operation, f"the caller stopped waiting ({type(error).__name__})")
            raise
        return True

    def abandon(self, operation: _core.Operation, why: str) -> None:
        """Give up an operation: the group is broken, and its other ranks are told."""
        text = f"rank {self._rank} gave up {_describe(operation)}: {why}"
        self.engine.fail(INTERRUPTED, -1, self._rank, operation.sequence, text)
        while not self.engine.wait(operation, SLICE_SECONDS):
            pass  # whoever drives sees the failure at once; the array must be free before we return

    def give_up(self, what: str) -> None:
        """Break the group: this rank takes no part in what its other ranks have begun."""
        self.engine.fail(INTERRUPTED, -1, self._rank, 0, f"rank {self._rank} gave up {what}")

    def withdraw(self, receive: _core.Operation) -> bool:
        """Take back a receive of which nothing has arrived yet."""
        return self.engine.withdraw(receive)

    def _waiting_for(self) -> str:
        named = []
        for rank in self.engine.waiting_for:
            heard = self._health.silent_for(rank) if self._health is not None else -1.0
            said = f", last heard {heard:.1f} s ago" if heard >= 0 else ""
            named.append(f"{self.peers[rank]}{said}")
        return ", waiting for " + "; ".join(named) if named else ""

    def failure(self, failure: Sequence[Any], doing: str) -> CommuteError:
        """The exception for what the core reports; the recorder is dumped with the first one."""
        code, rank, by, operation, text = failure
        error = self._error(code, rank, by, operation, text, doing)
        if self._group:
            error.add_note(f"ranks are those in {self._group} of the world")
        if code != CLOSED:
            self._note_records(error)
        return error

    def _error(
        self, code: int, rank: int, by: int, operation: int, text: str, doing: str
    ) -> CommuteError:
        if code == MISMATCH:
            return MismatchError(text)
        if code == TIMEOUT and by == self._rank:
            return OperationTimeoutError(text)
        if code in (TIMEOUT, INTERRUPTED):
            number = f"operation {operation}" if operation else "an operation"
            return AbandonedError(text, rank=by, operation=number, cause=text)
        if code == CLOSED:
            return ClosedError("the group was closed while this call waited")
        peer = self.peers[rank] if 0 <= rank < len(self.peers) else Peer(rank)
        return PeerLostError(
            rank=rank, host=peer.host, pid=peer.pid, last_operation=doing, cause=text
        )

    def _note_records(self, error: CommuteError) -> None:
        from commute.watch import recorder  # it writes files, which a sound group never does

        if self._dumped is None:
            try:
                self._dumped = recorder.dump(self.engine.records(), *self._records)
            except OSError as problem:
                error.add_note(
                    f"the last operations of rank {self._rank} were not saved: {problem}"
                )
                return
        error.add_note(f"the last operations of rank {self._rank}: {self._dumped}")

    def close(self, failed: str = "") -> None:
        """Say goodbye, let what was sent arrive, close; bounded and idempotent."""
        if self.closed or os.getpid() != self._pid:
            self.closed = True
            return
        self.closed = True
        if self._health is not None:
            self._health.close(bool(failed), failed, GOODBYE_SECONDS)
        if "engine" in self.__dict__:
            self.engine.close(LINGER_SECONDS)
        self._pending.clear()


def _describe(operation: _core.Operation) -> str:
    number = f" #{operation.sequence}" if operation.sequence else ""
    name, _, rest = operation.describe().partition(" ")
    return f"{name}{number}{' ' + rest if rest else ''}"
