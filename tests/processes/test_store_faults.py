# SPDX-License-Identifier: Apache-2.0
"""Faults, injected into real processes that share a store: who is told what, and what is counted.

Ranks whose death must not end the others are started by hand: `commute run` ends all of them.
"""

from __future__ import annotations

import os
import signal
import socket

import pytest

HOST = socket.gethostname()
PROGRAM = "store_faults.py"
NAMES = "server {} (pid {} on " + HOST + ")"


# ---- a worker is killed ----


@pytest.mark.parametrize("victim", [1, 0])
def test_in_step_a_lost_worker_is_named(by_hand, replays, victim):
    """Whoever waits for its round is told, and so is whoever comes later."""
    started = by_hand(3, PROGRAM, "in_step", victim, "default")
    pids = started.ranks(3)
    os.kill(pids[victim], signal.SIGKILL)
    told = started.said("errors", 2)
    survivors = [rank for rank in range(3) if rank != victim]
    codes = {rank: started[rank].wait().code for rank in range(3)}
    started.all_gone()

    assert sorted(line["me"] for line in told) == survivors
    for line in told:
        for error in line["errors"]:
            assert error and error["kind"] == "PeerLostError", line
            assert error["rank"] == victim
            assert f"rank {victim} was lost" in error["text"]
    assert codes == {victim: -signal.SIGKILL} | dict.fromkeys(survivors, 0), started.text
    assert len(replays.reports()) == 1


@pytest.mark.parametrize("victim", [1, 0])
def test_in_step_without_the_lost_worker(by_hand, replays, victim):
    """on_loss="continue": a hundred more rounds, each the sum of those who are left."""
    started = by_hand(3, PROGRAM, "in_step", victim, "continue")
    pids = started.ranks(3)
    os.kill(pids[victim], signal.SIGKILL)
    told = started.said("rounds", 2)
    codes = {rank: started[rank].wait().code for rank in range(3)}
    started.all_gone()

    assert [line["rounds"] for line in told] == [105, 105]
    assert all(code == 0 for rank, code in codes.items() if rank != victim), started.text
    assert len(replays.reports()) == 1


@pytest.mark.parametrize(("staleness", "victim"), [("2", 1), ("2", 0), ("None", 1), ("None", 0)])
def test_what_a_lost_worker_had_committed_counts(by_hand, replays, tmp_path, staleness, victim):
    """Killed in the middle of a push: what it had flushed is there, each push whole per slot."""
    started = by_hand(3, PROGRAM, "pushing", victim, staleness)
    pids = started.ranks(3)
    started.said("committed", 5)
    os.kill(pids[victim], signal.SIGKILL)
    started[victim].wait()
    committed = max(line["committed"] for line in started.said("committed"))
    (tmp_path / "killed").touch()
    told = started.said("least", 2)
    codes = {rank: started[rank].wait().code for rank in range(3)}
    started.all_gone()

    assert all(code == 0 for rank, code in codes.items() if rank != victim), started.text
    for line in told:
        assert committed <= line["least"] <= line["most"] <= committed + 10, line
        assert line["steps"] < line["parts"], line
    assert len({(line["least"], line["most"]) for line in told}) == 1
    assert len(replays.reports()) == 1


@pytest.mark.parametrize("staleness", ["0", "None"])
def test_a_worker_that_comes_back_from_the_dead(by_hand, tmp_path, staleness):
    """It was silent, and the others went on without it: it is told, and what it pushes is late."""
    started = by_hand(3, PROGRAM, "revived", staleness, env={"COMMUTE_PEER_TIMEOUT": "1"})
    pids = started.ranks(3)
    os.kill(pids[2], signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    rounds = started.said("counted", 2)
    (tmp_path / "revived").touch()
    # At None nobody waits for it, so nobody has noticed yet.
    started[0].wait_for("rank 2 was lost", timeout=20.0)
    os.kill(pids[2], signal.SIGCONT)
    (told,) = started.said("errors", 1)
    (tmp_path / "told").touch()
    late = started.said("late", 2)
    for each in started.jobs:
        each.wait()
    started.all_gone()

    assert [line["counted"][2] for line in rounds] == [5, 5]
    # In step, it has no part in the rounds of the others. Otherwise what it is not told to be lost
    # counts, once.
    if staleness == "0":
        assert all(told["errors"]), told
    assert [line["late"] for line in late] == [[106, 106, 5 + told["errors"].count(None)]] * 2


def test_a_server_that_cannot_start(by_hand, replays):
    """Rank 0 fails at once, and the others are told; nobody waits for join_timeout."""
    replays.expected = False
    started = by_hand(3, PROGRAM, "no_server")
    told = {line["me"]: line["errors"][0] for line in started.said("errors", 2)}
    codes = [each.wait().code for each in started.jobs]

    assert codes == [1, 0, 0], started.text
    assert "JoinError: a server of the store ended (exit code 1)" in started[0].err
    assert sorted(told) == [1, 2]
    for error in told.values():
        assert error and error["kind"] == "PeerLostError" and error["rank"] == 0, told
        assert "JoinError: a server of the store ended" in error["text"]


# ---- a server is killed, stopped, or pressed Ctrl-C at ----


def check_lost_server(told, server, pid):
    assert sorted(line["me"] for line in told) == [0, 1, 2]
    for line in told:
        for error in line["errors"]:
            assert error and error["kind"] == "SlotLostError", line
            assert NAMES.format(server, pid) in error["text"], line


@pytest.mark.parametrize("servers", [1, 2])
def test_killed_server(launched, replays, servers):
    """Every worker raises SlotLostError that names it, from every call; closing still works."""
    replays.expected = False  # a store that has lost slots is of no use: its other servers go too
    flags = ["--servers", str(servers), "--shards", "1"]
    started = launched(3, PROGRAM, "server_lost", flags=flags)
    started.ranks(3)
    victim = started.servers(servers)[-1]
    os.kill(victim, signal.SIGKILL)
    told = started.said("errors", 3)
    started.said("closed", 3)
    started.all_fine(3)
    started.all_gone()

    check_lost_server(told, servers - 1, victim)


def test_stopped_server(launched, replays):
    """Noticed by its silence; nobody waits for it at the end, and it is not left behind."""
    replays.expected = False
    flags = ["--servers", "2", "--shards", "1"]
    env = {"COMMUTE_PEER_TIMEOUT": "1"}
    started = launched(3, PROGRAM, "server_lost", flags=flags, env=env)
    started.ranks(3)
    victim = started.servers(2)[1]
    os.kill(victim, signal.SIGSTOP)
    told = started.said("errors", 3)
    started.said("closed", 3)
    started.all_fine(3)
    started.all_gone()

    check_lost_server(told, 1, victim)
    assert all("silent for " in error["text"] for line in told for error in line["errors"])


def test_ctrl_c_at_a_server(launched, tmp_path):
    """The workers decide when it is over."""
    started = launched(3, PROGRAM, "undisturbed")
    started.ranks(3)
    (server,) = started.servers()
    for _ in range(3):
        os.kill(server, signal.SIGINT)
    (tmp_path / "stop").touch()
    started.all_fine(3)


# ---- Ctrl-C and deadlines of a worker ----


def test_ctrl_c_in_every_wait(launched):
    """KeyboardInterrupt comes out of it; the store can be used on, and nothing counts twice."""
    started = launched(2, PROGRAM, "interrupted")
    whats = ("pull", "push_pull", "wait", "push", "flush")
    for number, what in enumerate(whats, 1):
        waiting = started.said("waiting", number)[-1]
        assert waiting["waiting"] == what
        os.kill(waiting["pid"], signal.SIGINT)
        started.said("interrupted", number, within=10.0)
    started.all_fine(2)

    assert [line["interrupted"] for line in started.said("interrupted")] == list(whats)


def test_interrupts_in_the_first_moments(launched):
    """Of a pull or push_pull: the arrays of the call stay its own until it is done."""
    started = launched(2, PROGRAM, "interrupted_at_once")
    started.all_fine(2)

    assert {line["me"]: line["caught"] for line in started.said("caught")} == {0: 20, 1: 0}


def test_deadlines_name_who_is_missing(launched):
    """OperationTimeoutError from each wait; the calls go on, and count once."""
    started = launched(3, PROGRAM, "deadlines")
    (told,) = started.said("errors", 1)
    started.all_fine(3)

    for what, error in told["errors"].items():
        assert error and error["kind"] == "OperationTimeoutError", (what, error)
        assert "has not finished after 0.2 s on rank 0" in error["text"]
    for what in ("pull", "wait", "push", "push_pull"):
        text = told["errors"][what]["text"]
        assert "'w'" in text
        assert "rank 1 has not pushed or ticked it (clock 0, mine is " in text, text
        assert "rank 2 has not declared it (clock 0, mine is " in text, text


@pytest.mark.parametrize("transport", ["1"], indirect=True, ids=["shared"])
def test_a_slow_rank_is_named_in_the_log(launched, tmp_path):
    """After ten seconds, once, while the call waits on."""
    started = launched(3, PROGRAM, "slow")
    started[0].wait_for("has waited 10 s", timeout=30.0)
    (tmp_path / "go on").touch()
    started.all_fine(3)
    line = next(line for line in started[0].err.splitlines() if "has waited" in line)

    assert "rank 0: push_pull of 'w' has waited 10 s; rank 1 has not pushed or ticked it" in line
    assert "; rank 2 has not" in line
    assert started.said("value") == [{"me": 0, "value": [1, 1, 1]}]
