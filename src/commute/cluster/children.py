# SPDX-License-Identifier: Apache-2.0
"""Processes of a launcher that never outlive it, however it ends.

Each rank leads a process group of its own, so that what it starts can be ended with it. Three
things end a group, whichever comes first:

    1. the launcher itself, by signal (`Child.signal`), or when the rank has ended: what is left of
       its group is killed while the rank is a zombie, so the number of the group cannot have been
       given to anybody else yet;
    2. the kernel: a rank gets SIGKILL when its launcher dies (PR_SET_PDEATHSIG);
    3. the guardian, a process that reads a pipe from the launcher. When the launcher is gone, even
       by SIGKILL, the pipe ends, and the guardian kills the groups that are still in its list:
       2 does not reach the processes that a rank has started.

The pipe to the guardian carries lines, "+group" and "-group". A rank writes its own "+group"
between fork and exec, so that there is no moment in which it is unknown. A rank that runs a
function of ours is forked and goes on (see forked); all else holds for it too.

Only what starts a session of its own on purpose (a daemon) escapes all three.

Fork safety: `Guardian` and `spawn` fork, so they are used before the launcher starts any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from commute.cluster.forked import Forked, fork

__all__ = ["Child", "Guardian", "describe_exit", "exit_code", "spawn"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guardian:
    """Kills the process groups of the ranks once this process is gone."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            # Whatever happens in here, this copy of the launcher must not go on as a launcher.
            try:
                os.close(self._write_end)
                _guard(read_end)
            finally:
                os._exit(0)
        os.close(read_end)

    @property
    def fd(self) -> int:
        return self._write_end

    def forget(self, group: int) -> None:
        self._tell(b"-%d\n" % group)

    def close(self) -> None:
        """Ends the guardian; groups that were not forgotten are killed."""
        os.close(self._write_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _tell(self, line: bytes) -> None:
        # Without a guardian the other two ways of ending a group remain.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_end, line)


def _guard(read_end: int) -> None:
    os.setsid()  # out of reach of the terminal's signals
    for number in (*_HANDLED, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # Holding the launcher's output open would keep `| head` and the like waiting.
    os.dup2(read_end, 0)
    for fd in [int(name) for name in os.listdir("/proc/self/fd") if name != "0"]:
        with contextlib.suppress(OSError):
            os.close(fd)
    groups: set[int] = set()
    held = b""
    while data := os.read(0, 4096):
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


class Child:
    """One rank's process, started by `spawn`."""

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen[bytes] | Forked,
        pipes: tuple[int, int],
        guardian: Guardian,
    ) -> None:
        self.rank = rank
        self.pipes = pipes  # the read ends of its stdout and stderr; the caller closes them
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)  # readable once the process has ended
        self.status: int | None = None  # as in subprocess: -n for signal n
        self.signalled = False  # we asked it to end, so how it ended is not its own doing
        self._process = process
        self._guardian = guardian

    @property
    def running(self) -> bool:
        return self.status is None

    def signal(self, number: int) -> None:
        """Sends the signal to the rank and all it has started."""
        if not self.running:
            return
        self.signalled = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            if number != signal.SIGKILL:
                os.killpg(self.pid, signal.SIGCONT)  # a stopped process cannot obey

    def suspend(self) -> None:
        """Stops the rank and all it has started, as Ctrl-Z does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def reap(self) -> int:
        """Takes the exit status of a rank that has ended, and kills what it left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.status = self._process.wait()
        os.close(self.pidfd)
        self._guardian.forget(self.pid)
        return self.status


def spawn(
    rank: int,
    command: Sequence[str] | Callable[[], int],
    env: Mapping[str, str],
    guardian: Guardian,
) -> Child:
    """Starts one rank: a program, or a function of ours in a fork.

    Raises OSError when the command cannot be run.
    """
    launcher = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def introduce() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        os.write(guardian.fd, b"+%d\n" % os.getpid())
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    with _held_back(), contextlib.ExitStack() as theirs:
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        for fd in (its_out, its_err):
            theirs.callback(os.close, fd)
        try:
            process = (
                _fork(command, env, introduce, its_out, its_err)
                if callable(command)
                else _execute(command, env, introduce, its_out, its_err)
            )
        except BaseException:
            os.close(out)
            os.close(err)
            raise
    return Child(rank, process, (out, err), guardian)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A child has the launcher's signal handlers at first, which write into the launcher's event
    loop: until it has its own, no signal may come."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _execute(
    command: Sequence[str],
    env: Mapping[str, str],
    introduce: Callable[[], None],
    stdout: int,
    stderr: int,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
        preexec_fn=introduce,
    )


def _fork(
    part: Callable[[], int],
    env: Mapping[str, str],
    introduce: Callable[[], None],
    stdout: int,
    stderr: int,
) -> Forked:
    def first() -> None:
        os.setpgid(0, 0)
        introduce()
        os.environ.clear()
        os.environ.update(env)

    process = fork(part, first=first, stdout=stdout, stderr=stderr)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(process.pid, process.pid)  # whoever is first: from here on it can be signalled
    return process


# ---- how a process ended, in words ----


def exit_code(status: int) -> int:
    """What a shell would report: the code itself, or 128 + the signal."""
    return status if status >= 0 else 128 - status


def describe_exit(status: int, pid: int) -> str:
    """`exit code 1`, or the signal by name with what it usually means."""
    if status >= 0:
        return f"exit code {status}"
    number = -status
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number != signal.SIGKILL:
        return f"killed by {name}"
    killed = _killed_for_memory(pid)
    if killed is None:
        return f"killed by {name}; perhaps the out-of-memory killer, `dmesg` tells"
    return (
        f"killed by {name}, by the kernel's out-of-memory killer" if killed else f"killed by {name}"
    )


def _killed_for_memory(pid: int) -> bool | None:
    """Whether the kernel log says so; None when it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    pattern = re.compile(rb"Killed process %d\b" % pid)
    try:
        # One record per read; the log is a ring, so the number of records has a natural end.
        for _ in range(1 << 16):
            try:
                if pattern.search(os.read(fd, 8192)):
                    return True
            except BrokenPipeError:
                continue  # this record was overwritten while we were reading
            except OSError:
                return False
        return False
    finally:
        os.close(fd)
