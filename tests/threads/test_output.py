# SPDX-License-Identifier: Apache-2.0
"""Output to somebody who reads slowly, stops reading, or goes away: no rank waits for ever."""

from __future__ import annotations

import asyncio
import fcntl
import os

import pytest

from commute.cluster import output
from commute.cluster.output import Output


@pytest.fixture
def pipes(monkeypatch):
    """A rank's two pipes, and those of the launcher; small limits, so that they are reached."""
    monkeypatch.setattr(output, "QUEUE_BYTES_HIGH", 1 << 16)
    monkeypatch.setattr(output, "QUEUE_BYTES_LOW", 1 << 14)
    monkeypatch.setattr(output, "STALL_S", 0.2)
    made = [os.pipe() for _ in range(4)]
    for read_end, write_end in made:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 1 << 12)
        os.set_blocking(read_end, False)
    yield made
    for fd in {fd for pair in made for fd in pair}:
        try:
            os.close(fd)
        except OSError:
            pass


async def write_all(fd: int, data: bytes, seconds: float = 10.0) -> None:
    """As a rank would, but without holding up this thread."""
    os.set_blocking(fd, False)
    async with asyncio.timeout(seconds):
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)


async def read_until(fd: int, end: bytes, seconds: float = 10.0) -> bytes:
    shown = b""
    async with asyncio.timeout(seconds):
        while end not in shown:
            try:
                shown += os.read(fd, 1 << 16)
            except BlockingIOError:
                await asyncio.sleep(0.002)
    return shown


LINES = b"".join(b"line %06d\n" % i for i in range(40_000))
SHOWN = b"".join(b"[0] line %06d\n" % i for i in range(40_000))


def test_a_slow_reader_gets_everything(pipes):
    (out_r, out_w), (err_r, err_w), (shown_r, shown_w), (_, told_w) = pipes

    async def go() -> bytes:
        carried = Output(
            asyncio.get_running_loop(), {}, on_closed=lambda: None, fds=(shown_w, told_w)
        )
        carried.attach(0, stdout=out_r, stderr=err_r)
        carried.start()
        writing = asyncio.create_task(write_all(out_w, LINES))
        shown = await read_until(shown_r, b"line 039999\n")
        await writing
        os.close(out_w)
        os.close(err_w)
        await carried.finish(pipes_s=5.0, sinks_s=5.0)
        return shown

    assert asyncio.run(go()) == SHOWN


def test_nobody_reads(pipes):
    """The rank gets rid of its output all the same; later the reader learns what it has missed."""
    (out_r, out_w), (err_r, err_w), (shown_r, shown_w), (_, told_w) = pipes

    async def go() -> bytes:
        carried = Output(
            asyncio.get_running_loop(), {}, on_closed=lambda: None, fds=(shown_w, told_w)
        )
        carried.attach(0, stdout=out_r, stderr=err_r)
        carried.start()
        await write_all(out_w, LINES)
        shown = await read_until(shown_r, b"nobody read them for 0.2 s\n")
        os.close(out_w)
        os.close(err_w)
        await carried.finish(pipes_s=5.0, sinks_s=5.0)
        return shown

    shown = asyncio.run(go())
    before, _, after = shown.partition(b"commute: ")

    assert SHOWN.startswith(before)
    assert set(after.splitlines()[1:]) <= set(SHOWN.splitlines())


def test_the_reader_goes_away(pipes):
    """The launcher is told once, and the rank can still write."""
    (out_r, out_w), (err_r, err_w), (shown_r, shown_w), (_, told_w) = pipes
    told: list[bool] = []

    async def go() -> None:
        carried = Output(
            asyncio.get_running_loop(),
            {},
            on_closed=lambda: told.append(True),
            fds=(shown_w, told_w),
        )
        carried.attach(0, stdout=out_r, stderr=err_r)
        carried.start()
        os.close(shown_r)
        await write_all(out_w, LINES)
        os.close(out_w)
        os.close(err_w)
        await carried.finish(pipes_s=5.0, sinks_s=5.0)

    asyncio.run(go())

    assert told == [True]


def test_a_pipe_that_stays_open_holds_nobody_up(pipes):
    """A daemon may keep a rank's pipe for ever; what was printed is shown, also without an end."""
    (out_r, out_w), (err_r, err_w), (shown_r, shown_w), (_, told_w) = pipes

    async def go() -> tuple[bytes, bytes]:
        carried = Output(
            asyncio.get_running_loop(), {}, on_closed=lambda: None, fds=(shown_w, told_w)
        )
        carried.attach(0, stdout=out_r, stderr=err_r)
        carried.start()
        os.write(out_w, b"no end")
        os.write(err_w, b"x" * 100)
        await carried.finish(pipes_s=0.1, sinks_s=5.0)
        return await read_until(shown_r, b"\n"), carried.tail(0)

    assert asyncio.run(go()) == (b"[0] no end\n", b"x" * 100)
