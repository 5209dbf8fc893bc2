# SPDX-License-Identifier: Apache-2.0
"""A worker's way to the servers of its stores, and waiting for them.

All stores of a group share one `StoreLinks`: the endpoint in the core, whose calls are numbers,
and what it takes to wait for a call. Waiting is cut into slices of 100 ms, between which Ctrl-C
works, broken channels are mended, and after 10 seconds a line in the log names the ranks that hold
up the round. Arrays of calls that are not done are kept alive in `kept`: the core reads and writes
them.

    Embedded    the shard is in this process (a world of one)
    gather      processes: servers started, joined and dialled
    observer    a server that others started, and observers connect to
"""

from __future__ import annotations

import itertools
import logging
import numbers
import os
import struct
import time
from collections.abc import Callable
from typing import Any, Final

from commute import _core
from commute._errors import (
    ClosedError,
    CommuteError,
    ForkedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    SettingError,
    SlotLostError,
)
from commute._runner import CLOSED, PEER_LOST, SLICE_SECONDS, SLOW_SECONDS

__all__ = ["SLOTS", "STANDING", "Embedded", "StoreLinks", "refusal", "replay_of", "seconds"]

SLOTS: Final = 1024
# Why a shard refuses (core/store/message.h).
_MISMATCH, _INVALID, _LOST = 2, 3, 4
STANDING: Final = struct.Struct("<IIQ")

_log = logging.getLogger("commute")
_reports = itertools.count()


def replay_of(directory: str | None) -> tuple[_core.Replay | None, Callable[[str], None]]:
    """For tests: a replay of all ops, and what writes its report into the directory."""
    if not directory:
        return None, lambda who: None
    replay = _core.Replay()

    def report(who: str) -> None:
        path = os.path.join(directory, f"{who}-{os.getpid()}-{next(_reports)}.replay")
        with open(path, "w", encoding="utf-8") as file:
            file.write(replay.report())

    return replay, report


class Calling:
    """Turns what the core raises into one of our errors. There are several around each call: as a
    generator each would take a microsecond and a half."""

    __slots__ = ("_links",)

    def __init__(self, links: StoreLinks) -> None:
        self._links = links

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, _core.CoreError):
            raise self._links._failure(error.args) from None


class StoreLinks:
    """The endpoint of this worker, and waiting for its calls.

    Args:
        mend: opens the channel to a shard anew; returns whether that succeeded.
        where: a shard in words, for messages.
        on_close: ends what belongs to the links; called once, with whether all went well, and
            whether a server was lost.

    Attributes:
        me: this worker, in words.
    """

    _CLOSED = "the store is closed, as its group is; make a new one with init()"

    def __init__(
        self,
        endpoint: _core.StoreEndpoint,
        rank: int,
        *,
        mend: Callable[[int], bool],
        where: Callable[[int], str],
        on_close: Callable[[bool, bool], None],
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.me = f"rank {rank}"
        self.where = where
        self._mend = mend
        self._on_close = on_close
        self._pid = os.getpid()
        self.kept: dict[int, Any] = {}  # by call; filled by the core
        self._calling = Calling(self)
        self._lost = False  # a server
        self._closed = False

    def let_go(self) -> None:
        """Let arrays go whose calls are done, now and then."""
        if len(self.kept) >= 64:
            with self.calling():
                for number in list(self.kept):  # other threads add to it
                    if self.endpoint.done(number):
                        self.kept.pop(number, None)

    def calling(self) -> Calling:
        """Around a call of the endpoint: what the core raises becomes one of our errors."""
        return self._calling

    def finish(self, call: int, what: str, timeout: float, *, table: int = -1) -> bytes:
        """Wait until the call is done; returns the answers to a question.

        Raises what the call was refused for, or OperationTimeoutError: the call then goes on.
        """
        if os.getpid() != self._pid:
            raise ForkedError("this store was made before a fork and cannot be used in the child")
        with self.calling():
            try:
                self._wait(lambda s: self.endpoint.wait(call, s), what, timeout, table)
            except BaseException:
                self.endpoint.go_on()  # nobody waits for it any more
                raise
            code, about, why, answers = self.endpoint.outcome(call)
        self.kept.pop(call, None)
        if code:
            raise refusal(code, about, f"{what}: {why}")
        return answers

    def flush(self, timeout: float) -> None:
        with self.calling():
            self._wait(self.endpoint.wait_flushed, "flush", timeout, -1)

    def _wait(self, wait: Callable[[float], bool], what: str, timeout: float, table: int) -> None:
        begun = time.monotonic()
        deadline, next_line, now = begun + timeout, begun + SLOW_SECONDS, begun
        while not wait(max(0.0, min(SLICE_SECONDS, deadline - now))):
            now = time.monotonic()
            if now >= deadline:
                raise OperationTimeoutError(
                    f"{what} has not finished after {timeout:.3g} s on {self.me}"
                    f"{self._behind(table)}"
                )
            mended = [self._mend(shard) for shard in self.endpoint.broken()]
            if not all(mended):
                time.sleep(SLICE_SECONDS / 2)
            if now >= next_line:
                next_line += SLOW_SECONDS
                waited = now - begun
                behind = self._behind(table)
                _log.warning("%s: %s has waited %.0f s%s", self.me, what, waited, behind)

    def _behind(self, table: int) -> str:
        """Who holds up the round of this table; empty when nobody does, or nobody answers."""
        if table < 0 or self.endpoint.broken():
            return ""
        call = self.endpoint.who(table)
        if not self.endpoint.wait(call, SLICE_SECONDS):
            return ""
        answers = self.endpoint.outcome(call)[3]
        rows = list(STANDING.iter_unpack(answers))
        mine = max((clock for rank, _, clock in rows if rank == self.rank), default=0)
        slow = [
            f"rank {rank} has not {'pushed or ticked' if declared else 'declared'} it"
            f" (clock {clock}, mine is {mine})"
            for rank, declared, clock in rows
            if clock < mine
        ]
        return "".join(f"; {line}" for line in slow[:4])

    @property
    def usable(self) -> bool:
        """Whether this is the process that made it."""
        return os.getpid() == self._pid and not self._closed

    def check(self) -> None:
        """Raise if the store cannot be used any more."""
        if os.getpid() != self._pid:
            raise ForkedError("this store was made before a fork and cannot be used in the child")
        if self._closed:
            raise ClosedError(self._CLOSED)

    def _failure(self, args: tuple[Any, ...]) -> CommuteError:
        code, rank, _, _, text = args
        if code == CLOSED:
            return ClosedError(self._CLOSED)
        if code == PEER_LOST and rank == self.rank:
            return PeerLostError(f"this worker, {self.me}, was taken for lost: {text}", rank=rank)
        if code == PEER_LOST:
            self._lost = True
            return self._server_lost(rank, text)
        return CommuteError(text)

    def _server_lost(self, rank: int, text: str) -> CommuteError:
        return SlotLostError(
            f"{self.where(-1 - rank)} was lost, and with it the slots it held: {text}; restart"
            " the job, from its last checkpoint if it has saved one"
        )

    def close(self, *, well: bool = True) -> None:
        """Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.endpoint.close()
        self.kept.clear()
        self._on_close(well, self._lost)


class Embedded(StoreLinks):
    """The shard in this process: a call is done when it returns, on the caller's thread."""

    def __init__(self, replays: str | None) -> None:
        replay, report = replay_of(replays)
        endpoint = _core.StoreEndpoint(0, 1)
        endpoint.embed(SLOTS, replay)
        super().__init__(
            endpoint,
            0,
            mend=lambda shard: True,
            where=lambda shard: "this process",
            on_close=lambda well, lost: report("embedded"),
        )


def seconds(given: Any) -> float:
    """A timeout that was given with a call."""
    if not isinstance(given, numbers.Real) or not float(given) >= 0:
        raise SettingError(f"expected timeout to be seconds from 0 up, got {given!r}")
    return float(given)


def refusal(code: int, about: int, text: str) -> CommuteError:
    """The error for what a shard refused."""
    if code == _MISMATCH:
        return MismatchError(text)
    if code == _INVALID:
        return SettingError(text)
    if code == _LOST:
        return PeerLostError(f"{text}; this store does not go on without it", rank=about)
    return CommuteError(text)
