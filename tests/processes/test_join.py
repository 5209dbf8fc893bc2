# SPDX-License-Identifier: Apache-2.0
"""Joining and linking over real sockets: members, the coordinator, and clients that misbehave.

Members and the coordinator are made by threads of this process.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest

from commute._errors import (
    AuthenticationError,
    ClosedError,
    JoinError,
    OperationTimeoutError,
    PeerLostError,
)
from commute.cluster.auth import (
    GREETING_BYTES,
    PROOF_BYTES,
    Introduction,
    Purpose,
    Role,
    acceptor_proof,
    check_token,
    introduce,
    mint_token,
)
from commute.cluster.connector import Connector
from commute.cluster.control import Decoder, Frame, Hello, Kind, Leave, encode, encode_message
from commute.cluster.coordinator import Failed
from commute.cluster.gate import PENDING_MAX
from commute.cluster.join import Membership, join
from commute.cluster.serve import CoordinatorServer

RUN = "run-1"
T = TypeVar("T")
HELLO = Hello(
    name="world",
    rank=0,
    size=2,
    host="hosta",
    pid=7,
    addresses=(("127.0.0.1", 4000),),
    commute_version="1",
    python_version="3",
    peer_timeout=5.0,
    join_timeout=300.0,
)


class Serving:
    """A coordinator that serves until close()."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self.token = token or mint_token()
        self.failures: list[Failed] = []
        self.notices: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = CoordinatorServer(
            self.token,
            RUN,
            on_failure=self.failures.append,
            on_notice=self.notices.append,
            handshake_seconds=handshake_seconds,
        )
        self.host, self.port = self.run(self.server.start(host, port))

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def join(self, rank: int, size: int, **options: Any) -> tuple[Membership, Connector]:
        options = {"join_timeout": 20.0, **options}
        token, run = options.pop("token", self.token), options.pop("run", RUN)
        address = options.pop("coordinator", self.address)
        return join(rank, size, rank, size, address, token, run, **options)

    def close(self) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class World(list[tuple[Membership, Connector]]):
    """The members of a world, all in this process."""

    def close(self) -> None:
        for membership, connector in self:
            connector.close()
            with contextlib.suppress(OSError):  # some tests close it themselves
                os.close(membership.coordinator_fd)


@contextlib.contextmanager
def world_of(serving: Serving, size: int, **options: Any) -> Iterator[World]:
    """A formed world; its members join at once."""
    world = World(at_once([partial(serving.join, r, size, **options) for r in range(size)]))
    try:
        yield world
    finally:
        world.close()


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same time; raises what the first of them raised."""
    barrier = threading.Barrier(len(calls))

    def call(made: Callable[[], T]) -> T:
        barrier.wait(10)
        return made()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call, made) for made in calls]]


def eventually(condition: Callable[[], bool], *, within: float = 10.0) -> None:
    """Wait for a condition, never longer than needed; fails after the deadline."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


class Client:
    """A blocking client that knows the protocol and may break it."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read(self, count: int) -> bytes:
        received = b""
        while len(received) < count and (part := self.socket.recv(count - len(received))):
            received += part
        return received

    def introduce(
        self,
        token: str,
        *,
        role: int = Role.MEMBER,
        purpose: int = Purpose.JOIN,
        rank: int = 0,
        target: int = -1,
        epoch: int = 0,
        run: str = RUN,
    ) -> bytes:
        """The introduction that was sent; the acceptor's proof is checked if it comes."""
        greeting = self.read(GREETING_BYTES)
        claim = Introduction(role, purpose, rank, target, epoch, run)  # type: ignore[arg-type]
        sent = introduce(check_token(token), greeting, claim)
        self.socket.sendall(sent)
        proof = self.read(PROOF_BYTES)
        assert proof in (b"", acceptor_proof(check_token(token), greeting, sent))
        return sent

    @property
    def ended(self) -> bool:
        """Whether the other end closes the connection; waits for it."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def frame(self) -> Frame:
        """The next frame that is no beat."""
        while not self._frames:
            received = self.socket.recv(1 << 16)
            assert received, "the connection ended"
            self._frames += [f for f in self._decoder.feed(received) if f.kind is not Kind.BEAT]
        return self._frames.pop(0)


class ControlLink(Client):
    """A member's connection to the coordinator, as its health thread would use it."""

    def __init__(self, membership: Membership) -> None:
        self.socket = socket.socket(fileno=os.dup(membership.coordinator_fd))
        self.socket.settimeout(10)
        self._decoder = Decoder()
        self._frames = []


@pytest.fixture
def serving() -> Iterator[Serving]:
    running = Serving()
    yield running
    running.close()


def ends_of(fd: int) -> tuple[object, object]:
    with socket.socket(fileno=os.dup(fd)) as connection:
        return connection.getsockname(), connection.getpeername()


def test_world_of_one(serving: Serving) -> None:
    """It needs nobody, and knows itself."""
    with world_of(serving, 1) as [(membership, _)]:
        assert (membership.rank, membership.size, membership.epoch) == (0, 1, 1)
        assert membership.run == RUN
        assert membership.members[0].pid == os.getpid()
        assert membership.members[0].addresses[0][0] == "127.0.0.1"
        assert not os.get_blocking(membership.coordinator_fd)


def test_world_of_eight_links_every_pair(serving: Serving) -> None:
    """All dial all at once: each pair agrees on one connection, and nothing is refused."""
    with world_of(serving, 8) as world:
        pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
        fds = at_once([partial(world[a][1].connect, b, 1, soon()) for a, b in pairs])
        links = dict(zip(pairs, fds, strict=True))
        ends = {pair: ends_of(fd) for pair, fd in links.items()}
        for fd in fds:
            assert not os.get_blocking(fd)
            os.close(fd)

        assert all(ends[a, b] == ends[b, a][::-1] for a, b in pairs)
        assert [connector.refused for _, connector in world] == [0] * 8
        assert all(m.members == world[0][0].members for m, _ in world)


def test_both_dial_at_once_again_and_again(serving: Serving) -> None:
    """The tie is broken the same way on both sides, whatever the timing."""
    for _ in range(25):
        with world_of(serving, 2) as world:
            for purpose in (1, 2, 3):
                first, second = at_once(
                    [partial(world[r][1].connect, 1 - r, purpose, soon()) for r in (0, 1)]
                )
                assert ends_of(first) == ends_of(second)[::-1]
                os.close(first)
                os.close(second)
            assert [connector.refused for _, connector in world] == [0, 0]


def test_a_link_waits_to_be_asked_for(serving: Serving) -> None:
    """One side dials; the other finds the link there, and what was sent on it."""
    with world_of(serving, 2) as world:
        dialled = world[0][1].connect(1, 2, soon())
        os.write(dialled, b"early")
        found = world[1][1].connect(0, 2, soon())
        nodelay = socket.socket(fileno=os.dup(found))
        with nodelay:
            assert nodelay.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        eventually(lambda: readable(found))

        assert os.read(found, 10) == b"early"
        os.close(dialled)
        os.close(found)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_link_is_handed_out_once(serving: Serving) -> None:
    """A second request is a mistake of the caller, and says so; so are impossible ones."""
    with world_of(serving, 2) as world:
        os.close(world[0][1].connect(1, 1, soon()))

        for arguments, message in [
            ((1, 1), "the collective link to rank 1 is taken already"),
            ((0, 1), "rank 0 is no other member of this world of 2"),
            ((2, 1), "rank 2 is no other member"),
            ((1, 0), "purpose 0 is not for links"),
        ]:
            with pytest.raises(ValueError, match=message):
                world[0][1].connect(*arguments, soon())


def test_generations(serving: Serving) -> None:
    """Joining again makes a world of the next epoch; links of another epoch are refused."""
    with world_of(serving, 2) as first, world_of(serving, 2) as second:
        host, port = second[1][0].members[1].addresses[0]
        with Client(host, port) as client:
            client.introduce(serving.token, purpose=1, rank=0, target=1, epoch=1)
            assert client.ended

        assert [m.epoch for m, _ in [*first, *second]] == [1, 1, 2, 2]
        assert second[1][1].refused == 1


def test_two_worlds_at_once(serving: Serving) -> None:
    """By name; the end of one does not touch the other."""
    with world_of(serving, 2, name="other") as other:
        with world_of(serving, 2) as world:
            fds = [world[0][1].connect(1, 1, soon()), other[0][1].connect(1, 1, soon())]
        with ControlLink(other[0][0]) as control:
            control.socket.sendall(encode(Frame(Kind.BEAT)))
            fds.append(other[1][1].connect(0, 1, soon()))
            assert control.socket.recv(24) == encode(Frame(Kind.BEAT))
        for fd in fds:
            os.close(fd)

        assert {f.world for f in serving.failures} == {"world"}


def test_members_come_before_the_coordinator() -> None:
    """They dial until it is there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    token = mint_token()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(join, 0, 1, 0, 1, f"127.0.0.1:{port}", token, RUN, join_timeout=20.0)
        assert not wait([early], timeout=0.3).done
        serving = Serving(port=port, token=token)
        membership, connector = early.result(15)

    connector.close()
    os.close(membership.coordinator_fd)
    serving.close()
    assert membership.epoch == 1


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_ipv6_and_names(host: str) -> None:
    """The links listen where the route to the coordinator goes."""
    try:
        serving = Serving(host=host)
    except JoinError:
        pytest.skip(f"{host} cannot be listened on here")
    name = f"[{host}]" if ":" in host else host
    with world_of(serving, 2, coordinator=f"{name}:{serving.port}") as world:
        fds = at_once([partial(world[r][1].connect, 1 - r, 1, soon()) for r in (0, 1)])
        for fd in fds:
            os.close(fd)

        assert world[0][0].members[1].addresses[0][0] in ("127.0.0.1", "::1")
    serving.close()


def test_bind_and_advertise(serving: Serving) -> None:
    """An interface or address to listen on, and what the others are told."""
    with world_of(serving, 1, bind="lo") as [(by_name, _)]:
        assert by_name.members[0].addresses[0][0] == "127.0.0.1"
    with world_of(serving, 1, bind="0.0.0.0") as [(wild, _)]:
        assert wild.members[0].addresses[0][0] == "127.0.0.1"
    with world_of(serving, 1, bind="127.0.0.2", advertise="node-7") as [(told, _)]:
        assert told.members[0].addresses[0][0] == "node-7"
    with pytest.raises(JoinError, match=r"rank 0 cannot listen on 192\.0\.2\.1: .*pass bind="):
        serving.join(0, 1, bind="192.0.2.1")


def test_wrong_token_is_an_error_at_once(serving: Serving) -> None:
    """It names the address and what to check; nobody else notices."""
    began = time.monotonic()
    for wrong in ({"token": mint_token()}, {"run": "run-2"}):
        with pytest.raises(AuthenticationError) as caught:
            serving.join(0, 2, **wrong)
        assert re.search(
            f"coordinator at {serving.address} rejected rank 0 .*; check that the token"
            r" \(COMMUTE_TOKEN or COMMUTE_TOKEN_FILE\) and the run are",
            str(caught.value),
        )

    assert time.monotonic() - began < 5
    assert serving.server.refused == 4
    assert not serving.server.machine.ever_joined


def test_arguments_are_checked_before_anything_is_dialled(serving: Serving) -> None:
    """Each with its own message."""
    with pytest.raises(JoinError, match=r"expected a rank from 0 to 1 \(size 2\), got 2"):
        serving.join(2, 2)
    with pytest.raises(JoinError, match="expected a size from 1 to 4096, got 0"):
        serving.join(0, 0)
    with pytest.raises(JoinError, match="cannot join world '': malformed hello"):
        serving.join(0, 1, name="")
    with pytest.raises(JoinError, match="malformed hello"):
        serving.join(0, 1, peer_timeout=-1.0)
    with pytest.raises(AuthenticationError, match="must be 64 hexadecimal digits"):
        serving.join(0, 1, token="secret")
    with pytest.raises(ValueError, match="expected an address as host:port"):
        serving.join(0, 1, coordinator="hosta")


def test_nobody_there_is_an_error_at_the_deadline() -> None:
    """It says what the last attempt met."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    with pytest.raises(
        JoinError,
        match=f"rank 0 could not reach the coordinator at 127.0.0.1:{port} before the deadline:"
        " connection refused; check that it runs",
    ):
        join(0, 1, 0, 1, f"127.0.0.1:{port}", mint_token(), RUN, join_timeout=0.3)


@pytest.mark.parametrize(
    ("banner", "error", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.9" + b"." * 40, AuthenticationError, "is not the coordinator"),
        (b"", JoinError, "before the deadline: no answer"),
    ],
)
def test_another_service_has_the_port(banner: bytes, error: type[Exception], message: str) -> None:
    """One that talks is recognised at once; one that is silent at the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as service, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{service.getsockname()[1]}"
        joining = pool.submit(join, 0, 1, 0, 1, address, mint_token(), RUN, join_timeout=0.5)
        connection, _ = service.accept()
        with connection:
            connection.sendall(banner)

            with pytest.raises(error, match=message):
                joining.result(10)


def test_incomplete_world_is_refused_with_its_roster(serving: Serving) -> None:
    """At the deadline, for everybody who waits."""
    calls = [partial(serving.join, r, 4, join_timeout=0.5) for r in (0, 3)]

    with pytest.raises(JoinError, match="raise join_timeout") as caught:
        at_once(calls)
    assert re.fullmatch(
        r"waiting for ranks 1, 2 of world 'world' \(joined: 0 and 3 on .*\)", caught.value.roster
    )


def test_coordinator_ends_while_members_wait(serving: Serving) -> None:
    """They need not wait for their deadline."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(serving.join, 0, 2)
        eventually(lambda: serving.server.machine.populated)
        serving.run(serving.server.close())

        with pytest.raises(JoinError, match=r"it closed the connection .*; it may have ended"):
            waiting.result(10)


def test_interrupted_join_leaves_nothing(serving: Serving) -> None:
    """Ctrl-C ends the wait within a second; thread and connection are gone."""
    interrupted: list[float] = []

    def interrupt() -> None:
        eventually(lambda: serving.server.machine.populated)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        serving.join(0, 2)

    assert time.monotonic() - interrupted[0] < 1
    eventually(lambda: not serving.server.machine.populated)
    assert not [t for t in threading.enumerate() if t.name.startswith("commute-connector")]


def test_interrupted_connect_can_be_repeated(serving: Serving) -> None:
    """Whatever `check` raises ends the wait; the link can be asked for again."""

    def fail() -> None:
        raise PeerLostError(rank=1)

    with world_of(serving, 2) as world:
        stop_accepting(world[1][1])
        with pytest.raises(PeerLostError):
            world[0][1].connect(1, 1, soon(), fail)
        # It cannot be dialled any more, but it can dial.
        other = world[1][1].connect(0, 1, soon())
        mine = world[0][1].connect(1, 1, soon())

        assert ends_of(mine) == ends_of(other)[::-1]
        os.close(mine)
        os.close(other)


def stop_accepting(connector: Connector) -> None:
    async def close() -> None:
        assert connector._gate is not None
        await connector._gate.close()

    connector.run(close())


def test_unreachable_peer_is_named_at_the_deadline(serving: Serving) -> None:
    """With what the last attempt met."""
    with world_of(serving, 2) as world:
        stop_accepting(world[1][1])

        with pytest.raises(
            OperationTimeoutError,
            match=rf"no link to rank 1 \(pid {os.getpid()} on .*\) before the deadline:"
            r" 127\.0\.0\.1:\d+: connection refused; check",
        ):
            world[0][1].connect(1, 1, soon(0.3))


def test_close_is_bounded_and_idempotent(serving: Serving) -> None:
    """Also while another thread waits for a link, which then learns of it."""
    with world_of(serving, 2) as world, ThreadPoolExecutor(1) as pool:
        stop_accepting(world[1][1])
        waiting = pool.submit(world[0][1].connect, 1, 1, soon())
        assert not wait([waiting], timeout=0.2).done
        began = time.monotonic()
        world[0][1].close()
        world[0][1].close()

        assert time.monotonic() - began < 2
        with pytest.raises(ClosedError, match="closed while this call waited"):
            waiting.result(5)
        with pytest.raises(ClosedError, match="are closed; make a new group"):
            world[0][1].connect(1, 1, soon())


def test_closed_connector_closes_unasked_links(serving: Serving) -> None:
    """The peer sees their end; a link that was handed out lives on."""
    with world_of(serving, 2) as world:
        unasked = world[0][1].connect(1, 1, soon())
        kept = world[0][1].connect(1, 2, soon())
        asked = world[1][1].connect(0, 2, soon())
        world[1][1].close()
        eventually(lambda: readable(unasked))

        assert os.read(unasked, 1) == b""
        assert not readable(kept)
        for fd in (unasked, kept, asked):
            os.close(fd)


def test_a_dropped_link_may_be_dialled_again(serving: Serving) -> None:
    """Nobody had asked for it yet, so the dead connection is replaced."""
    with world_of(serving, 2) as world:
        host, port = world[1][0].members[1].addresses[0]
        for again in range(2):
            client = Client(host, port)
            client.introduce(serving.token, purpose=1, rank=0, target=1, epoch=1)
            assert client.read(1) == b"\1"
            if not again:
                client.socket.close()
        with Client(host, port) as duplicate:
            duplicate.introduce(serving.token, purpose=1, rank=0, target=1, epoch=1)
            assert duplicate.ended
        asked = world[1][1].connect(0, 1, soon())

        assert ends_of(asked) == (client.socket.getpeername(), client.socket.getsockname())
        assert world[1][1].refused == 1
        client.socket.close()
        os.close(asked)


def test_losses_and_goodbyes_reach_members_and_launchers(serving: Serving) -> None:
    """A closed connection is a loss, LEAVE is none; launchers hear of failures only."""
    with world_of(serving, 4) as world, Client(serving.host, serving.port) as launcher:
        launcher.introduce(serving.token, role=Role.LAUNCHER, purpose=Purpose.CONTROL)
        eventually(lambda: serving.server.launchers == 1)
        with ControlLink(world[0][0]) as watcher:
            finished = Frame(Kind.LEAVE, Leave.FINISHED, rank=3, by=3)
            failed = Frame(Kind.LEAVE, Leave.FAILED, rank=2, by=2, text="ValueError: x")
            os.write(world[3][0].coordinator_fd, encode(finished))
            assert watcher.frame() == finished
            os.write(world[2][0].coordinator_fd, encode(failed))
            assert watcher.frame() == failed
            os.close(world[1][0].coordinator_fd)
            lost = watcher.frame()

        assert (lost.kind, lost.rank, lost.by) == (Kind.LOST, 1, -1)
        assert [launcher.frame(), launcher.frame()] == [failed, lost]
        eventually(lambda: len(serving.failures) == 1)
        assert serving.failures[0].failure.text == "ValueError: x"
        serving.run(serving.server.close())
        assert launcher.ended


def test_silence_is_a_loss(serving: Serving) -> None:
    """After peer_timeout without a beat; whoever beats stays."""
    with world_of(serving, 2, peer_timeout=1.0) as world:
        with ControlLink(world[0][0]) as alive, ControlLink(world[1][0]) as silent:
            silent.socket.sendall(encode(Frame(Kind.BEAT)))
            began = time.monotonic()
            while not serving.failures:
                alive.socket.sendall(encode(Frame(Kind.BEAT)))
                assert time.monotonic() - began < 5
                time.sleep(0.05)
            told = [alive.frame(), silent.frame()]

        assert told[0] == told[1]
        assert re.fullmatch(r"it was silent for \d\.\d s \(peer_timeout 1 s\)", told[0].text)
        assert told[0].rank == 1


# Hostile clients: each is closed and counted, and the world goes on.


def both_listeners(serving: Serving, world: World) -> list[tuple[str, int, Callable[[], int]]]:
    host, port = world[0][0].members[0].addresses[0]
    return [
        (serving.host, serving.port, lambda: serving.server.refused),
        (host, port, lambda: world[0][1].refused),
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 160,
        b"commute1" + bytes(152),
        bytes(160),
        b"\xff" * (1 << 20),
    ],
    ids=["http", "magic", "zeros", "flood"],
)
def test_garbage_instead_of_an_introduction(serving: Serving, garbage: bytes) -> None:
    """On the coordinator's port and on a member's."""
    with world_of(serving, 2) as world:
        for host, port, refused in both_listeners(serving, world):
            with Client(host, port) as client:
                with contextlib.suppress(ConnectionError):
                    client.socket.sendall(garbage)
                assert client.ended
            assert refused() == 1
        fd = world[1][1].connect(0, 1, soon())

        os.close(fd)
        assert not serving.failures


def test_truncated_introduction(serving: Serving) -> None:
    """Half of it, then the end."""
    with world_of(serving, 1) as world:
        for host, port, refused in both_listeners(serving, world):
            with Client(host, port) as client:
                client.socket.sendall(b"commute1" + bytes(70))
                client.socket.shutdown(socket.SHUT_WR)
                assert client.ended
            assert refused() == 1


def test_replayed_introduction(serving: Serving) -> None:
    """A recording of a good one opens nothing: the greeting has changed."""
    with world_of(serving, 2) as world:
        for host, port, refused in both_listeners(serving, world):
            with Client(host, port) as honest:
                recorded = honest.introduce(serving.token, purpose=1, rank=1, target=0, epoch=1)
            before = refused()
            with Client(host, port) as client:
                client.socket.sendall(recorded)
                assert len(client.read(100)) == 40  # the greeting, and no proof
            assert refused() > before


@pytest.mark.parametrize(
    "claim",
    [
        {"purpose": 0},
        {"rank": 0},
        {"rank": 7},
        {"rank": -1},
        {"target": 1},
        {"epoch": 2},
        {"role": 1},
    ],
    ids=str,
)
def test_links_that_do_not_fit_are_refused(serving: Serving, claim: dict[str, Any]) -> None:
    """Though the token is right: a member accepts its peers only, for itself, of its epoch."""
    with world_of(serving, 2) as world, Client(*world[0][0].members[0].addresses[0]) as client:
        fitting: dict[str, Any] = {"purpose": 1, "rank": 1, "target": 0, "epoch": 1}
        client.introduce(serving.token, **{**fitting, **claim})

        assert client.ended
        eventually(lambda: world[0][1].refused == 1)


@pytest.mark.parametrize(
    "claim", [{"target": 0}, {"purpose": 1}, {"role": 1, "purpose": 0}], ids=str
)
def test_the_coordinator_is_no_member(serving: Serving, claim: dict[str, Any]) -> None:
    """It takes joins and launchers, nothing else."""
    with Client(serving.host, serving.port) as client:
        client.introduce(serving.token, **claim)

        assert client.ended
        eventually(lambda: serving.server.refused == 1)


@pytest.mark.parametrize(
    "hello",
    [
        b"\xff\xff\xff\xff",
        b"\x04\0\0\0abcd",
        b"\0\0\0\0",
        (1 << 19).to_bytes(4, "little") + b"\x91" * (1 << 19),
        encode_message(msgspec.structs.replace(HELLO, rank=1)),
    ],
    ids=["oversized", "garbage", "empty", "nested", "another rank"],
)
def test_bad_hello_after_a_good_introduction(serving: Serving, hello: bytes) -> None:
    """Closed and counted; nobody has joined."""
    with Client(serving.host, serving.port) as client:
        client.introduce(serving.token, rank=0)
        client.socket.sendall(hello)

        assert client.ended
        eventually(lambda: serving.server.refused == 1)
        assert not serving.server.machine.ever_joined


def test_garbage_on_a_control_connection_is_a_loss(serving: Serving) -> None:
    """Of that member, with the reason."""
    with world_of(serving, 2) as world, ControlLink(world[0][0]) as watcher:
        os.write(world[1][0].coordinator_fd, b"garbage")

        assert watcher.frame().text == (
            "its connection to the coordinator closed before it left: it sent garbage: expected a"
            " frame, got b'garb'"
        )


def test_slow_strangers_are_cut_off() -> None:
    """One byte at a time does not hold a connection open; honest members pass meanwhile."""
    serving = Serving(handshake_seconds=0.5)
    with Client(serving.host, serving.port) as slow:
        began = time.monotonic()
        with world_of(serving, 2), contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                slow.socket.sendall(b"c")
                time.sleep(0.02)
        assert slow.ended
        assert 0.4 < time.monotonic() - began < 4
    assert serving.server.refused == 1
    serving.close()


def test_three_hundred_idle_connections(serving: Serving) -> None:
    """The oldest strangers make room; members join and link through the crowd."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Client(serving.host, serving.port)) for _ in range(300)]
        eventually(lambda: serving.server.refused == 300 - PENDING_MAX)
        with world_of(serving, 2) as world:
            host, port = world[0][0].members[0].addresses[0]
            for _ in range(300):
                stack.enter_context(Client(host, port))
            os.close(world[1][1].connect(0, 1, soon()))

        assert crowd[0].ended
        assert serving.server.pending <= PENDING_MAX


def test_who_does_not_read_is_cut_off(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds up nobody: the others get everything meanwhile."""
    monkeypatch.setattr("commute.cluster.connection.UNSENT_BYTES_MAX", 1 << 16)
    with world_of(serving, 3) as world, ControlLink(world[0][0]) as reader:
        deaf = socket.socket(fileno=os.dup(world[2][0].coordinator_fd))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        writer = socket.socket(fileno=os.dup(world[1][0].coordinator_fd))
        writer.settimeout(10)
        heard: list[Frame] = []
        op = 0
        while not any(frame.kind is Kind.LOST for frame in heard):
            writer.sendall(encode(Frame(Kind.ABANDON, 2, by=1, op=op, text="x" * 2048)))
            heard.append(reader.frame())
            op += 1
        deaf.close()
        writer.close()

        assert [f.op for f in heard if f.kind is Kind.ABANDON] == list(range(len(heard) - 1))
        assert heard[-1].rank == 2
        assert heard[-1].text.endswith("it does not read")
