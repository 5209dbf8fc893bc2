# SPDX-License-Identifier: Apache-2.0
"""Faults, injected into real processes: nothing hangs, and every error names names.

Times that a promise gives (5 s after kill -9, peer_timeout + 1 s after SIGSTOP) are measured by the
ranks themselves and printed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "failures.py"
HOST = socket.gethostname()


@pytest.fixture(params=["1", "0"], ids=["shared", "tcp"])
def run(request, job, tmp_path):
    """Starts a scenario; recorder dumps go to a folder of the test."""
    env = {"COMMUTE_RECORDS": str(tmp_path / "records"), "COMMUTE_SHARED_MEMORY": request.param}

    def start(size, *arguments, timeout=50.0):
        command = [sys.executable, "-m", "commute", "run", "-n", str(size), PROGRAM, *arguments]
        return job(command, env=env, timeout=timeout)

    return start


def said(text: str) -> list[dict]:
    """What the ranks printed, in order."""
    return [json.loads(found) for found in re.findall(r"^\[\d+\] said (.*)$", text, re.M)]


def pids(started, size: int) -> dict[int, int]:
    """The process of each rank, once all are ready."""
    for rank in range(size):
        started.wait_for(f"ready {rank} ")
    found = re.findall(r"ready (\d+) (\d+)", started.out)
    return {int(rank): int(pid) for rank, pid in found}


def wait_for_said(started, count: int, timeout: float = 20.0) -> list[dict]:
    until = time.monotonic() + timeout
    while len(said(started.out)) < count:
        assert time.monotonic() < until, started.out + started.err
        time.sleep(0.02)
    return said(started.out)


def all_fine(ended, size: int) -> list[dict]:
    assert ended.code == 0, ended.out + ended.err
    told = [line for line in said(ended.out) if line.get("fine")]
    assert sorted(line["me"] for line in told) == list(range(size)), ended.out + ended.err
    return told


# ---- a rank is lost ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_lost_rank(run, number, request):
    """Every other rank's pending and next call raises, whatever it waits in."""
    peer_timeout = 5 if number == signal.SIGKILL else 1
    started = run(4, "lost", str(peer_timeout))
    processes = pids(started, 4)
    time.sleep(0.3)  # for a better test, not for its result: all are waiting by now
    at = time.time()
    os.kill(processes[2], number)
    errors = [line for line in wait_for_said(started, 6) if "kind" in line]
    if number == signal.SIGSTOP:
        os.kill(processes[2], signal.SIGKILL)
    started.wait()
    closing = [line["closed_after"] for line in said(started.out) if "closed_after" in line]
    took = [round(line["at"] - at, 3) for line in errors]
    print(f"{number.name}: noticed after {took} s, closed in {closing} s")

    assert sorted(line["me"] for line in errors) == [0, 1, 3]
    for line in errors:
        assert line["kind"] == line["again"] == "PeerLostError", line
        assert (line["rank"], line["host"], line["pid"]) == (2, HOST, processes[2])
        assert f"rank 2 (pid {processes[2]}, host {HOST}) was lost" in line["text"]
    # Whoever notices first, a peer or the coordinator, says how.
    cause = (
        "connection .*(closed|broke)" if number == signal.SIGKILL else "nothing was heard|silent"
    )
    assert all(re.search(cause, line["text"]) for line in errors), errors
    assert max(took) < (5.0 if number == signal.SIGKILL else peer_timeout + 1.0)
    assert max(closing) < 5.0


# Reducing arrays that all reach; exchanging rows: some wait for its counts, some for its rows, or
# for room to send to it; and blocks that are read in its memory, where the host allows that.
@pytest.mark.parametrize("during", ["reductions_in_place", "rows", "blocks"])
def test_lost_in_the_middle(run, during):
    """The others' calls raise, and their arrays are still theirs."""
    started = run(3, "lost_during", during)
    processes = pids(started, 3)
    time.sleep(0.2)  # for a better test, not for its result: all are in the middle of it by now
    os.kill(processes[2], signal.SIGKILL)
    told = wait_for_said(started, 4)
    started.wait()
    errors = [line for line in told if "kind" in line]

    assert sorted(line["me"] for line in errors) == [0, 1]
    for line in errors:
        assert line["kind"] == line["again"] == "PeerLostError", line
        assert f"rank 2 (pid {processes[2]}, host {HOST}) was lost" in line["text"]
    assert [line["left"] for line in told if "left" in line] == [1.0, 1.0]


@pytest.mark.parametrize("where", ["block", "end"])
def test_a_rank_that_raises_tells_the_others_why(run, where):
    """The exception of the rank that failed is in the others' PeerLostError."""
    ended = run(3, "raises", where).wait()
    errors = said(ended.out)

    assert ended.code == 1
    assert sorted(line["me"] for line in errors) == [0, 2], ended.out + ended.err
    for line in errors:
        assert line["kind"] == line["again"] == "PeerLostError"
        assert line["rank"] == 1
        assert "ValueError: the reason" in line["text"]
    report = ended.err[ended.err.index("commute: rank 1 failed first") :]
    assert "ValueError: the reason" in report


# ---- goodbyes that are no loss ----


def test_a_rank_that_leaves_politely(run):
    """What it sent before it left counts; only what is wanted from it later is a loss."""
    ended = run(3, "leaves").wait()
    told = said(ended.out)

    assert ended.code == 0, ended.out + ended.err
    assert sorted(line["me"] for line in told if line.get("fine")) == [1, 2]
    lost = [line for line in told if "kind" in line]
    assert [line["kind"] for line in lost] == ["PeerLostError"] * 2
    assert all(line["rank"] == 0 for line in lost)
    assert all("had finished and left" in line["text"] for line in lost), lost


def test_a_program_that_does_not_close(run):
    """Its end says goodbye: nobody is lost, nothing is printed."""
    ended = run(3, "forgets").wait()

    all_fine(ended, 3)
    assert ended.err == ""


def test_a_large_broadcast_whose_root_ends_at_once(run):
    all_fine(run(3, "large_goodbye").wait(), 3)


# ---- no deaths ----


def test_holding_the_interpreter_is_no_death(run):
    """Python code that lets no other thread run for 10 x peer_timeout: heartbeats go on."""
    all_fine(run(3, "interpreter_held").wait(), 3)


def test_loaded_cores_are_no_death(run, job):
    """8 ranks, with busy loops on all cores beside them and peer_timeout=1."""
    burn = [sys.executable, "-c", "while True: pass"]
    busy = [job(burn, timeout=60.0) for _ in range(os.cpu_count() or 2)]
    told = all_fine(run(8, "loaded").wait(), 8)
    print(f"{told[0]['rounds']} rounds")

    assert all(each.process.poll() is None for each in busy)


# ---- Ctrl-C, fork, close ----


def test_ctrl_c_returns_from_every_wait(run):
    """KeyboardInterrupt comes out of each wait within about a second; the other rank is told."""
    started = run(2, "interrupted")
    took = {}
    for what in ("allreduce", "recv", "barrier", "wait", "send", "init"):
        started.wait_for(f"waiting {what} ")
        pid = int(re.search(rf"waiting {what} (\d+)", started.out)[1])
        time.sleep(0.3)  # for a better test, not for its result: it waits by now
        at = time.time()
        os.kill(pid, signal.SIGINT)
        started.wait_for(f'"interrupted": "{what}"')
        line = next(line for line in said(started.out) if line.get("interrupted") == what)
        took[what] = round(line["at"] - at, 3)
    ended = started.wait()
    print(f"KeyboardInterrupt after {took} s")
    told = [line for line in said(ended.out) if "told" in line]

    all_fine(ended, 2)
    assert max(took.values()) < 3.0
    assert [line["told"] for line in told] == ["allreduce", "recv", "barrier", "wait", "send"]
    for line in told:
        assert line["kind"] == "AbandonedError"
        assert "rank 0 gave up" in line["text"] and "KeyboardInterrupt" in line["text"]


def test_interrupt_at_once(run):
    """An interrupt in the first moments of a call breaks the group too, and the others are told."""
    ended = run(2, "interrupted_at_once").wait()
    told = {line["me"]: line for line in said(ended.out)}

    assert ended.code == 0, ended.out + ended.err
    assert told[0]["kind"] == "KeyboardInterrupt" and told[0]["again"] == "AbandonedError"
    assert told[1]["kind"] == told[1]["again"] == "AbandonedError"
    assert "rank 0 gave up" in told[1]["text"]


def test_plans_of_different_kinds(run):
    """One rank's plan sends messages, the other's reads outboxes: both find out."""
    ended = run(2, "other_plans").wait()
    told = said(ended.out)

    assert sorted(line["me"] for line in told) == [0, 1], ended.out + ended.err
    for line in told:
        assert line["kind"] == line["again"] == "MismatchError"
        assert "by another plan" in line["text"] and "same array, algorithm=" in line["text"]


def test_fork_after_init(run):
    """The child gets ForkedError and can end; the parents go on unharmed."""
    ended = run(2, "forked").wait()
    children = [line["child"] for line in said(ended.out) if "child" in line]

    assert [line["status"] for line in all_fine(ended, 2)] == [0, 0]
    assert children == [["ForkedError"] * 3] * 2


def test_close_is_bounded(run):
    """Operations under way, a thread that waits, twice: close returns; the other rank is told."""
    ended = run(2, "closes").wait()
    told = said(ended.out)
    mine = next(line for line in told if line["me"] == 0)
    other = [line for line in told if line["me"] == 1]

    assert ended.code == 0, ended.out + ended.err
    assert mine["took"] < 5.0 and not mine["stuck"]
    assert mine["kinds"] == ["ClosedError", "ClosedError"]
    assert other[0]["kind"] == "PeerLostError"
    assert other[1]["took"] < 5.0


# ---- mismatches, timeouts, the recorder ----


def test_mismatch_and_recorder(run, tmp_path):
    """MismatchError on all ranks with both calls in it, and a dump of the last operations each."""
    ended = run(4, "mismatched").wait()
    errors = said(ended.out)

    assert ended.code == 0, ended.out + ended.err
    assert sorted(line["me"] for line in errors) == [0, 1, 2, 3]
    assert {line["kind"] for line in errors} == {line["again"] for line in errors}
    assert {line["kind"] for line in errors} == {"MismatchError"}
    for line in errors:
        assert "called allreduce of 1000 float32 by sum" in line["text"]
        assert "rank 1 called allreduce of 1001 float32 by sum" in line["text"]
    for line in errors:
        (note,) = line["notes"]
        path = Path(note.removeprefix(f"the last operations of rank {line['me']}: "))
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        assert path.parent == tmp_path / "records"
        assert rows[0]["operation"] == "allreduce" and rows[0]["algorithm"] == "tree"
        assert rows[0]["state"] == "done"
        if line["me"] < 2:  # the two who clashed; another may have heard of it before its own call
            assert (rows[-1]["sequence"], rows[-1]["state"]) == (2, "failed")
            assert rows[-1]["count"] == 1000 + line["me"]


def test_timeout_names_who_is_missing(run):
    """OperationTimeoutError where the deadline was, AbandonedError elsewhere."""
    ended = run(3, "slow").wait()
    errors = {line["me"]: line for line in said(ended.out) if "kind" in line and "me" in line}

    assert ended.code == 0, ended.out + ended.err
    assert [errors[rank]["kind"] for rank in range(3)] == [
        "OperationTimeoutError",
        "AbandonedError",
        "AbandonedError",
    ]
    assert "timed out after 0.5 s on rank 0, waiting for rank" in errors[0]["text"]
    assert "1" in errors[0]["text"].partition("waiting for rank")[2]
    assert errors[1]["rank"] == errors[2]["rank"] == 0


# ---- strangers ----


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens, from /proc."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except OSError:
            continue
        if found:
            inodes.add(found[1])
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def knock(port: int, data: bytes, *, reset: bool = False) -> bytes:
    """Sends bytes, reads until the other side closes; what it had said."""
    with socket.create_connection(("127.0.0.1", port), timeout=15) as connection:
        answer = b""
        try:
            connection.sendall(data)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return answer
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                answer += part
        except OSError:  # it closed, or reset, while we were still talking
            pass
        return answer


def test_strangers_at_the_ports(run, tmp_path):
    """Garbage, truncated, oversized, forged: closed and counted; the job does not notice."""
    stop = tmp_path / "stop"
    started = run(3, "bothered", str(stop))
    processes = pids(started, 3)
    members = [port for pid in processes.values() for port in listening_ports(pid)]
    (coordinator,) = listening_ports(started.process.pid)
    forged = b"commute1" + secrets.token_bytes(152)
    strange = [
        secrets.token_bytes(160),
        secrets.token_bytes(1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
        b"\xff" * 4096,
        b"\0" * 160,
        forged,
        forged + struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000,
    ]
    truncated = [b"", b"c", b"commute1", forged[:159]]
    for port in [*members, coordinator]:
        for data in [*strange, *truncated]:
            answer = knock(port, data)
            assert answer[:8] in (b"", b"commute1") and len(answer) <= 40, answer
        knock(port, b"commute1", reset=True)
    stop.touch()
    told = all_fine(started.wait(), 3)

    assert len(members) == 3
    assert all(line["refused"] >= len(strange) for line in told), told


def test_two_jobs_do_not_mix(run, tmp_path):
    """A member of one job that dials another's coordinator has the wrong token."""
    stop = tmp_path / "stop"
    started = run(2, "bothered", str(stop))
    pids(started, 2)
    (port,) = listening_ports(started.process.pid)
    intruder = subprocess.run(
        [
            sys.executable,
            "-c",
            "import commute\n"
            f"commute.init(rank=0, size=2, coordinator='127.0.0.1:{port}', token='{'ab' * 32}',"
            " join_timeout=5)",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    stop.touch()

    all_fine(started.wait(), 2)
    assert intruder.returncode != 0
    assert re.search(r"AuthenticationError|JoinError", intruder.stderr), intruder.stderr
