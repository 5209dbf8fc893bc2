# SPDX-License-Identifier: Apache-2.0
"""Joining and linking over real sockets: members and the coordinator."""

import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import pytest

from commute._errors import (
    AuthenticationError,
    ClosedError,
    JoinError,
    OperationTimeoutError,
    PeerLostError,
)
from commute.cluster.auth import (
    Purpose,
    Role,
    mint_token,
)
from commute.cluster.connector import Connector
from commute.cluster.control import Frame, Kind, Leave, encode
from commute.cluster.join import join
from joining import RUN, Client, ControlLink, Serving, at_once, eventually, soon, world_of


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
            assert control.socket.recv(32) == encode(Frame(Kind.BEAT))
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
