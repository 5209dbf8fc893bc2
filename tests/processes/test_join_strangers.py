# SPDX-License-Identifier: Apache-2.0
"""Who may not join: clients that misbehave at the doors of members and the coordinator."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from commute.cluster.control import Frame, Kind, encode, encode_message
from commute.cluster.gate import PENDING_MAX
from joining import HELLO, Client, ControlLink, Serving, World, eventually, soon, world_of


@pytest.fixture
def serving() -> Iterator[Serving]:
    running = Serving()
    yield running
    running.close()


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
