# SPDX-License-Identifier: Apache-2.0
"""The coordinator as a process of its own: when it starts, and that it always ends."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from commute.cluster.auth import mint_token
from commute.cluster.control import Frame, Kind, encode
from commute.cluster.join import join

RUN = "run-1"


class Process:
    """python -m commute.cluster.serve; ended at the latest with the test."""

    def __init__(self, *arguments: str, given: object = None) -> None:
        self.token = mint_token()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "commute.cluster.serve", "--size", "2", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        given = {"token": self.token, "run": RUN} if given is None else given
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    @property
    def address(self) -> str:
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        assert self.process.stdout.read() == b"", "stdout ends after its one line"
        return f"{said['host']}:{said['port']}"

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


def test_process_ends_with_its_last_member() -> None:
    """It outlives its starter once somebody joined, and stays in a session of its own."""
    with Process() as process:
        address = process.address
        with ThreadPoolExecutor(2) as pool:
            members = list(
                pool.map(lambda r: join(r, 2, r, 2, address, process.token, RUN), range(2))
            )
        process.close_stdin()
        session = os.getsid(process.process.pid)
        rank, other = members
        os.write(rank[0].coordinator_fd, encode(Frame(Kind.LEAVE, rank=0, by=0)))
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(0.6)
        os.write(other[0].coordinator_fd, encode(Frame(Kind.LEAVE, rank=1, by=1)))

        assert process.process.wait(10) == 0
        assert session == process.process.pid
        for membership, connector in members:
            connector.close()
            os.close(membership.coordinator_fd)


def test_process_ends_when_nobody_joins() -> None:
    """After the join deadline, with a line that says so."""
    with Process("--join-timeout", "0.3") as process:
        assert process.process.wait(10) == 1
        assert process.process.stderr is not None
        assert b"commute: none of the 2 ranks joined within 0.3 s" in process.process.stderr.read()


def test_process_ends_with_a_starter_that_went_early() -> None:
    """Nobody had joined, so nobody needs it."""
    with Process() as process:
        assert process.address
        process.close_stdin()

        assert process.process.wait(10) == 1


@pytest.mark.parametrize("given", ["", {}, {"token": "x", "run": "r"}, {"token": "ab" * 32}, 7])
def test_process_refuses_unusable_input(given: object) -> None:
    """With a sentence and code 2, without a traceback."""
    with Process(given=given) as process:
        assert process.process.wait(10) == 2
        assert process.process.stderr is not None
        said = process.process.stderr.read()

        assert said.startswith(b"commute: the coordinator cannot start: ")
        assert b"Traceback" not in said


def test_port_in_use_is_named() -> None:
    """With what to do about it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("--port", str(port)) as process:
            assert process.process.wait(10) == 2
            assert process.process.stderr is not None
            said = process.process.stderr.read().decode()

        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose" in said
