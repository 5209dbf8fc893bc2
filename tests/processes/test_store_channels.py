# SPDX-License-Identifier: Apache-2.0
"""Channels that break, and clients that behave badly: each push counts once, the others go on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

PROGRAM = "store_channels.py"
MIB = 1 << 20
# What a client may owe reading, and may have pushed and not committed (shard.h, table.py).
OWED = KEPT = 64 * MIB
SLACK = 32 * MIB  # buffers of sockets, the allocator's and the interpreter's own


def most_memory(pid: int) -> int:
    """The largest resident set that the process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def state(pid: int) -> str:
    """The kernel's letter for what the process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ---- channels break ----


@pytest.mark.parametrize("staleness", ["0", "2", "None"])
def test_every_push_counts_once(launched, seed, staleness):
    """Channels of all workers are cut, again and again, in the middle of whatever travels."""
    flags = ["--servers", "2", "--shards", "1"]
    started = launched(3, PROGRAM, "cuts", staleness, seed, flags=flags)
    told = started.all_fine(3)

    print({line["me"]: line["cuts"] for line in told})
    assert all(line["cuts"] >= 20 for line in told), told


def test_every_call_mends_its_channel(launched):
    """A cut before each kind of call."""
    told = launched(2, PROGRAM, "every_call").all_fine(2)

    assert all(line["cuts"] >= 60 for line in told), told


# ---- clients that behave badly ----


def test_a_client_that_floods(launched, tmp_path):
    """The others' rounds end beside it, and neither server nor client grows without bound."""
    started = launched(3, PROGRAM, "floods", flags=["--shards", "1"])
    pids = started.ranks(3)
    (server,) = started.servers()
    watched = (server, pids[2])
    before = [most_memory(pid) for pid in watched]
    (tmp_path / "flood").touch()
    started.said("flooding", 1)
    (tmp_path / "go").touch()
    started.said("done", 2)
    grown = [most_memory(pid) - was for pid, was in zip(watched, before, strict=True)]
    (tmp_path / "stop").touch()
    told = started.all_fine(3)

    print(f"server and flooding worker have grown by {[more // MIB for more in grown]} MiB; {told}")
    assert grown[0] < SLACK
    assert grown[1] < KEPT + SLACK
    assert [line["pushed"] for line in told if line["me"] != 2] == [200, 200]
    assert all(line["pushed"] >= 200 for line in told)


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_client_that_is_stopped(launched, tmp_path, verb):
    """In the middle of a large table: the others go on while it is stopped, and so does it after.

    It is not taken for dead meanwhile: its silence is shorter than peer_timeout.
    """
    env = {"COMMUTE_PEER_TIMEOUT": "50"}
    started = launched(3, PROGRAM, "deaf", verb, flags=["--shards", "1"], env=env)
    pids = started.ranks(3)
    (server,) = started.servers()
    before = most_memory(server)
    os.kill(pids[2], signal.SIGSTOP)
    (tmp_path / "go").touch()
    try:
        started.said("done", 2)
        stopped, grown = state(pids[2]), most_memory(server) - before
        (tmp_path / "stop").touch()
    finally:
        os.kill(pids[2], signal.SIGCONT)
    started.all_fine(3)

    print(f"the server has grown by {grown // MIB} MiB")
    assert stopped == "T"
    assert grown < OWED + SLACK
