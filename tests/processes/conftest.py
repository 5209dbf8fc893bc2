# SPDX-License-Identifier: Apache-2.0
"""Jobs with a store: ranks under `commute run` or started by hand, and the servers they bring."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def eventually(condition: Callable[[], Any], what: Callable[[], str], within: float) -> Any:
    """Waits until the condition holds, and returns what it gave; fails with `what` otherwise."""
    until = time.monotonic() + within
    while not (found := condition()):
        if time.monotonic() > until:
            pytest.fail(what())
        time.sleep(0.02)
    return found


class StoreJob:
    """The processes of a job: of one launcher, or of ranks that were started one by one.

    Ranks tell the test what they see by `say` (see programs/): a line "said {...}" of JSON.

    Attributes:
        meeting: the environment in which ranks that are started by hand find each other.
    """

    def __init__(self, jobs: Sequence[Any], meeting: Mapping[str, str] | None = None) -> None:
        self.jobs = jobs
        self.meeting = dict(meeting or {})

    def __getitem__(self, rank: int) -> Any:
        """The job of a rank that was started by hand."""
        return self.jobs[rank]

    @property
    def text(self) -> str:
        return "".join(f"--- out\n{each.out}\n--- err\n{each.err}\n" for each in self.jobs)

    def pids(self) -> list[int]:
        return [pid for each in self.jobs for pid in each.pids()]

    def servers(self, count: int | None = None, within: float = 20.0) -> list[int]:
        """The pids of the servers, in their order; waits until there are `count`."""
        if count is None:
            return self._servers()
        eventually(lambda: len(self._servers()) == count, lambda: self.text, within)
        return self._servers()

    def _servers(self) -> list[int]:
        found = {}
        for pid in self.pids():
            words = _words(pid)
            if "commute.store.server" in words:
                world, rank = (words[words.index(flag) + 1] for flag in ("--world", "--rank"))
                found[world, int(rank)] = pid
        return [found[key] for key in sorted(found)]

    def said(self, key: str, count: int = 0, within: float = 30.0) -> list[dict[str, Any]]:
        """All that ranks have said with this key; waits until there is that much."""

        def lines() -> list[dict[str, Any]]:
            found = [re.findall(r"said (\{.*\})$", each.out, re.M) for each in self.jobs]
            told = [json.loads(line) for lines in found for line in lines]
            return [line for line in told if key in line]

        if count:
            eventually(lambda: len(lines()) >= count, lambda: f"no {key}\n{self.text}", within)
        return lines()

    def ranks(self, size: int) -> dict[int, int]:
        """The pid of each rank, once all have said "ready"."""
        return {line["me"]: line["ready"] for line in self.said("ready", size)}

    def all_fine(self, size: int) -> list[dict[str, Any]]:
        """Waits for the end: no process fails, and `size` ranks say that all is fine."""
        ended = [each.wait() for each in self.jobs]
        told = self.said("fine")

        assert not any(each.code for each in ended), self.text
        assert sorted(line["me"] for line in told) == list(range(size)), self.text
        return told

    def all_gone(self, within: float = 20.0) -> None:
        """Waits until no process is left, servers included."""
        eventually(
            lambda: not self.pids(),
            lambda: f"left behind: {[_words(pid) for pid in self.pids()]}\n{self.text}",
            within,
        )


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture(params=["1", "0"], ids=["shared", "tcp"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of jobs whose processes share memory, and of jobs that use TCP."""
    return {
        "COMMUTE_SHARED_MEMORY": request.param,
        "COMMUTE_RECORDS": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def launched(job: Callable[..., Any], transport: dict[str, str]) -> Callable[..., StoreJob]:
    """`launched(4, "store.py", "rounds", flags=["--servers", "2"])`: a job under commute run."""

    def start(
        size: int,
        program: str,
        *arguments: object,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> StoreJob:
        command = [sys.executable, "-m", "commute", "run", "-n", str(size), *flags]
        command += [str(PROGRAMS / program), *map(str, arguments)]
        return StoreJob([job(command, env={**transport, **(env or {})}, timeout=55.0)])

    return start


@pytest.fixture
def by_hand(job: Callable[..., Any], transport: dict[str, str]) -> Callable[..., StoreJob]:
    """As `launched`, with ranks that nobody ends when another fails; rank 0 has the coordinator."""

    def start(
        size: int, program: str, *arguments: object, env: Mapping[str, str] | None = None
    ) -> StoreJob:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        meeting = {"COMMUTE_COORDINATOR": address, "COMMUTE_TOKEN": secrets.token_hex(32)}
        meeting["COMMUTE_RUN"] = secrets.token_hex(8)
        command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
        jobs = []
        for rank in map(str, range(size)):
            place = {"PMI_RANK": rank, "MPI_LOCALRANKID": rank}
            place |= {"PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)}
            whole = {**transport, **meeting, **place, **(env or {})}
            jobs.append(job(command, env=whole, timeout=55.0))
        return StoreJob(jobs, meeting)

    return start
