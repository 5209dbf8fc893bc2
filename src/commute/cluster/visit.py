# SPDX-License-Identifier: Apache-2.0
"""A client of `commute serve`: being let in, opening channels, asking for the status.

    visit = Visit("hosta:7077", token)      a thread with an event loop, no connection yet
    admitted = visit.enter(30.0)            this process is an observer now, by a number
    visit.take_control()                    a descriptor that carries control frames
    visit.open_channel(shard, ...)          as often as the caller likes: channels break

The other end is reception.py, which knows the bytes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import platform
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final

from commute._errors import AuthenticationError, JoinError
from commute._version import __version__
from commute.cluster.addresses import format_address, parse_address
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    check_token,
    read_exactly,
)
from commute.cluster.channels import Channels, Connected
from commute.cluster.control import (
    LENGTH_BYTES,
    REPLY_BYTES_MAX,
    Admitted,
    ControlError,
    Member,
    Observe,
    Refused,
    decode_admission,
    decode_length,
    encode_message,
)
from commute.cluster.gate import HANDSHAKE_SECONDS, describe_failure, dial
from commute.cluster.loop import LoopThread
from commute.cluster.neighbours import dial_name, name_of
from commute.cluster.observers import SERVER
from commute.cluster.reception import RUN

__all__ = ["Visit", "ask_status"]

RETRY_SECONDS_MAX: Final = 0.5
NOTICE_SECONDS: Final = (3.0, 10.0)  # the first, and between others
# One rejection could be a server that was just closing; a wrong token is rejected again.
REJECTIONS_MAX: Final = 2

_log = logging.getLogger("commute")


class Visit:
    """One client of one server."""

    def __init__(self, address: str, token: str) -> None:
        self.host, self.port = _parsed(address)
        self.address = format_address(self.host, self.port)
        self._control: socket.socket | None = None
        self._key = check_token(token)
        self._admitted: Admitted | None = None
        self._channels = Channels(self._introduction, self._routes)
        self._thread = LoopThread(
            "commute-visit", _nothing, ended="the connection is closed; make a new one"
        )

    def enter(self, seconds: float) -> Admitted:
        """Become an observer; waits at most so long for the server to come up.

        Raises:
            JoinError: nobody answered in time, or the server refused.
            AuthenticationError: the server does not hold this token, or is none of ours.
        """
        return self._thread.run(self._enter(time.monotonic() + seconds))

    def open_channel(
        self, shard: int, seconds: float, make_segment: Callable[[], int] | None
    ) -> Connected:
        """A channel to a shard: through shared memory where that works, else TCP."""
        assert self._admitted is not None
        server = Member(SERVER, self._admitted.host, self._admitted.pid, ((self.host, self.port),))
        deadline = time.monotonic() + seconds
        return self._thread.run(self._channels.open(server, shard, deadline, make_segment))

    @property
    def admitted(self) -> Admitted:
        """What the server said; after `enter`."""
        assert self._admitted is not None
        return self._admitted

    def take_control(self) -> int:
        """The connection on which beats are sent from now on; the caller's."""
        assert self._control is not None
        return self._control.detach()

    def close(self) -> None:
        """End the thread; descriptors that were handed out are not touched. Idempotent."""
        self._thread.close()
        if self._control is not None:
            self._control.close()

    async def _enter(self, deadline: float) -> Admitted:
        introduction = Introduction(Role.OBSERVER, Purpose.JOIN, -1, SERVER, 0, RUN)
        connection = await _reach(self.host, self.port, self._key, introduction, deadline)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                observe = Observe(
                    socket.gethostname() or "localhost",
                    os.getpid(),
                    __version__,
                    platform.python_version(),
                )
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(connection, encode_message(observe))
                answer = decode_admission(await _read_message(connection))
        except (OSError, HandshakeError, ControlError) as error:
            connection.close()
            raise JoinError(
                f"the server at {self.address} let this client in and then broke off:"
                f" {str(error) or 'it said nothing'}; try again"
            ) from None
        except BaseException:
            connection.close()
            raise
        if isinstance(answer, Refused):
            connection.close()
            raise JoinError(f"the server at {self.address} refuses this client: {answer.reason}")
        self._admitted = answer
        self._control = connection
        return answer

    def _introduction(self, peer: int, purpose: Purpose) -> Introduction:
        admitted = self.admitted
        return Introduction(Role.OBSERVER, purpose, admitted.observer, peer, admitted.epoch, RUN)

    def _routes(
        self, key: tuple[int, Purpose]
    ) -> list[tuple[str, Callable[..., Awaitable[socket.socket]]]]:
        if key[1] is Purpose.SHARED_STORE:
            name = name_of(self._key, RUN, self.admitted.world, SERVER, self.port)
            return [("shared memory", functools.partial(dial_name, name, self._key))]
        return [(self.address, functools.partial(dial, self.host, self.port, self._key))]


async def ask_status(address: str, token: str, seconds: float) -> bytes:
    """What the server tells of itself, encoded; asks once. Raises as `Visit.enter`."""
    host, port = _parsed(address)
    introduction = Introduction(Role.OBSERVER, Purpose.STATUS, -1, SERVER, 0, RUN)
    key = check_token(token)
    connection = await _reach(host, port, key, introduction, time.monotonic(), seconds)
    try:
        async with asyncio.timeout(seconds):
            return await _read_message(connection)
    except (OSError, HandshakeError, ControlError) as error:
        where = format_address(host, port)
        raise JoinError(
            f"the server at {where} broke off: {str(error) or 'it said nothing'}; try again"
        ) from None
    finally:
        connection.close()


async def _nothing() -> None:
    pass


def _parsed(address: str) -> tuple[str, int]:
    try:
        return parse_address(address)
    except ValueError as error:
        raise JoinError(str(error)) from None


async def _read_message(connection: socket.socket) -> bytes:
    prefix = await read_exactly(connection, LENGTH_BYTES)
    return await read_exactly(connection, decode_length(prefix, limit=REPLY_BYTES_MAX))


async def _reach(
    host: str,
    port: int,
    key: bytes,
    introduction: Introduction,
    deadline: float,
    once: float | None = None,
) -> socket.socket:
    """Dial until somebody answers or the deadline passes; `once`: one try of so many seconds."""
    where = format_address(host, port)
    pause, rejections, next_notice = 0.02, 0, time.monotonic() + NOTICE_SECONDS[0]
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            async with asyncio.timeout(once or min(HANDSHAKE_SECONDS, left)):
                return await dial(host, port, key, introduction)
        except HandshakeError as error:
            rejections += error.rejected
            _raise_if_certain(error, where, certain=bool(once) or rejections >= REJECTIONS_MAX)
            failure = f"something listens there, but {error}"
        except TimeoutError:
            failure = "it does not answer as a commute server; another service may have this port"
        except OSError as error:
            failure = describe_failure(error)
            if isinstance(error, socket.gaierror):
                deadline = 0.0  # waiting does not help
        left = deadline - time.monotonic()
        if left <= 0:
            raise JoinError(
                f"there is no commute server at {where}: {failure}; start one with"
                f" `commute serve --port {port} --token-file FILE`, or check the address"
            )
        if time.monotonic() >= next_notice:
            next_notice += NOTICE_SECONDS[1]
            _log.warning(
                "waiting for a server at %s (%s); %d s left", where, failure, math.ceil(left)
            )
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, RETRY_SECONDS_MAX)


def _raise_if_certain(error: HandshakeError, where: str, *, certain: bool) -> None:
    if error.impostor:
        raise AuthenticationError(
            f"what listens on {where} is not a commute server with this token: {error}; check the"
            " address"
        ) from None
    if error.rejected and certain:
        raise AuthenticationError(
            f"the server at {where} does not accept this token; pass the one it was started with"
            " as token= or token_file=, or --token-file (in a job COMMUTE_TOKEN is the job's own)"
        ) from None
