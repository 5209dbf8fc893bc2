# SPDX-License-Identifier: Apache-2.0
"""`commute run` with real processes: output, failures, signals, and that nothing outlives it.

The `job` fixture fails a test that leaves a process behind.
"""

from __future__ import annotations

import os
import pty
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = [sys.executable, "-m", "commute", "run"]

# What the ranks do is the first argument; the rest of the script tells who it is.
SCRIPT = """
import os, signal, subprocess, sys, time
rank, size = int(os.environ["COMMUTE_RANK"]), int(os.environ["COMMUTE_SIZE"])
what = sys.argv[1]
if what == "hello":
    print("hello from", rank, "of", size, sys.argv[2:])
    print("warning", file=sys.stderr)
elif what == "fail":
    if rank == 2:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("the reason") from error
    print("waiting")
    time.sleep(60)
elif what == "exit":
    sys.exit(int(sys.argv[2]) if rank == 1 else 0)
elif what == "late":
    # Rank 0 ends well while the other fails.
    time.sleep(0.5 * rank)
    sys.exit(7 * rank)
elif what == "signal":
    if rank == 1:
        os.kill(os.getpid(), int(sys.argv[2]))
    time.sleep(60)
elif what == "sleep":
    print("ready", flush=True)
    time.sleep(60)
elif what == "grandchild":
    subprocess.Popen(["sleep", "300"])
    print("ready", flush=True)
    time.sleep(60)
elif what == "stubborn":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        time.sleep(60)
elif what == "polite":
    signal.signal(signal.SIGTERM, lambda *_: (print("goodbye"), sys.exit(0)))
    open(f"ready{rank}", "w").close()
    while not all(os.path.exists(f"ready{r}") for r in range(size)):
        time.sleep(0.02)
    if rank == 0:
        sys.exit(5)
    time.sleep(60)
elif what == "bytes":
    os.write(1, b"\\xff\\xfe raw\\n" + b"x" * 3_000_000 + b"\\nno end")
elif what == "flood":
    while True:
        os.write(1, b"y" * 99 + b"\\n")
"""


@pytest.fixture
def run(job: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Starts `commute run` with the script above."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(*arguments: str, flags: tuple[str, ...] = ("-n", "3"), **options: Any) -> Any:
        return job([*RUN, *flags, str(script), *arguments], **{"timeout": 30.0, **options})

    return start


def ready(started: Any, count: int) -> None:
    """Waits until this many ranks have printed "ready"."""
    until = time.monotonic() + 20.0
    while started.out.count("ready") < count:
        assert time.monotonic() < until, started.out + started.err
        time.sleep(0.02)


def state(pid: int) -> str:
    """The kernel's letter for what the process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ---- output ----


def test_every_line_carries_its_rank(run):
    """stdout and stderr stay apart, and the arguments reach the script untouched."""
    ended = run("hello", "-n", "7", "--", "a b").wait()

    assert ended.code == 0
    rest = "['-n', '7', '--', 'a b']"
    assert sorted(ended.out.splitlines()) == [f"[{r}] hello from {r} of 3 {rest}" for r in range(3)]
    assert sorted(ended.err.splitlines()) == [f"[{r}] warning" for r in range(3)]


def test_eight_ranks(run):
    ended = run("hello", flags=("-n", "8")).wait()

    assert ended.code == 0
    assert {line.split()[0] for line in ended.out.splitlines()} == {f"[{r}]" for r in range(8)}


def test_odd_output(job, tmp_path):
    """Bytes that are no text, a line of 3 MB and one without an end all arrive."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = " ".join([*RUN, "-n", "1", str(script), "bytes"])
    ended = job(["sh", "-c", f"{command} > out.bin"], timeout=30.0).wait()
    out = (tmp_path / "out.bin").read_bytes()

    assert ended.code == 0
    assert out.startswith(b"[0] \xff\xfe raw\n[0] xxx")
    assert out.count(b"x") == 3_000_000
    assert out.endswith(b"\n[0] no end\n")


def test_a_reader_that_goes_away(job, tmp_path):
    """`commute run ... | head` ends the job, without a complaint."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = " ".join([*RUN, "-n", "2", str(script), "flood"])
    ended = job(["bash", "-c", f"{command} | head -n 3; exit ${{PIPESTATUS[0]}}"]).wait()

    assert ended.code == 128 + signal.SIGPIPE
    assert len(ended.out.splitlines()) == 3
    assert ended.err == ""


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_on_a_terminal(tmp_path, no_color):
    """Prefixes are coloured on a terminal, and not with NO_COLOR."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "TERM": "xterm", **({"NO_COLOR": "1"} if no_color else {})}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*RUN, "-n", "2", str(script), "hello"], env)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # Linux's way to say that the other end is closed
        pass
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert (b"[1] hello" in shown) == no_color
    assert (re.search(rb"\x1b\[\d+m\[1\]\x1b\[0m hello", shown) is not None) != no_color


# ---- failures ----


def test_the_first_failure_is_told_last(run):
    """The others are ended within seconds; the traceback with its cause comes last."""
    began = time.monotonic()
    ended = run("fail", flags=("-n", "4")).wait()
    report = ended.err[ended.err.index("commute: rank 2 failed first") :]

    assert time.monotonic() - began < 10.0
    assert ended.code == 1
    host = re.escape(socket.gethostname())
    assert re.match(
        rf"commute: rank 2 failed first \(exit code 1, on host {host}, pid \d+\):", report
    )
    assert "KeyError: 'key'" in report
    assert report.endswith("ValueError: the reason\n")


@pytest.mark.parametrize("code", [1, 3, 77, 255])
def test_exit_codes(run, code):
    assert run("exit", str(code)).wait().code == code


def test_the_others_go_on_when_asked_to(run):
    """With --keep-going nobody is ended, and the failure is still told and returned."""
    ended = run("late", flags=("-n", "3", "--keep-going")).wait()

    assert ended.code == 7, ended.out + ended.err
    assert "rank 1 failed (exit code 7); the others go on" in ended.err
    assert "ending the others" not in ended.err


def test_a_rank_that_is_done_is_no_failure(run):
    ended = run("late", flags=("-n", "2")).wait()

    assert ended.code == 7
    assert "rank 1 failed first (exit code 7" in ended.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_killed_by_a_signal(run, number):
    """The signal is named, and the code is the shell's."""
    ended = run("signal", str(int(number))).wait()

    assert ended.code == 128 + number
    assert f"rank 1 failed first (killed by {number.name}" in ended.err


def test_the_rest_may_say_goodbye(run):
    """Ranks that are ended because another failed get SIGTERM first."""
    ended = run("polite").wait()

    assert ended.code == 5
    assert ended.out.count("goodbye") == 2


def test_a_stubborn_rank_is_killed(run):
    """SIGTERM is followed by SIGKILL: a rank that ignores it holds nobody up."""
    started = run("stubborn", flags=("-n", "2"))
    ready(started, 2)
    began = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    ended = started.wait()

    assert ended.code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 8.0


# ---- signals to the launcher ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ending_the_launcher_ends_all(run, number):
    started = run("sleep")
    ready(started, 3)
    began = time.monotonic()
    started.process.send_signal(number)
    ended = started.wait()

    assert ended.code == 128 + number
    assert time.monotonic() - began < 3.0
    assert ended.err.count("KeyboardInterrupt") == (3 if number == signal.SIGINT else 0)


def test_a_second_ctrl_c_kills(run):
    started = run("stubborn")
    ready(started, 3)
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    started.wait_for("Ctrl-C")
    started.process.send_signal(signal.SIGINT)
    ended = started.wait()

    assert ended.code == 130
    assert time.monotonic() - began < 2.0


def test_ctrl_z_stops_all(run):
    """Stopped and continued, the job goes on as if nothing had been."""
    started = run("sleep", flags=("-n", "2"))
    ready(started, 2)
    started.process.send_signal(signal.SIGTSTP)
    stopped = [pid for pid in started.pids() if state(pid) == "T"]
    until = time.monotonic() + 5.0
    while len(stopped) < 3 and time.monotonic() < until:
        time.sleep(0.02)
        stopped = [pid for pid in started.pids() if state(pid) == "T"]
    started.process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    going = [pid for pid in started.pids() if state(pid) != "T"]
    started.process.send_signal(signal.SIGINT)

    assert len(stopped) == 3
    assert len(going) == 4  # with the guardian, which never stopped
    assert started.wait().code == 130


def test_kill_9_leaves_no_orphan(run):
    """Neither ranks nor what they have started outlive a launcher that had no chance to react."""
    started = run("grandchild")
    ready(started, 3)
    before = started.pids()
    started.process.kill()
    ended = started.wait()
    until = time.monotonic() + 5.0
    while started.pids() and time.monotonic() < until:
        time.sleep(0.02)

    assert ended.code == -signal.SIGKILL
    assert len(before) == 1 + 1 + 3 + 3  # launcher, guardian, ranks, what they have started
    assert started.pids() == []


def test_what_a_rank_leaves_behind_ends_with_it(job, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import subprocess\nprint(subprocess.Popen(['sleep', '300']).pid)\n")
    started = job([*RUN, "-n", "2", str(script)], timeout=20.0)

    assert started.wait().code == 0
    assert len(started.out.splitlines()) == 2
    assert started.pids() == []


# ---- what is run ----


def test_environment_of_the_ranks(job, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "names = sorted(n for n in os.environ if n.startswith('COMMUTE'))\n"
        "print(*(f'{n}={os.environ[n]}' for n in names), os.environ['PYTHONUNBUFFERED'],"
        " repr(sys.stdin.read()), os.getpgrp() == os.getpid())\n"
    )
    ended = job([*RUN, "-n", "2", str(script)], env={"COMMUTE_LEVEL": "kept"}).wait()
    lines = sorted(ended.out.splitlines())

    assert ended.code == 0
    for rank, line in enumerate(lines):
        assert re.fullmatch(
            rf"\[{rank}\] COMMUTE_COORDINATOR=127\.0\.0\.1:\d+ COMMUTE_LEVEL=kept "
            rf"COMMUTE_LOCAL_RANK={rank} COMMUTE_LOCAL_SIZE=2 COMMUTE_RANK={rank} "
            rf"COMMUTE_RUN=[0-9a-f]{{16}} COMMUTE_SIZE=2 COMMUTE_TOKEN=[0-9a-f]{{64}} 1 '' True",
            line,
        )


def test_a_module(job, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    ended = job([*RUN, "-n", "1", "-m", "package.train", "--x"], timeout=20.0).wait()

    assert (ended.code, ended.out) == (0, "[0] __main__ ['--x']\n")


def test_a_program(job):
    ended = job([*RUN, "-n", "2", "--no-python", "sh", "-c", "echo $COMMUTE_RANK"]).wait()

    assert (ended.code, sorted(ended.out.split("\n"))) == (0, ["", "[0] 0", "[1] 1"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py' in "),
        (["package.train"], "add -m"),
        (["--no-python", "nowhere"], "there is no program 'nowhere'"),
        (["-n", "0", "x.py"], "-n should be"),
    ],
)
def test_what_cannot_be_run(job, flags, said):
    """One message instead of one from every rank."""
    ended = job([*RUN, *flags], timeout=20.0).wait()

    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


# ---- two nodes: two launchers on loopback ----


@pytest.fixture
def nodes(run) -> Callable[..., tuple[Any, Any]]:
    """Starts two launchers with two ranks each; what they are told may differ."""

    def start(*arguments: str, change: dict[str, str] | None = None) -> tuple[Any, Any]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        token = secrets.token_hex(32)

        def node(rank: int, token: str) -> Any:
            flags = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", endpoint)
            return run(*arguments, flags=(*flags, "-n", "2"), env={"COMMUTE_TOKEN": token})

        return node(0, token), node(1, (change or {}).get("token", token))

    return start


def test_two_nodes(nodes):
    first, second = nodes("hello")
    ended = first.wait(), second.wait()

    assert [e.code for e in ended] == [0, 0]
    lines = sorted(ended[0].out.splitlines() + ended[1].out.splitlines())
    assert lines == [f"[{r}] hello from {r} of 4 []" for r in range(4)]


def test_a_failure_on_one_node_ends_the_other(nodes):
    """Both print the traceback of the rank that failed, and end with its code."""
    first, second = nodes("fail")
    began = time.monotonic()
    ended = first.wait(), second.wait()

    assert time.monotonic() - began < 10.0
    assert [e.code for e in ended] == [1, 1]
    for e in ended:
        assert "commute: rank 2 failed first (exit code 1" in e.err
        assert e.err.endswith("ValueError: the reason\n")


def test_ctrl_c_on_one_node_ends_the_other(nodes):
    first, second = nodes("sleep")
    ready(first, 2)
    ready(second, 2)
    second.process.send_signal(signal.SIGINT)
    ended = first.wait(), second.wait()

    assert [e.code for e in ended] == [130, 130]
    assert "its launcher was ended by Ctrl-C" in ended[0].err


def test_kill_9_of_node_0_ends_node_1(nodes):
    first, second = nodes("sleep")
    ready(first, 2)
    ready(second, 2)
    first.process.kill()
    ended = second.wait(10.0)
    first.wait()

    assert ended.code == 1
    assert "ending this node" in ended.err


def test_another_token_is_refused(nodes):
    first, second = nodes("sleep", change={"token": secrets.token_hex(32)})
    ended = second.wait()
    first.process.send_signal(signal.SIGINT)

    assert ended.code == 1
    assert "same token" in ended.err
    assert first.wait().code == 130
