# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous call returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from commute import _core
from commute._errors import AbandonedError
from commute._runner import Runner


class Handle:
    """An operation under way.

    The array of the call belongs to the operation until it is done: neither read nor write it.

    >>> import commute, numpy
    >>> with commute.init() as world:
    ...     handle = world.allreduce_async(numpy.ones(3))
    ...     handle.wait()
    array([1., 1., 1.])
    """

    def __init__(
        self,
        runner: Runner,
        operation: _core.Operation | Sequence[_core.Operation],
        result: Any,
        error: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._operations = (
            [operation] if isinstance(operation, _core.Operation) else list(operation)
        )
        self._result = result
        self._error = error  # what a ufunc of the caller raised on the way

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the call, once it is there.

        Raises:
            OperationTimeoutError: it is not there after `timeout` seconds; the operation goes on,
                and `wait` can be called again. (The `timeout=` of the call itself gives it up.)
            PeerLostError, MismatchError, AbandonedError, ClosedError: as the blocking call.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            for operation in self._operations:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._runner.finish(operation, left)
        except AbandonedError as told:
            error = self._error()
            if error is None:
                raise
            raise error from told  # the others are told; this rank hears it first hand
        return self._result

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return all(operation.finished for operation in self._operations)

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        what = " and ".join(operation.describe() for operation in self._operations)
        return f"<Handle of {what or 'nothing'}, {state}>"
