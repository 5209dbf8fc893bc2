# SPDX-License-Identifier: Apache-2.0
"""The driver's side of a benchmark: start a library's ranks once, then give them turns.

A job is idle (every rank blocked in recv), taking a turn, or closed. Only one job has a turn at a
time. A job that dies, answers wrongly or exceeds its deadline ends the benchmark with the tail of
its output; there is no going on without a peer. The grammar of what is said is in workers/turns.py.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.failure import BenchError
from benchmarks.setup_peers import ROOT

WORKERS = ROOT / "benchmarks" / "workers"
START_SECONDS_MAX = 90.0
# A turn takes under 10 s on the reference host; this bounds a hang, it does not judge.
TURN_SECONDS_MAX = 300.0
LEAVE_SECONDS_MAX = 10.0


@dataclass(frozen=True)
class Turn:
    bytes: int
    batch: int
    samples: int
    variant: str
    call: str = "allreduce"


@dataclass(frozen=True)
class Program:
    """One process to start; a job may need several (one per rank, or one per host)."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def worker(file: str) -> str:
    return str(WORKERS / file)


def scratch_folder() -> Path:
    """A new folder with a short path: the path of a Unix socket has to fit 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="cmb-", dir="/tmp"))


class Job:
    """The ranks of one library; a context manager that leaves no process behind."""

    def __init__(
        self,
        name: str,
        *,
        ranks: int,
        programs: Sequence[Program],
        scratch: Path,
        polls: bool = False,
    ) -> None:
        """`polls`: the library burns cores while it waits, and is stopped between its turns."""
        self.name, self.ranks = name, ranks
        self._polls = polls
        self.version = ""
        self.pids: list[int] = []
        self._scratch = scratch
        self._programs = programs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._streams: list[Any] = []

    @staticmethod
    def socket_in(scratch: Path) -> str:
        return str(scratch / "turns.sock")

    def __enter__(self) -> Self:
        try:
            self._start()
            self._signal_if_polling(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def take(self, turn: Turn) -> list[float]:
        """Seconds per call of each sample; of the ranks' times the longest counts."""
        message = json.dumps(vars(turn)).encode() + b"\n"
        self._signal_if_polling(signal.SIGCONT)
        try:
            for connection in self._connections:
                connection.sendall(message)
            answers = [self._hear(stream) for stream in self._streams]
        except (OSError, ValueError) as error:
            what = f"{turn.call} of {turn.bytes} bytes, {turn.variant}"
            raise self._failure(f"{what}: {error}") from error
        self._signal_if_polling(signal.SIGSTOP)
        return [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]

    def _signal_if_polling(self, number: int) -> None:
        for process in self._processes if self._polls else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def close(self) -> None:
        self._signal_if_polling(signal.SIGCONT)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"leave": true}\n')
        deadline = time.monotonic() + (LEAVE_SECONDS_MAX if self._connections else 0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for stream in (*self._streams, *self._connections):
            stream.close()  # ranks that are still there see the end of the file and exit
        for process in self._processes:
            _end(process)
        self._processes, self._connections, self._streams = [], [], []
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.socket_in(self._scratch))
            listener.listen(self.ranks)
            listener.settimeout(0.2)
            try:
                for index, program in enumerate(self._programs):
                    self._processes.append(self._spawn(index, program))
            except OSError as error:
                raise self._failure(f"could not be started: {error}") from error
            self._accept_all(listener)

    def _spawn(self, index: int, program: Program) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **program.env}
        with (self._scratch / f"output-{index}").open("wb") as output:
            return subprocess.Popen(
                program.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches the driver alone, which then ends the jobs.
                start_new_session=True,
            )

    def _accept_all(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        hellos: list[dict[str, Any]] = []
        while len(hellos) < self.ranks:
            if any(process.poll() is not None for process in self._processes):
                raise self._failure("ended while starting")
            if time.monotonic() > deadline:
                raise self._failure(
                    f"{len(hellos)} of {self.ranks} ranks came in {START_SECONDS_MAX:.0f} s"
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(TURN_SECONDS_MAX)
                self._connections.append(connection)
                self._streams.append(connection.makefile("rb"))
                hellos.append(self._hear(self._streams[-1]))
        if {hello["size"] for hello in hellos} != {self.ranks}:
            sizes = sorted(hello["size"] for hello in hellos)
            raise self._failure(f"expected groups of {self.ranks}, got {sizes}")
        self.version = hellos[0]["version"]
        self.pids = [hello["pid"] for hello in hellos]

    def _hear(self, stream: Any) -> dict[str, Any]:
        line = stream.readline()
        if not line:
            raise ValueError("a rank has gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> BenchError:
        time.sleep(0.3)  # lets the traceback of a rank that has just died reach its file
        outputs = sorted(self._scratch.glob("output-*"))
        tail = "\n".join(
            "\n".join(o.read_text(errors="replace").splitlines()[-12:]) for o in outputs
        )
        return BenchError(f"{self.name} with {self.ranks} ranks: {what}; its output ends:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its group; asked first, so that an mpiexec can end its own ranks."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
