# SPDX-License-Identifier: Apache-2.0
"""alltoall with parts of different lengths: a message for each pair of ranks.

Only the sender of a part knows how long it is. So each alltoall_v begins with an alltoall of the
*counts*, as nobody but a rank itself knows whether it needs to be told. Ranks that pass
`recv_counts` do not wait for it: it travels beside the parts.

All messages are posted before any is waited for, receives first; in step k a rank sends to the one
k places after it, so that no rank is everybody's first. Empty parts travel too: that is how a rank
that expects something where nothing comes hears of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from commute import _core
from commute._arrays import Buffer, copy_into, empty_like, reading, writing
from commute._handle import Handle
from commute.group.exchanges import Exchanges
from commute.group.messages import Messages


class UnevenExchanges(Exchanges, Messages):
    """The calls of a group that move blocks and messages; among them those of uneven parts."""

    def alltoall_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """The next send_counts[r] rows of x to each rank r; what comes, in the order of ranks.

        As `alltoall`, with parts of any length, also of none. Beyond their first axis the arrays of
        all ranks have the same shape.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     world.alltoall_v(numpy.array([[1, 2], [3, 4]]), [2])
        array([[1, 2],
               [3, 4]])

        Args:
            x: as many rows as send_counts has together.
            recv_counts: how many rows come from each rank, if this rank knows; otherwise it is
                told, which takes a little longer.
            out: where the result goes, of as many rows as come; it must not overlap x.

        Raises:
            MismatchError: a rank sends more or less than another expects; on all ranks.
        """
        operations, got = self._alltoall_v(
            x, send_counts, recv_counts, out, timeout, background=False
        )
        return Handle(self._runner, operations, got).wait()

    def alltoall_v_async(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `alltoall_v`, returning at once with `recv_counts`, else once all ranks have called.

        A rank without them has to hear from the others how much will come.
        """
        operations, got = self._alltoall_v(
            x, send_counts, recv_counts, out, timeout, background=True
        )
        return Handle(self._runner, operations, got)

    def _alltoall_v(
        self,
        x: Any,
        send_counts: Any,
        recv_counts: Any,
        out: Any,
        timeout: float | None,
        *,
        background: bool,
    ) -> tuple[list[_core.Operation], Any]:
        """Posts this rank's messages; the operations, and what is returned in the end."""
        self._runner.check()
        call = f"alltoall_v on rank {self.rank}"
        source = reading(x, call)
        sent = self._counts(send_counts, "send_counts", call)
        if source.shape[:1] != (sum(sent),):
            raise ValueError(
                f"{call} expected x of {sum(sent)} rows, the sum of send_counts, got shape"
                f" {source.shape}"
            )
        told = np.empty(self.size, np.int64)
        tell = self._alltoall(np.array(sent, np.int64), told)
        operations: list[_core.Operation] = []
        if recv_counts is None:
            if out is not None:  # all but its length is refused before anybody waits
                self._room(x, source, [*writing(out, call).shape[:1]], out, call)
            self._run(tell, None, False, timeout)
            received = told.tolist()
            target, result = self._told_room(x, source, received, out, call)
        else:
            received = self._counts(recv_counts, "recv_counts", call)
            self._check_own(sent, received, call)
            target, result = self._room(x, source, received, out, call)
            operations += [self._submit(tell, None, False, timeout, background=background)]
        parts_in, parts_out = _parts(source, sent), _parts(target, received)
        copy_into(parts_out[self.rank], parts_in[self.rank])
        options: Any = {"call": "alltoall_v", "background": background}
        for step in range(1, self.size):
            peer = (self.rank - step) % self.size
            part = parts_out[peer]
            operations.append(self._post(part, peer, timeout, sends=False, **options))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            operations.append(self._post(parts_in[peer], peer, timeout, sends=True, **options))
        return operations, result

    def _counts(self, counts: Any, what: str, call: str) -> list[int]:
        try:
            found = [operator.index(count) for count in counts]
        except TypeError:
            found = []
        if len(found) != self.size or min(found) < 0:
            raise ValueError(
                f"{call} expected {what}= {self.size} whole numbers from 0 up, one for each rank,"
                f" got {counts!r}"
            )
        return found

    def _check_own(self, sent: list[int], received: list[int], call: str) -> None:
        mine, wanted = sent[self.rank], received[self.rank]
        if mine != wanted:
            raise ValueError(
                f"{call} expected recv_counts[{self.rank}] to be what it sends itself, {mine},"
                f" got {wanted}"
            )

    def _room(
        self, x: Any, source: Buffer, received: list[int], out: Any, call: str
    ) -> tuple[Buffer, Any]:
        """Where what comes is written, and what the caller gets."""
        shape = (sum(received), *source.shape[1:])
        result = empty_like(x, shape) if out is None else out
        return self._target(result, source, shape, call, apart=True), result

    def _told_room(
        self, x: Any, source: Buffer, received: list[int], out: Any, call: str
    ) -> tuple[Buffer, Any]:
        """As _room, when the others know already that this rank takes part and wait for it."""
        try:
            return self._room(x, source, received, out, call)
        except (ValueError, MemoryError) as error:
            self._runner.give_up(f"alltoall_v: {error}")
            raise


def _parts(whole: Buffer, counts: list[int]) -> list[Buffer]:
    """A buffer cut along its first axis."""
    row = math.prod(whole.shape[1:])
    element = whole.nbytes // max(1, whole.elements)
    parts, begin = [], whole.address
    for count in counts:
        size = count * row * element
        shape = (count, *whole.shape[1:])
        parts.append(Buffer(begin, count * row, whole.dtype, shape, size, whole.owner))
        begin += size
    return parts
