# SPDX-License-Identifier: Apache-2.0
"""Processes forked from this one, which has imported all they need: a new Python takes a quarter
of a second until it has.

    fork         at once; this process has no thread yet
    Understudy   forked now and told later what to do, when this process may have threads. It waits
                 for one line on a pipe, and ends quietly when the pipe ends without one: whoever
                 would have told it is gone, or needs it no more.

A forked process is as a new one would be: signal handlers and standard streams of its own, no open
file of its parent but those it is to keep, an exit status and a traceback as Python gives them. It
never returns into its parent's code, and runs none of its parent's exit functions.

What it has taken over it never frees: a file that a parent's object would close is closed already,
and its number may be somebody else's by then. So the parent's garbage is frozen; which also leaves
the pages that both share as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Forked", "Understudy", "fork", "has_threads", "heed", "importing", "name_process"]

_PR_SET_NAME = 15  # linux/prctl.h
_STANDARD = 3  # descriptors


def has_threads() -> bool:
    """Whether this process has more than one thread, of Python or of a library."""
    return len(os.listdir("/proc/self/task")) > 1


def name_process(name: str) -> None:
    """What `ps` and `top` show; a forked process has its parent's command line."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For a block of imports in a process that is ours alone: what they make stays, so that
    looking for garbage in it, which takes a third of their time, is in vain now and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Forked:
    """A forked process; what it offers is as in subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # -n for signal n

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        status = self._wait(0)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        # Until it is waited for, its number is nobody else's.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork(
    part: Callable[[], int],
    *,
    first: Callable[[], None] = lambda: None,
    stdout: int | None = None,
    stderr: int | None = None,
    keep: Sequence[int] = (),
    held_back: Sequence[int] = (),
) -> Forked:
    """A process that runs `part` and exits with what it returns.

    Args:
        first: called in it before anything else, while it still has its parent's open files.
        stdout, stderr: descriptors; by default its parent's. Standard input is /dev/null.
        keep: other descriptors that stay open in it.
        held_back: signals that it does not get until it asks for them (`heed`).
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is in their buffers would be written twice
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:  # here, or there is no child
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return Forked(pid)
    # Whatever happens in here, this copy of the parent must not go on as the parent.
    status = 1
    try:
        gc.freeze()
        signal.set_wakeup_fd(-1)
        first()
        _own_streams(stdout, stderr, keep)
        _own_signals(held_back)
        status = _status(part)
    finally:
        os._exit(status)


def _own_streams(stdout: int | None, stderr: int | None, keep: Sequence[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for given, place in ((nothing, 0), (stdout, 1), (stderr, 2)):
        if given is not None:
            os.dup2(given, place)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd >= _STANDARD and fd not in keep:
            with contextlib.suppress(OSError):  # the one with which the list was read
                os.close(fd)
    # Each line is written at once: a process that is killed must not take its last words with it.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def _own_signals(held_back: Sequence[int]) -> None:
    """As Python has them when it starts."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _status(part: Callable[[], int]) -> int:
    try:
        return part()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def heed(number: int, handler: Callable[..., object] | signal.Handlers) -> None:
    """From now on the signal is not held back; `handler` gets one that has come already."""
    signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


class Understudy(Forked):
    """A forked process that waits for its word; `part` is called with it.

    Ctrl-C (SIGINT) is held back: whoever still waits ends with the pipe, and for others it is the
    part that knows what to do with it, and must `heed` it.

    Args:
        part: what it is to do.
        prepare: what it does meanwhile, such as imports.
    """

    def __init__(
        self, part: Callable[[str], int], *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        read_end, self._write_end = os.pipe()

        def wait_for_word() -> int:
            prepare()
            with open(read_end, encoding="utf-8") as pipe:
                word = pipe.readline()
            return part(word[:-1]) if word.endswith("\n") else 0

        try:
            super().__init__(fork(wait_for_word, keep=(read_end,), held_back=(signal.SIGINT,)).pid)
        finally:
            os.close(read_end)

    def tell(self, word: str) -> None:
        """One line, once. Whether it still lives to hear it, `poll` tells."""
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._write_end, f"{word}\n".encode())
        self.dismiss()

    def dismiss(self) -> None:
        """Without a word it ends."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
