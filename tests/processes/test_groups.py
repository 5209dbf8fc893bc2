# SPDX-License-Identifier: Apache-2.0
"""Groups between real processes: in shared memory and over TCP, several at once, and failing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "groups.py"


class Ranks:
    """A job of test_groups; what its ranks said, by rank."""

    def __init__(self, job: Any, size: int) -> None:
        self.job = job
        self.size = size

    def said(self, key: str, count: int) -> dict[int, dict[str, Any]]:
        until = time.monotonic() + 40
        while True:
            lines = [json.loads(line) for line in re.findall(r"said (\{.*\})$", self.job.out, re.M)]
            found = {line["me"]: line for line in lines if key in line}
            if len(found) == count:
                return found
            assert time.monotonic() < until and self.job.process.poll() is None, (
                self.job.out + self.job.err
            )
            time.sleep(0.02)

    def all_fine(self) -> dict[int, dict[str, Any]]:
        ended = self.job.wait()

        assert ended.code == 0, ended.out + ended.err
        lines = [json.loads(line) for line in re.findall(r"said (\{.*\})$", ended.out, re.M)]
        assert sorted(line["me"] for line in lines) == list(range(self.size)), ended.out + ended.err
        assert all(line["fine"] for line in lines)
        return {line["me"]: line for line in lines}


@pytest.fixture(params=["1", "0"], ids=["shared", "tcp"])
def memory(request) -> bool:
    return request.param == "1"


@pytest.fixture
def run(memory, job, tmp_path):
    env = {"COMMUTE_RECORDS": str(tmp_path / "records"), "COMMUTE_SHARED_MEMORY": str(int(memory))}

    def start(size: int, part: str, *flags: str, timeout: float = 55.0) -> Ranks:
        command = [sys.executable, "-m", "commute", "run", "-n", str(size), *flags, PROGRAM, part]
        return Ranks(job(command, env=env, timeout=timeout), size)

    return start


def test_everything_in_groups(run, memory):
    """Groups of 1 to 4 ranks, groups of groups and splits work where the world does."""
    told = run(4, "places").all_fine()
    place = "memory" if memory else "loopback"

    both = {"(3, 2, 1, 0)": place, "half": place}
    inner = {"(2, 3, 0)": place, "(0, 2)": place}
    # Alone there is nobody to share memory with.
    assert told[0]["places"] == {"(0,)": "loopback", **inner, **both}
    assert told[1]["places"] == {"(3, 1)": place, "(1,)": "loopback", **both}
    assert told[2]["places"] == {**inner, **both}
    assert told[3]["places"] == {"(3, 1)": place, "(2, 3, 0)": place, **both}


def test_groups_work_at_once_without_mixing(run):
    """Thousands of operations in groups that share ranks, a thread for each on every member."""
    run(3, "soak", timeout=58.0).all_fine()


def test_groups_may_be_used_first_in_any_order(run):
    """Opening a group waits for no call of another rank."""
    run(2, "any_order").all_fine()


def test_a_lost_rank_is_lost_to_its_groups(run):
    """Groups with the killed rank raise, used before or not; the others go on."""
    started = run(4, "lost", "--keep-going")
    processes = {me: line["ready"] for me, line in started.said("ready", 4).items()}
    os.kill(processes[2], signal.SIGKILL)
    told = started.said("fine", 3)

    assert sorted(told) == [0, 1, 3]
    expected = {"world": (2, {0, 1, 3}), "used": (1, {1, 3}), "unused": (0, {0, 3})}
    for name, (rank, members) in expected.items():
        assert {me for me, line in told.items() if name in line} == members
        for me in members:
            error = told[me][name]
            assert (error["kind"], error["rank"]) == ("PeerLostError", rank), error
            assert error["pid"] == processes[2]
    assert "the group of ranks 3, 2, 1 of the world" in told[1]["used"]["notes"][0]


def test_a_group_that_a_member_has_left(run):
    """The others are told, and whether it left well; the world goes on."""
    told = run(3, "left").all_fine()

    assert told[2]["closed"]["kind"] == "ClosedError"
    for me in (0, 1):
        for name, cause in (
            ("well", "it had finished and left the group"),
            ("badly", "it left with RuntimeError: boom"),
            ("unused", "it had finished and left the group"),
        ):
            error = told[me][name]
            assert (error["kind"], error["rank"]) == ("PeerLostError", 0), (name, error)
            assert cause in error["text"], (name, error)


def test_what_breaks_a_group_is_told_to_its_members(run):
    """A mismatch reaches also the member that had not used the group yet; nothing else breaks."""
    told = run(3, "broken").all_fine()

    assert [told[me]["error"]["kind"] for me in range(3)] == ["MismatchError"] * 3
    for line in told.values():
        assert "allreduce of 3 float64" in line["error"]["text"]
        assert "allreduce of 4 float64" in line["error"]["text"]


def test_a_process_may_end_with_groups_open(run):
    run(2, "at_exit").all_fine()


def test_groups_that_come_and_go(run):
    """What a group held is gone with it."""
    told = run(2, "come_and_go").all_fine()

    for line in told.values():
        # The connector lets go of a link a moment after it was told to.
        assert line["counts"][-1][0] <= line["counts"][4][0] + 4, line
        assert line["counts"][-1][1] <= line["counts"][4][1], line


def test_a_group_without_memory(run, memory):
    """A rank that has no memory left for a group says so, and so does whoever meets it."""
    told = run(2, "no_memory").all_fine()

    if not memory:
        assert told[0]["error"] is told[1]["error"] is None
        return
    for line in told.values():
        assert line["error"]["kind"] == "CommuteError"
        assert "rank 1 has no memory to share" in line["error"]["text"]
        assert "group of ranks 1, 0" in line["error"]["text"]
