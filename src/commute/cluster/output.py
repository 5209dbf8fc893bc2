# SPDX-License-Identifier: Apache-2.0
"""What the ranks print, line by line, each with its rank in front.

    pipe of a rank ──> LineCutter ──> Sink (queue) ──> thread ──> stdout or stderr of the launcher

The launcher's event loop also runs the coordinator, so it must never wait for a terminal. Each
stream of the launcher has a thread that does the waiting; the loop only fills its queue.

States of a sink, by how much is queued:
    open      everything is queued
    paused    more than 4 MiB queued: the pipes are not read, so the ranks wait (as they would if
              they wrote to the terminal themselves)
    dropping  paused, and not one byte went out for 10 s: the pipes are read again and lines are
              thrown away and counted, since no rank may wait for ever on somebody's terminal
    closed    the reader is gone (`| head`): everything is thrown away, and the launcher is told
`paused` and `dropping` end when less than 1 MiB is queued.

Lines are bytes and stay as they are: nothing is decoded, so nothing can fail to decode. A line of
more than 1 MiB is cut. Of a line with carriage returns (a progress bar) the last state is shown,
as a terminal would.

Everything but the body of `Sink._write_all` runs on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

__all__ = ["LineCutter", "Output", "Sink", "prefix", "wants_colour"]

TAIL_BYTES = 64 << 10  # enough for a deep traceback
LINE_BYTES_MAX = 1 << 20
READ_BYTES = 64 << 10  # the size of a pipe on Linux
QUEUE_BYTES_HIGH = 4 << 20
QUEUE_BYTES_LOW = 1 << 20
STALL_S = 10.0
# A line without an end is shown after this long on a terminal: somebody is waiting for it.
PARTIAL_S = 1.0
# Cyan, yellow, magenta, green, blue and their bright twins; red is left to errors.
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def wants_colour(fd: int, env: Mapping[str, str]) -> bool:
    """Whether to colour what goes to `fd`: only a terminal, and not against the user's wish."""
    return not env.get("NO_COLOR") and env.get("TERM") != "dumb" and os.isatty(fd)


def prefix(rank: int, *, coloured: bool) -> bytes:
    """What stands in front of each line of a rank."""
    if not coloured:
        return b"[%d] " % rank
    return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)


class LineCutter:
    """Cuts the bytes of one stream of one rank into whole lines with a prefix."""

    def __init__(self, line_prefix: bytes, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._prefix = line_prefix
        self._limit = line_bytes_max
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, ready to print."""
        self._held += data
        end = self._held.rfind(b"\n")
        whole, self._held = self._held[: end + 1], self._held[end + 1 :]
        lines = [self._line(line) for line in whole.split(b"\n")[:-1]]
        while len(self._held) > self._limit:
            lines.append(self._line(self._held[: self._limit]))
            del self._held[: self._limit]
        return b"".join(lines)

    def rest(self) -> bytes:
        """The line that has not ended, as a line of its own; nothing if there is none."""
        held, self._held = self._held, bytearray()
        return self._line(held) if held else b""

    def _line(self, line: bytearray) -> bytes:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + bytes(shown) + b"\n"


class Sink:
    """A queue in front of a file descriptor that may block, and the thread that empties it."""

    def __init__(
        self, fd: int, *, on_low: Callable[[], None], on_closed: Callable[[], None]
    ) -> None:
        self.fd = fd
        self.closed = False
        self.written_bytes = 0
        self._on_low = on_low
        self._on_closed = on_closed
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._started = False

    def start(self) -> None:
        self._started = True
        # A daemon: a terminal that never takes another byte must not keep the launcher alive.
        threading.Thread(target=self._write_all, name="commute-output", daemon=True).start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def put(self, data: bytes) -> None:
        if self.closed or not data:
            return
        if not self._started:
            # Only the launcher's own few lines come this early.
            with contextlib.suppress(OSError):
                os.write(self.fd, data)
            return
        with self._changed:
            self._queue.append(data)
            self._queued_bytes += len(data)
            self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                data = memoryview(self._queue.popleft())
            while data:
                try:
                    count = os.write(self.fd, data[:READ_BYTES])
                except BlockingIOError:
                    # Somebody else made the shared terminal non-blocking; try again soon.
                    time.sleep(0.01)
                    continue
                except OSError:
                    self._close()
                    return
                data = data[count:]
                self._wrote(count)

    def _wrote(self, count: int) -> None:
        with self._changed:
            was_high = self._queued_bytes >= QUEUE_BYTES_LOW
            self._queued_bytes -= count
            self.written_bytes += count
            now_low = self._queued_bytes < QUEUE_BYTES_LOW
        if was_high and now_low:
            self._on_low()

    def _close(self) -> None:
        with self._changed:
            self.closed = True
            self._queue.clear()
            self._queued_bytes = 0
        self._on_low()
        self._on_closed()


class _Source:
    """One pipe of one rank; `tail` is what it printed last, kept for the report of a failure."""

    def __init__(self, fd: int, sink_index: int, cutter: LineCutter, *, keep: bool) -> None:
        self.fd = fd
        self.sink_index = sink_index
        self.cutter = cutter
        self.keep = keep
        self.tail = bytearray()
        self.partial_timer: asyncio.TimerHandle | None = None


class Output:
    """Carries the output of all ranks to the stdout and stderr of this process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Mapping[str, str],
        *,
        on_closed: Callable[[], None],
        fds: tuple[int, int] = (1, 2),
    ) -> None:
        self._loop = loop
        self._colours = tuple(wants_colour(fd, env) for fd in fds)
        self._terminals = tuple(os.isatty(fd) for fd in fds)
        closed = (self._in_loop(on_closed), lambda: None)
        self._sinks = tuple(
            Sink(fd, on_low=self._in_loop(self._resume, index), on_closed=closed[index])
            for index, fd in enumerate(fds)
        )
        self._paused = [False, False]
        self._dropping = [False, False]
        self._dropped_bytes = [0, 0]
        self._sources: dict[int, _Source] = {}
        self._tails: dict[int, bytearray] = {}
        self._all_ended = asyncio.Event()

    def start(self) -> None:
        """Starts the threads; the process must not fork after this."""
        for sink in self._sinks:
            sink.start()

    def attach(self, rank: int, *, stdout: int, stderr: int) -> None:
        """Reads these pipes of the rank from now on; takes them over."""
        for index, fd in enumerate((stdout, stderr)):
            os.set_blocking(fd, False)
            cutter = LineCutter(prefix(rank, coloured=self._colours[index]))
            source = _Source(fd, index, cutter, keep=index == 1)
            self._sources[fd] = source
            self._loop.add_reader(fd, self._readable, source)
        self._tails[rank] = self._sources[stderr].tail

    def say(self, text: str) -> None:
        """A line of the launcher's own, on stderr."""
        self._sinks[1].put(text.encode("utf-8", "replace") + b"\n")

    def tail(self, rank: int) -> bytes:
        """The last 64 KiB that the rank wrote to stderr."""
        return bytes(self._tails.get(rank, b""))

    async def finish(self, *, pipes_s: float, sinks_s: float) -> None:
        """Waits for the ends of all pipes, then for what is queued, each for a limited time.

        A process that left its rank's group may hold a pipe for ever; the first limit is for it.
        The second counts from the last byte that went out.
        """
        if self._sources:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), pipes_s)
        for source in list(self._sources.values()):
            self._end(source)
        await self.drain(sinks_s)

    async def drain(self, patience_s: float) -> None:
        """Waits until the queues are empty, or nothing has moved for `patience_s`."""
        for sink in self._sinks:
            seen, deadline = sink.written_bytes, self._loop.time() + patience_s
            while sink.queued_bytes and not sink.closed and self._loop.time() < deadline:
                await asyncio.sleep(0.005)
                if sink.written_bytes != seen:
                    seen, deadline = sink.written_bytes, self._loop.time() + patience_s

    # ---- from pipe to sink ----

    def _readable(self, source: _Source) -> None:
        try:
            data = os.read(source.fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(source)
            return
        if source.keep:
            source.tail += data
            del source.tail[:-TAIL_BYTES]
        self._put(source, source.cutter.feed(data))
        if self._terminals[source.sink_index] and source.partial_timer is None:
            source.partial_timer = self._loop.call_later(PARTIAL_S, self._show_partial, source)

    def _show_partial(self, source: _Source) -> None:
        source.partial_timer = None
        self._put(source, source.cutter.rest())

    def _end(self, source: _Source) -> None:
        if self._sources.pop(source.fd, None) is None:
            return
        if source.partial_timer is not None:
            source.partial_timer.cancel()
        self._loop.remove_reader(source.fd)
        os.close(source.fd)
        self._put(source, source.cutter.rest())
        if not self._sources:
            self._all_ended.set()

    def _put(self, source: _Source, lines: bytes) -> None:
        index = source.sink_index
        if self._dropping[index]:
            self._dropped_bytes[index] += len(lines)
            return
        self._sinks[index].put(lines)
        if self._sinks[index].queued_bytes > QUEUE_BYTES_HIGH and not self._paused[index]:
            self._pause(index)

    # ---- when the reader of our output is slow ----

    def _pause(self, index: int) -> None:
        self._paused[index] = True
        for source in self._sources.values():
            if source.sink_index == index:
                self._loop.remove_reader(source.fd)
        self._watch_stall(index)

    def _watch_stall(self, index: int) -> None:
        written = self._sinks[index].written_bytes
        self._loop.call_later(STALL_S, self._check_stall, index, written)

    def _check_stall(self, index: int, written_before: int) -> None:
        if not self._paused[index]:
            return
        if self._sinks[index].written_bytes != written_before:
            self._watch_stall(index)
            return
        self._dropping[index] = True
        self._read_again(index)

    def _resume(self, index: int) -> None:
        if not self._paused[index]:
            return
        self._paused[index] = False
        self._read_again(index)
        if self._dropping[index]:
            self._dropping[index] = False
            count, self._dropped_bytes[index] = self._dropped_bytes[index], 0
            notice = f"{count} bytes of output were dropped; nobody read them for {STALL_S:g} s"
            self._sinks[index].put(f"commute: {notice}\n".encode())

    def _read_again(self, index: int) -> None:
        for source in self._sources.values():
            if source.sink_index == index:
                self._loop.add_reader(source.fd, self._readable, source)

    def _in_loop(self, call: Callable[..., None], *args: int) -> Callable[[], None]:
        def forward() -> None:
            # The loop is closed when the launcher is already on its way out.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *args)

        return forward
