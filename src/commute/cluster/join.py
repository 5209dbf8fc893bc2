# SPDX-License-Identifier: Apache-2.0
"""Become a member of a world.

    dial the coordinator, again and again until the deadline (it may not be up yet)
    listen for the other members, on the address of that route
    say Hello; wait for the Welcome, or a Refused that says why

The connection to the coordinator then belongs to the caller: it carries control frames only. The
work runs on the connector's thread; the caller waits for it in slices, so Ctrl-C works.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from commute._errors import AuthenticationError, JoinError
from commute._version import __version__
from commute.cluster.addresses import (
    choose_bind,
    interface_address,
    is_wildcard,
    parse_address,
)
from commute.cluster.auth import (
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    check_run,
    check_token,
    read_exactly,
)
from commute.cluster.connector import Connector
from commute.cluster.control import (
    LENGTH_BYTES,
    REPLY_BYTES_MAX,
    SIZE_MAX,
    ControlError,
    Hello,
    Member,
    Refused,
    Welcome,
    decode_hello,
    decode_length,
    decode_reply,
    encode_message,
)
from commute.cluster.gate import HANDSHAKE_SECONDS, describe_failure, dial

__all__ = ["Member", "Membership", "join"]

RETRY_SECONDS_MAX: Final = 0.5
NOTICE_SECONDS: Final = 10.0
# At its deadline the coordinator answers with the roster; a member gives it this long to arrive.
ANSWER_SECONDS: Final = 2.0
# One rejection could be a coordinator that was just closing; a wrong token is rejected again.
REJECTIONS_MAX: Final = 2

_log = logging.getLogger("commute.cluster")


@dataclass(frozen=True)
class Membership:
    """This process as a member of a formed world.

    coordinator_fd is the connection to the coordinator, non-blocking; it belongs to the caller,
    who sends heartbeats on it from now on.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    epoch: int
    run: str
    members: tuple[Member, ...]
    coordinator_fd: int


def join(
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    coordinator: str,
    token: str,
    run: str,
    *,
    name: str = "world",
    join_timeout: float = 300.0,
    peer_timeout: float = 5.0,
    bind: str | None = None,
    advertise: str | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Membership, Connector]:
    """Become a member; returns when all ranks of the world have.

    Joining the same name again, after that world was formed, makes its next generation.

    Args:
        coordinator: "host:port".
        bind, advertise: an address or an interface; where the links of this member listen, and
            what the others are told. By default the address of the route to the coordinator.
        check: called at least every 100 ms; what it raises ends the wait.

    Raises:
        JoinError: the coordinator was not reached in time, or refused; `roster` says who is
            missing.
        AuthenticationError: the coordinator does not hold the same token, or has another run.
    """
    _check_place(rank, size)
    check_run(run)
    entry = _Entry(
        hello=_hello(name, rank, size, peer_timeout=peer_timeout, join_timeout=join_timeout),
        coordinator=coordinator,
        run=run,
        key=check_token(token),
        deadline=time.monotonic() + join_timeout,
    )
    connector = Connector(rank=rank, token=token, run=run)
    try:
        welcome = connector.run(entry.enter(connector, bind=bind, advertise=advertise), check=check)
        membership = Membership(
            name=name,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            host=entry.hello.host,
            epoch=welcome.epoch,
            run=run,
            members=welcome.members,
            coordinator_fd=entry.detach(),
        )
    except BaseException:
        connector.close()
        entry.abandon()
        raise
    return membership, connector


def _check_place(rank: int, size: int) -> None:
    if not 1 <= size <= SIZE_MAX:
        raise JoinError(f"expected a size from 1 to {SIZE_MAX}, got {size}")
    if not 0 <= rank < size:
        raise JoinError(f"expected a rank from 0 to {size - 1} (size {size}), got {rank}")


def _hello(name: str, rank: int, size: int, *, peer_timeout: float, join_timeout: float) -> Hello:
    hello = Hello(
        name=name,
        rank=rank,
        size=size,
        host=socket.gethostname() or "localhost",
        pid=os.getpid(),
        addresses=(),
        commute_version=__version__,
        python_version=platform.python_version(),
        peer_timeout=peer_timeout,
        join_timeout=join_timeout,
    )
    try:
        # What the coordinator would refuse without a word is an error here, with its reason.
        return decode_hello(encode_message(hello)[LENGTH_BYTES:])
    except ControlError as error:
        raise JoinError(f"cannot join world {name!r}: {error}") from None


class _Entry:
    """One attempt to join; the loop thread works on it, `abandon` and `detach` come after."""

    def __init__(
        self, *, hello: Hello, coordinator: str, run: str, key: bytes, deadline: float
    ) -> None:
        self.hello = hello
        self._coordinator = coordinator
        self._host, self._port = parse_address(coordinator)
        self._run = run
        self._key = key
        self._deadline = deadline
        self._connection: socket.socket | None = None

    def detach(self) -> int:
        assert self._connection is not None
        return self._connection.detach()

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def enter(
        self, connector: Connector, *, bind: str | None, advertise: str | None
    ) -> Welcome:
        self._connection = await self._reach()
        addresses = await self._listen(connector, bind, advertise)
        # Before the Hello: whoever has read our Welcome can dial us.
        await connector.listen_to_neighbours(self.hello.name, addresses[0][1])
        left = max(0.1, self._deadline - time.monotonic())
        self.hello = msgspec.structs.replace(self.hello, addresses=addresses, join_timeout=left)
        reply = await self._exchange(self._connection)
        if isinstance(reply, Refused):
            raise JoinError(reply.reason, roster=reply.roster)
        await connector.admit_members(reply.members, reply.epoch)
        return reply

    async def _listen(
        self, connector: Connector, bind: str | None, advertise: str | None
    ) -> tuple[tuple[str, int], ...]:
        assert self._connection is not None
        route = choose_bind(self._connection)
        host = interface_address(bind) if bind else route
        try:
            bound, port = await connector.listen(host)
        except OSError as error:
            raise JoinError(
                f"rank {self.hello.rank} cannot listen on {host}: {error.strerror or error}; pass"
                " bind= with an address or interface of this host"
            ) from None
        reachable = route if is_wildcard(bound) else bound
        return ((interface_address(advertise) if advertise else reachable, port),)

    async def _reach(self) -> socket.socket:
        """Dial the coordinator until it answers or the deadline passes."""
        introduction = Introduction(Role.MEMBER, Purpose.JOIN, self.hello.rank, -1, 0, self._run)
        pause, rejections = 0.02, 0
        next_notice = time.monotonic() + NOTICE_SECONDS
        while True:
            try:
                limit = min(HANDSHAKE_SECONDS, max(0.1, self._deadline - time.monotonic()))
                async with asyncio.timeout(limit):
                    return await dial(self._host, self._port, self._key, introduction)
            except HandshakeError as error:
                rejections += error.rejected
                self._raise_if_certain(error, rejections)
                failure = str(error)
            except OSError as error:
                failure = describe_failure(error)
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise JoinError(self._unreached(failure))
            if time.monotonic() >= next_notice:
                next_notice += NOTICE_SECONDS
                _log.warning(
                    "rank %d waits for the coordinator at %s (%s); %d s left",
                    self.hello.rank,
                    self._coordinator,
                    failure,
                    math.ceil(left),
                )
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _raise_if_certain(self, error: HandshakeError, rejections: int) -> None:
        if error.impostor:
            raise AuthenticationError(
                f"what listens on {self._coordinator} is not the coordinator of this job: {error};"
                " check the address, and that no other service has this port"
            ) from None
        if rejections >= REJECTIONS_MAX:
            raise AuthenticationError(
                f"the coordinator at {self._coordinator} rejected rank {self.hello.rank} of run"
                f" {self._run!r}; check that the token (COMMUTE_TOKEN or COMMUTE_TOKEN_FILE) and"
                " the run are those the coordinator was started with"
            ) from None

    def _unreached(self, failure: str) -> str:
        return (
            f"rank {self.hello.rank} could not reach the coordinator at {self._coordinator} before"
            f" the deadline: {failure}; check that it runs and that this host can reach it, or"
            " raise join_timeout"
        )

    async def _exchange(self, connection: socket.socket) -> Welcome | Refused:
        """Say Hello and wait for the answer, which comes when the world is complete."""
        left = self._deadline + ANSWER_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(max(ANSWER_SECONDS, left)):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(connection, encode_message(self.hello))
                prefix = await read_exactly(connection, LENGTH_BYTES)
                length = decode_length(prefix, limit=REPLY_BYTES_MAX)
                return decode_reply(await read_exactly(connection, length))
        except TimeoutError:
            why = "it did not answer before the deadline"
        except HandshakeError as error:
            why = f"it closed the connection ({error})"
        except OSError as error:
            why = f"the connection broke ({describe_failure(error)})"
        except ControlError as error:
            why = str(error)
        raise JoinError(
            f"rank {self.hello.rank} waited for the world {self.hello.name!r} at the coordinator"
            f" {self._coordinator}, but {why}; it may have ended, look at the job's first failure"
        )
