# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces joined by a cable that can be cut.

Needs root and the command ip; skipped with the reason elsewhere.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cells import covered, written

PROGRAMS = Path(__file__).parent / "programs"
PORT = 29451


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


class Cable:
    """Two hosts, each a network namespace, with addresses of both families on one cable."""

    def __init__(self) -> None:
        self.hosts = [f"commute-{secrets.token_hex(4)}" for _ in range(2)]
        self.ends = [f"c{secrets.token_hex(4)}{side}" for side in "ab"]

    def make(self) -> None:
        for host in self.hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        first, second = self.ends
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for number, (host, end) in enumerate(zip(self.hosts, self.ends, strict=True), 1):
            ip("link", "set", end, "netns", host)
            ip("-n", host, "address", "add", f"10.213.7.{number}/24", "dev", end)
            ip("-n", host, "address", "add", f"fd00:c0::{number}/64", "dev", end, "nodad")
            ip("-n", host, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.hosts[0], "link", "set", self.ends[0], "down")

    def remove(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=20)
        subprocess.run(["ip", "link", "delete", self.ends[0]], capture_output=True, timeout=20)


@pytest.fixture
def cable(root_netns) -> Iterator[Cable]:
    made = Cable()
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture
def on_both(cable, job, tmp_path):
    """Starts `commute run` on both hosts, two ranks each; the two jobs."""

    def start(endpoint, program, *arguments):
        env = {"COMMUTE_TOKEN": secrets.token_hex(32), "COMMUTE_RECORDS": str(tmp_path / "records")}
        jobs = []
        for node, host in enumerate(cable.hosts):
            inside = ["ip", "netns", "exec", host, sys.executable, "-m", "commute", "run"]
            flags = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
            command = [*inside, *flags, "--rdzv-endpoint", endpoint, PROGRAMS / program]
            jobs.append(job([*command, *arguments], env=env, timeout=55.0))
        return jobs

    return start


@pytest.mark.parametrize("endpoint", [f"10.213.7.1:{PORT}", f"[fd00:c0::1]:{PORT}"])
def test_two_hosts(on_both, endpoint):
    """Everything but the plain calls between two hosts with two ranks each, by IPv4 and IPv6."""
    jobs = on_both(endpoint, "collectives.py", "everything")
    ended = [each.wait() for each in jobs]

    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    for node, each in enumerate(ended):
        for rank in (2 * node, 2 * node + 1):
            assert f"everything ok on {rank} of 4 with {rank ^ 1}" in each.out
    said = "".join(each.err for each in ended)
    assert said.count("share no memory") == 1
    assert "ranks 0 and 2 (and 3 more pairs) run on one machine" in said


def test_two_hosts_against_numpy(on_both, run_seed, tmp_path):
    """Every algorithm between two hosts: the cells that a cover has for four ranks on TCP."""
    cells = [cell for cell in covered("tcp", run_seed) if cell.ranks == 4]
    listed = tmp_path / "cells.json"
    listed.write_text(written(cells))
    jobs = on_both(f"10.213.7.1:{PORT}", "covered.py", listed, str(run_seed))
    ended = [each.wait() for each in jobs]

    assert [each.code for each in ended] == [0, 0], [each.out + each.err for each in ended]
    assert sum(each.out.count(f"{len(cells)} cells ok on") for each in ended) == 4


def test_two_hosts_random_operations(on_both):
    """Shared memory inside each host, TCP between them: thousands of operations agree."""
    ended = [each.wait() for each in on_both(f"10.213.7.1:{PORT}", "collectives.py", "soak")]

    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert sum(each.out.count("soak ok on") for each in ended) == 4


def test_groups_on_two_hosts(on_both):
    """A group within a host works in shared memory, others by links; all against NumPy."""
    ended = [each.wait() for each in on_both(f"10.213.7.1:{PORT}", "groups.py", "places")]

    assert [each.code for each in ended] == [0, 0], [each.out + each.err for each in ended]
    text = "".join(each.out for each in ended)
    told = [json.loads(found) for found in re.findall(r"said (\{.*\})$", text, re.M)]
    assert sorted(line["me"] for line in told) == [0, 1, 2, 3]
    for line in told:
        assert line["places"]["half"] == "memory"
        assert line["places"]["(3, 2, 1, 0)"] == "tcp"


def test_a_store_on_two_hosts(on_both):
    """One server per host, started there; shared memory to the one, TCP to the other."""
    ended = [each.wait() for each in on_both(f"10.213.7.1:{PORT}", "store.py", "rounds", "20")]

    assert [each.code for each in ended] == [0, 0], [each.out + each.err for each in ended]
    assert sum(each.out.count('"fine": true') for each in ended) == 4
    for server in ("server 0", "server 1"):
        assert all(server in each.out for each in ended), "both hold parts of the large table"


def test_cut_cable(on_both, cable):
    """The cable is cut with the default peer_timeout: all ranks raise within 5 s and can close."""
    jobs = on_both(f"10.213.7.1:{PORT}", "failures.py", "cut", "5")
    for rank in range(4):
        jobs[rank // 2].wait_for(f"ready {rank} ")
    at = time.time()
    cable.cut()
    until = time.monotonic() + 20
    told: list[dict] = []
    while len(told) < 8:
        assert time.monotonic() < until, [each.out + each.err for each in jobs]
        text = "".join(each.out for each in jobs)
        told = [json.loads(found) for found in re.findall(r"said (\{.*\})$", text, re.M)]
        time.sleep(0.05)
    errors = {line["me"]: line for line in told if "kind" in line}
    closing = [line["closed_after"] for line in told if "closed_after" in line]
    print({me: round(line["at"] - at, 3) for me, line in errors.items()}, closing)

    assert sorted(errors) == [0, 1, 2, 3]
    for me, line in errors.items():
        assert line["kind"] == line["again"] == "PeerLostError", line
        assert line["rank"] // 2 != me // 2, f"rank {me} blames its own side: {line['text']}"
        assert line["at"] - at < 5.0
    assert max(closing) < 6.0
