# SPDX-License-Identifier: Apache-2.0
"""Sparse tables between real processes: values, channels that break, workers and servers killed."""

from __future__ import annotations

import os
import signal

import pytest

PROGRAM = "sparse.py"


@pytest.mark.parametrize(
    ("size", "flags", "servers"),
    [
        (3, ["--servers", "1", "--shards", "1"], 1),
        (2, ["--servers", "3", "--shards", "1"], 3),
        (2, ["--servers", "1", "--shards", "5"], 1),
    ],
    ids=["3 with 1 server", "2 with 3 servers", "2 with 5 shards"],
)
def test_rounds(launched, replays, size, flags, servers):
    """Rows in step, with a bound and free, beside a dense table in one loop."""
    launched(size, PROGRAM, "rounds", 6, flags=flags).all_fine(size)

    assert len(replays.reports()) == servers


def test_more_ranks_than_cores(launched, replays):
    launched(8, PROGRAM, "rounds", 3).all_fine(8)

    assert len(replays.reports()) == 1


@pytest.mark.parametrize("staleness", ["0", "2", "None"])
def test_every_push_counts_once(launched, seed, staleness):
    """Channels of all workers are cut in the middle of lists that are many messages."""
    flags = ["--servers", "2", "--shards", "1"]
    told = launched(3, PROGRAM, "cuts", staleness, seed, flags=flags).all_fine(3)

    assert all(line["cuts"] >= 10 for line in told), told


@pytest.mark.parametrize("servers", [1, 3])
def test_killed_server(launched, replays, servers):
    """Every call of every worker raises SlotLostError; closing still works."""
    replays.expected = False
    flags = ["--servers", str(servers), "--shards", "1"]
    started = launched(3, PROGRAM, "server_lost", flags=flags)
    started.ranks(3)
    victim = started.servers(servers)[-1]
    os.kill(victim, signal.SIGKILL)
    told = started.said("errors", 3)
    started.said("closed", 3)
    started.all_fine(3)
    started.all_gone()

    for line in told:
        for error in line["errors"]:
            assert error and error["kind"] == "SlotLostError", line
            assert f"(pid {victim} on " in error["text"], line


@pytest.mark.parametrize("staleness", ["2", "None"])
def test_killed_worker(by_hand, replays, tmp_path, staleness):
    """In the middle of a push: what it had flushed is there, each push whole per slot."""
    started = by_hand(3, PROGRAM, "pushing", staleness)
    pids = started.ranks(3)
    started.said("committed", 3)
    os.kill(pids[2], signal.SIGKILL)
    started[2].wait()
    committed = max(line["committed"] for line in started.said("committed"))
    (tmp_path / "killed").touch()
    told = started.said("least", 2)
    codes = [started[rank].wait().code for rank in range(3)]
    started.all_gone()

    assert codes == [0, 0, -signal.SIGKILL], started.text
    for line in told:
        assert committed <= line["least"] <= line["most"] <= committed + 5, line
        assert line["torn"] == 0, line
    assert len(replays.reports()) == 1


def test_ctrl_c_in_every_wait(launched):
    """KeyboardInterrupt comes out of it; the table can be used on, and nothing counts twice."""
    started = launched(2, PROGRAM, "interrupted")
    whats = ("pull", "push_pull", "wait", "push", "drop")
    for number, what in enumerate(whats, 1):
        waiting = started.said("waiting", number)[-1]
        assert waiting["waiting"] == what
        os.kill(waiting["pid"], signal.SIGINT)
        started.said("interrupted", number, within=10.0)
    started.all_fine(2)
