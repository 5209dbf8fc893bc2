# SPDX-License-Identifier: Apache-2.0
"""`commute run`: starts the ranks of this node, carries their output, and ends them all.

One launcher runs on each node. The one of node 0 has the coordinator in its process; all of them
connect to it (see nodes), so that a failure on one node ends the ranks of every node.

States, and what leads to the next:

    starting   the coordinator is started, or awaited on other nodes
    running    all ranks of this node have been started
    ending     a rank failed, a signal came, or our reader or the coordinator is gone: the steps of
               a ladder are taken one after the other until no rank runs (_FAILED and so on below)
    over       no rank of this node runs; node 0 waits for the other launchers if all went well

Invariants:
    1. Only the first reason to end counts; a signal during `ending` kills at once.
    2. A rank that ends with 0 is done, and no reason to end the others.
    3. How a rank ended counts as its own doing only until we have signalled it.
    4. The exit code is the first failure's own, or 128 + the signal that came to us.
    5. Nothing is printed after the report of the first failure.

One thread runs the event loop; it is the only one until all ranks are started (see children), and
then two more write what the ranks print (see output).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Final

from commute._errors import JoinError
from commute.cluster.addresses import format_address, interface_address, is_loopback
from commute.cluster.auth import mint_token
from commute.cluster.children import Child, Guardian, describe_exit, spawn
from commute.cluster.control import Frame
from commute.cluster.failures import Failures
from commute.cluster.nodes import (
    NodeLink,
    dial_coordinator,
    failure_report,
    is_launchers_report,
)
from commute.cluster.output import Output
from commute.cluster.serve import CoordinatorServer

__all__ = ["Job", "launch", "rank_environment"]

# A ladder: which signal (0 for none), then how many seconds to wait for the ranks to end.
_Ladder = tuple[tuple[int, float], ...]
# The others notice by themselves that a rank is gone, and get a second to say so and tidy up.
_FAILED: Final[_Ladder] = ((0, 1.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0))
_INTERRUPTED: Final[_Ladder] = ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0))  # after SIGINT
_TERMINATED: Final[_Ladder] = ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0))
_KILLED: Final[_Ladder] = ((signal.SIGKILL, 5.0),)

_PIPES_S: Final = 1.0
_SINKS_S: Final = 5.0
_LAST_WORDS_S: Final = 0.2
_NODES_POLL_S: Final = 0.1
_REPORT_BYTES_MAX: Final = 1500  # of a traceback in a control frame, whose text has 2048


@dataclass(frozen=True)
class Job:
    """What one launcher is to start: `ranks` processes of `command`, on node `node` of `nodes`."""

    command: tuple[str, ...] | Callable[[], int]  # a program, or a function to be run in forks
    ranks: int
    nodes: int = 1
    node: int = 0
    endpoint: tuple[str, int] | None = None  # where the coordinator listens; None: any free port
    token: str | None = None
    run: str | None = None
    interface: str | None = None
    start_timeout_s: float = 300.0
    keep_going: bool = False  # when a rank fails, the others go on
    interrupt_s: float = 3.0  # after Ctrl-C the ranks have so long to end by themselves

    @property
    def size(self) -> int:
        return self.ranks * self.nodes

    @property
    def what(self) -> str:
        return "a process" if callable(self.command) else self.command[0]


def launch(job: Job, env: Mapping[str, str]) -> int:
    """Runs the job's part on this node to its end, and returns the exit code."""
    guardian = Guardian()
    try:
        return asyncio.run(_run(job, env, guardian))
    finally:
        guardian.close()


async def _run(job: Job, env: Mapping[str, str], guardian: Guardian) -> int:
    return await _Launcher(job, env, guardian).run()


def rank_environment(
    env: Mapping[str, str], job: Job, *, local_rank: int, coordinator: str, token: str, run: str
) -> dict[str, str]:
    """The environment of one rank: the launcher's own, and the place of the rank."""
    added = {
        "COMMUTE_RANK": str(job.node * job.ranks + local_rank),
        "COMMUTE_SIZE": str(job.size),
        "COMMUTE_LOCAL_RANK": str(local_rank),
        "COMMUTE_LOCAL_SIZE": str(job.ranks),
        "COMMUTE_COORDINATOR": coordinator,
        "COMMUTE_TOKEN": token,
        "COMMUTE_RUN": run,
        # A rank that is killed must not take its last words with it.
        "PYTHONUNBUFFERED": "1",
    }
    if job.interface is not None:
        added["COMMUTE_BIND"] = interface_address(job.interface)
    return {**env, **added}


class _Launcher:
    def __init__(self, job: Job, env: Mapping[str, str], guardian: Guardian) -> None:
        self._job = job
        self._env = env
        self._guardian = guardian
        self._token = job.token or mint_token()
        self._run_id = job.run or secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._output = Output(self._loop, env, on_closed=self._reader_gone)
        self._failures = Failures(socket.gethostname())
        self._server: CoordinatorServer | None = None
        self._link: NodeLink | None = None
        self._children: list[Child] = []
        self._stop_code: int | None = None  # when we end for a reason that is no rank's failure
        self._ending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._main: asyncio.Task[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._nodes_seen = 0

    async def run(self) -> int:
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        try:
            self._start_ranks(await self._meet())
            self._output.start()
            await self._over.wait()
            await self._output.finish(pipes_s=_PIPES_S, sinks_s=_SINKS_S)
            await self._wait_for_nodes()
            return await self._report()
        except asyncio.CancelledError:
            if self._stop_code is None:
                raise
            return self._stop_code
        finally:
            await self._close()

    # ---- starting ----

    async def _meet(self) -> str:
        """Starts the coordinator or waits for it; returns its address."""
        job = self._job
        host, port = job.endpoint or ("127.0.0.1", 0)
        if job.node == 0:
            if job.endpoint is None and job.interface is not None:
                host = interface_address(job.interface)
            host, port = await self._serve(host, port)
        # Resolved here and now, not by the event loop, which would start a thread for it.
        connection, host = await dial_coordinator(
            _resolve(host),
            port,
            token=self._token,
            run=self._run_id,
            node=job.node,
            patience_s=job.start_timeout_s,
            say=self._output.say,
        )
        self._link = NodeLink(connection, on_frame=self._told, on_gone=self._link_gone)
        return format_address(host, port)

    async def _serve(self, host: str, port: int) -> tuple[str, int]:
        self._server = CoordinatorServer(
            self._token,
            self._run_id,
            on_notice=lambda text: self._output.say(f"commute: {text}"),
        )
        bound, bound_port = await self._server.start(host, port)
        if self._job.nodes > 1:
            if is_loopback(bound) and not is_loopback(host):
                raise JoinError(
                    f"{host} is {bound} on this host, where no other node can reach it; give the "
                    "address of this host in --rdzv-endpoint"
                )
            self._track(self._count_nodes())
        return bound, bound_port

    def _start_ranks(self, coordinator: str) -> None:
        job = self._job
        for local_rank in range(job.ranks):
            env = rank_environment(
                self._env,
                job,
                local_rank=local_rank,
                coordinator=coordinator,
                token=self._token,
                run=self._run_id,
            )
            rank = job.node * job.ranks + local_rank
            try:
                child = spawn(rank, job.command, env, self._guardian)
            except OSError as error:
                raise JoinError(f"cannot start {job.what}: {error.strerror or error}") from None
            self._children.append(child)
            stdout, stderr = child.pipes
            self._output.attach(rank, stdout=stdout, stderr=stderr)
            self._loop.add_reader(child.pidfd, self._ended, child)

    # ---- what happens while the ranks run ----

    def _ended(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        status = child.reap()
        if status != 0 and not child.signalled:
            self._failures.add_own(child.rank, child.pid, status)
            self._track(self._report_to_nodes(child))
            left = sum(other.running for other in self._children)
            if self._ending is None and left:
                how = describe_exit(status, child.pid)
                then = "the others go on" if self._job.keep_going else "ending the others"
                self._output.say(f"commute: rank {child.rank} failed ({how}); {then}")
            if not self._job.keep_going:
                self._begin(_FAILED)
        if not any(other.running for other in self._children):
            self._over.set()

    async def _report_to_nodes(self, child: Child) -> None:
        # Its last words may still be in the pipe.
        await asyncio.sleep(_LAST_WORDS_S)
        failure = self._failures.own(child.rank, self._output.tail(child.rank))
        if self._link is not None and failure is not None:
            details = failure.details[-_REPORT_BYTES_MAX:].decode("utf-8", "replace")
            text = f"{failure.how}\n{details}"
            self._link.report(failure_report(child.rank, failure.code, text))

    def _told(self, frame: Frame) -> None:
        """The coordinator, or through it another launcher, says that a rank failed."""
        self._failures.add_told(frame)
        if is_launchers_report(frame) and not self._job.keep_going:
            if self._ending is None and not self._over.is_set():
                how = frame.text.partition("\n")[0]
                self._output.say(f"commute: rank {frame.rank} failed ({how}); ending this node")
            self._begin(_FAILED)

    def _link_gone(self, why: str) -> None:
        if self._job.node == 0 or self._ending is not None or self._over.is_set():
            return
        self._stop_code = 1
        self._output.say(f"commute: {why}; ending this node")
        self._begin(_FAILED)

    def _signalled(self, number: int) -> None:
        if self._ending is not None and not self._over.is_set():
            self._ending.cancel()
            self._ending = self._loop.create_task(self._descend(_KILLED))
            return
        if self._ending is None:
            self._stop_code = 128 + number
        if not self._children or self._over.is_set():
            assert self._main is not None
            self._main.cancel()
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._output.say(f"commute: {name}; ending all ranks (once more kills them)")
        self._tell_nodes_we_stop(f"its launcher was ended by {name}")
        interrupted = ((signal.SIGINT, self._job.interrupt_s), *_INTERRUPTED)
        self._begin(interrupted if number == signal.SIGINT else _TERMINATED)

    def _suspend(self) -> None:
        """Ctrl-Z: without the coordinator the ranks would take each other for lost."""
        running = [child for child in self._children if child.running]
        for child in running:
            child.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)
        # From here on somebody has continued us, by `fg` or `bg`.
        for child in running:
            child.resume()

    def _reader_gone(self) -> None:
        """Whoever read our stdout has closed it, as `head` does."""
        if self._ending is None and not self._over.is_set():
            self._stop_code = 128 + signal.SIGPIPE
            self._tell_nodes_we_stop("nobody reads its launcher's output any more")
            self._begin(_TERMINATED)

    def _tell_nodes_we_stop(self, why: str) -> None:
        if self._link is not None and self._stop_code is not None:
            rank = self._job.node * self._job.ranks
            how = f"{why}, on host {socket.gethostname()}"
            self._link.report(failure_report(rank, self._stop_code, how))

    # ---- ending ----

    def _begin(self, ladder: _Ladder) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._descend(ladder))

    async def _descend(self, ladder: _Ladder) -> None:
        for number, patience_s in ladder:
            if number:
                for child in self._children:
                    child.signal(number)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), patience_s)
                return
        # A process in an uninterruptible system call; the kernel ends it once it is out of it.
        stuck = ", ".join(str(child.pid) for child in self._children if child.running)
        self._output.say(
            f"commute: SIGKILL has not ended pid {stuck} yet; leaving it to the kernel"
        )
        self._over.set()

    async def _count_nodes(self) -> None:
        assert self._server is not None
        while True:
            self._nodes_seen = max(self._nodes_seen, self._server.launchers - 1)
            await asyncio.sleep(_NODES_POLL_S)

    async def _wait_for_nodes(self) -> None:
        """Keeps the coordinator up until the other nodes are done, unless the job has failed."""
        if self._server is None or self._job.nodes == 1:
            return
        deadline = self._loop.time() + self._job.start_timeout_s
        while self._ending is None:
            missing = self._job.nodes - 1 - self._nodes_seen
            if missing == 0 and self._server.launchers <= 1:
                return
            if missing > 0 and self._loop.time() > deadline:
                self._output.say(f"commute: {missing} of {self._job.nodes} nodes never came")
                self._stop_code = 1
                return
            await asyncio.sleep(_NODES_POLL_S)

    async def _report(self) -> int:
        """Prints the first failure, as the last thing we print; returns the exit code."""
        if self._stop_code is not None:
            return self._stop_code
        failure = self._failures.first(self._output.tail)
        if failure is None:
            return 0
        self._output.say(failure.text())
        await self._output.drain(_SINKS_S)
        return failure.code

    async def _close(self) -> None:
        for child in self._children:
            child.signal(signal.SIGKILL)
        if self._ending is not None:
            self._ending.cancel()
        if self._link is not None:
            # Node 0 looks for the others ten times a second, and must see each of them once.
            await self._link.close(linger_s=0.0 if self._server is not None else 5 * _NODES_POLL_S)
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close()
        await self._output.drain(_SINKS_S)

    def _track(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    except OSError as error:
        raise JoinError(f"cannot find the host {host}: {error.strerror or error}") from None
