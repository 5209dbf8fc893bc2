# SPDX-License-Identifier: Apache-2.0
"""Collectives between real processes, in shared memory and over TCP, started by `commute run`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "collectives.py"
FREE_BYTES_NEEDED = 16 << 30


@pytest.fixture(params=["1", "0"], ids=["shared", "tcp"])
def run(request, job, tmp_path):
    """Runs a part of the program on `size` ranks; all of them must come through."""
    env = {"COMMUTE_RECORDS": str(tmp_path), "COMMUTE_SHARED_MEMORY": request.param}
    command = [sys.executable, "-m", "commute", "run", "-n"]

    def whole(size, part, timeout=55.0):
        ended = job([*command, str(size), PROGRAM, part], env=env, timeout=timeout).wait()

        assert ended.code == 0, ended.out + ended.err
        assert ended.out.count(f"{part} ok on") == size, ended.out + ended.err
        return ended

    return whole


def available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


def test_everything_on_four_ranks(run):
    """What is beside test_cells.py: arrays that all reach, async, messages, own ops, torch."""
    run(4, "everything")


def test_three_ranks(run):
    """Not a power of two."""
    run(3, "everything")


def test_a_ufunc_that_raises(run):
    """It surfaces on its rank; nobody hangs, and the others are told what it was."""
    run(3, "raising")


def test_counts_that_do_not_agree(run):
    """An alltoall_v of which one rank expects less than another sends raises on all ranks."""
    run(3, "disagreeing")


def test_random_operations(run):
    """Thousands of small operations of random kinds and sizes give NumPy's answers."""
    run(4, "soak")


def test_one_rank_without_shared_memory(job, tmp_path):
    """Where ranks cannot have memory to share, TCP is used, all works, and one warning says so."""
    env = {"COMMUTE_RECORDS": str(tmp_path)}
    command = [sys.executable, "-m", "commute", "run", "-n", "4", PROGRAM, "limited"]
    ended = job(command, env=env).wait()

    assert ended.code == 0, ended.out + ended.err
    for rank, near in enumerate(("3", "nobody", "nobody", "0")):
        assert f"limited ok on {rank} of 4 with {near}" in ended.out
    assert ended.err.count("TCP is used") == 1
    assert "ranks 1, 2 have no memory to share (File too large); TCP is used" in ended.err


def test_persistent_operations(run):
    """Thousands of starts of the same operations, waited for in any order."""
    run(3, "persistent")


def test_eight_ranks_on_few_cores(run):
    run(8, "crowded")


def test_two_worlds_in_one_process(run):
    """Worlds of different names live side by side, and a name can be used again."""
    run(3, "two_worlds")


def test_waiting_costs_nothing(run):
    """A rank that waits for a second uses less than 5% of a core (CPU time, by getrusage)."""
    ended = run(2, "idle")
    lines = re.findall(r"(\w+) waited ([\d.]+) used ([\d.]+)", ended.out)
    print(ended.out)

    assert [what for what, _, _ in lines] == ["allreduce", "barrier", "recv", "wait"]
    for _, waited, used in lines:
        assert float(waited) > 1.0
        assert float(used) < 0.05 * float(waited)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_more_than_four_gibibytes(run):
    """One allreduce and one message of more than 4 GiB of uint8 between 2 ranks."""
    free = available_bytes()
    if free < FREE_BYTES_NEEDED:
        pytest.skip(f"needs 16 GiB of free memory, this machine has {free / 2**30:.1f}")
    run(2, "huge", timeout=220.0)


def test_without_a_launcher(job, tmp_path):
    """`python script.py` is a world of one, and every call works."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import commute, numpy\n"
        "with commute.init() as world:\n"
        "    print(world, world.allreduce(numpy.ones(2)), world.allgather(numpy.ones(1)))\n"
    )
    ended = job([sys.executable, script]).wait()

    assert ended.code == 0, ended.err
    assert f"<Group rank 0 of 1 on {os.uname().nodename}> [1. 1.] [[1.]]" in ended.out
