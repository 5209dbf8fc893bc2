# SPDX-License-Identifier: Apache-2.0
"""A launcher's connection to the coordinator: how the launchers of a job hear of each other.

Every launcher dials, also the one in whose process the coordinator runs. It speaks control frames
(see control) in the role of a launcher:

    launcher -> coordinator   BEAT every 5 s, which comes back
                              LEAVE code 1, rank = the rank that failed, by = -1, op = the exit
                              code, text = how it ended and the end of its traceback
    coordinator -> launcher   the same of the other launchers; LOST and LEAVE of members

A launcher that is done closes the connection. The coordinator's launcher stays until all others
have closed theirs, so for them an end of this connection means that the job was given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence

from commute._errors import AuthenticationError, JoinError
from commute.cluster.addresses import format_address
from commute.cluster.auth import HandshakeError, Introduction, Purpose, Role, check_token
from commute.cluster.control import ControlError, Decoder, Frame, Kind, Leave, encode
from commute.cluster.gate import dial

__all__ = ["NodeLink", "dial_coordinator", "failure_report", "is_launchers_report"]

_BEAT_S = 5.0
_SILENCE_S_MAX = 60.0  # a host that lost its power says no goodbye; its ranks notice much earlier
_RETRY_S = 0.25
_ATTEMPT_S = 5.0
_PROGRESS_S = 10.0


def failure_report(rank: int, code: int, text: str) -> Frame:
    """What a launcher says when one of its ranks failed."""
    return Frame(Kind.LEAVE, Leave.FAILED, rank=rank, by=-1, op=code, text=text)


def is_launchers_report(frame: Frame) -> bool:
    return frame.kind is Kind.LEAVE and frame.code == Leave.FAILED and frame.by == -1


class NodeLink:
    """The connection; `on_frame` and `on_gone` are called on the event loop."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_frame: Callable[[Frame], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._began = self._heard = self._loop.time()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [
            self._loop.create_task(task) for task in (self._read(), self._write(), self._beat())
        ]

    def report(self, frame: Frame) -> None:
        self._outgoing.put_nowait(encode(frame))

    async def close(self, *, linger_s: float) -> None:
        """Sends what was reported, for a second at most, and closes.

        The connection is open for `linger_s` at least, counted from its beginning.
        """
        await asyncio.sleep(max(0.0, self._began + linger_s - self._loop.time()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._outgoing.join(), 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connection.close()

    async def _read(self) -> None:
        decoder = Decoder()
        try:
            while received := await self._loop.sock_recv(self._connection, 1 << 16):
                self._heard = self._loop.time()
                for frame in decoder.feed(received):
                    if frame.kind is not Kind.BEAT:
                        self._on_frame(frame)
            self._on_gone("the coordinator's launcher closed the connection")
        except (OSError, ControlError) as error:
            self._on_gone(f"the connection to the coordinator broke: {error}")

    async def _write(self) -> None:
        while True:
            data = await self._outgoing.get()
            # A broken connection is noticed, and told, by the reader.
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self._connection, data)
            self._outgoing.task_done()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self.report(Frame(Kind.BEAT))
            silent = self._loop.time() - self._heard
            if silent > _SILENCE_S_MAX:
                self._on_gone(f"the coordinator was silent for {silent:.0f} s")
                return


async def dial_coordinator(
    hosts: Sequence[str],
    port: int,
    *,
    token: str,
    run: str,
    node: int,
    patience_s: float,
    say: Callable[[str], None],
) -> tuple[socket.socket, str]:
    """A connection to the coordinator, which may not have started yet, and which host it was.

    Raises:
        JoinError: it did not answer in time.
        AuthenticationError: it answers, and holds another token or run.
    """
    loop = asyncio.get_running_loop()
    introduction = Introduction(Role.LAUNCHER, Purpose.CONTROL, node, -1, 0, run)
    address = format_address(hosts[0], port)
    began = loop.time()
    next_line = began + _PROGRESS_S
    for host in itertools.cycle(hosts):
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                return await dial(host, port, check_token(token), introduction), host
        except HandshakeError as error:
            if error.impostor or error.rejected:
                raise AuthenticationError(
                    f"the coordinator at {address} refused this node ({error}); give all nodes the "
                    "same token (COMMUTE_TOKEN or --token-file) and the same --rdzv-id"
                ) from None
            last = str(error)
        except OSError as error:
            last = str(error) or "no answer"
        waited = loop.time() - began
        if waited > patience_s:
            raise JoinError(
                f"no coordinator at {address} within {waited:.0f} s ({last}); start node 0 there, "
                "and check that this host may connect to that port"
            )
        if loop.time() > next_line:
            next_line += _PROGRESS_S
            left = patience_s - waited
            say(f"commute: waiting for node 0 at {address} ({last}); {left:.0f} s left")
        await asyncio.sleep(_RETRY_S)
    raise AssertionError("unreachable")
