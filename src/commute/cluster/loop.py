# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for callers that have none, or another one.

The thread is a daemon, so a process can end without close(). After a fork it does not exist in the
child, and what it holds is the parent's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from commute._errors import ClosedError

__all__ = ["LoopThread"]

# Ctrl-C, and the caller's own reasons to stop, are noticed this soon.
SLICE_SECONDS: Final = 0.1
CLOSE_SECONDS: Final = 2.0

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads.

    Args:
        shut_down: runs on the loop at its end, when everything there has been cancelled.
        ended: what a call raises when the thread has ended.
    """

    def __init__(self, name: str, shut_down: Callable[[], Awaitable[None]], *, ended: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.closed = False
        self._shut_down = shut_down
        self._ended = ended
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        work: Coroutine[Any, Any, _T],
        *,
        check: Callable[[], None] | None = None,
    ) -> _T:
        """Run on the loop thread and wait for the result.

        The wait is cut into slices: between them Ctrl-C works and `check` may raise; the work is
        cancelled then.
        """
        if self.closed or not self._thread.is_alive():
            work.close()
            raise ClosedError(self._ended)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # another thread closed it just now
            work.close()
            raise ClosedError("the group was closed while this call waited") from None
        try:
            while not concurrent.futures.wait([future], timeout=SLICE_SECONDS).done:
                if check is not None:
                    check()
                if not self._thread.is_alive():
                    break
            if not future.done() or future.cancelled():
                raise ClosedError("the group was closed while this call waited")
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread and everything on it, within 2 s; idempotent."""
        if self.closed:
            return
        self.closed = True
        # After a fork the thread does not exist in the child, and the sockets are the parent's.
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._finish())
        finally:
            self.loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shut_down()
