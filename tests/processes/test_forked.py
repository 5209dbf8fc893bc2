# SPDX-License-Identifier: Apache-2.0
"""Forked processes are as new ones would be, and end with whoever forked them.

The `job` fixture fails a test that leaves a process behind.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)

FORKS = Path(__file__).parent / "programs" / "forks.py"


@pytest.fixture
def found(job: Any) -> Any:
    """`found("ends")` is what that part of the program has found."""

    def ended(part: str) -> Any:
        result = job([sys.executable, FORKS, part], timeout=30.0).wait()
        assert result.code == 0, result.err
        return json.loads(result.out)

    return ended


def test_how_it_ends(found):
    """Exit status, traceback and last words are those of a Python process."""
    ended = found("ends")

    assert ended["returned"] == [3, "", ""]
    status, out, err = ended["raised"]
    assert (status, out) == (1, "before\n")
    assert err.startswith("Traceback") and err.endswith("ZeroDivisionError: the reason\n")
    assert ended["exited"] == [4, "before\n", ""]
    assert ended["exited_well"] == [0, "before\n", ""]
    assert ended["exited_with_words"] == [1, "before\n", "words\n"]
    status, out, err = ended["interrupted"]
    assert (status, out) == (-signal.SIGINT, "before\n")
    assert err.endswith("KeyboardInterrupt\n")


def check_begins_anew(state: dict[str, Any]) -> None:
    assert state["files"] == [0, 1, 2]
    assert state["stdin"] == "/dev/null"
    assert state["handled"] == [signal.SIGINT] and state["interrupt"]
    assert state["masked"] == []
    assert state["wakeup"] == -1


def test_how_it_begins(found):
    """No open file of its parent, no handler, no mask."""
    check_begins_anew(found("begins"))


def test_a_function_as_a_rank(found):
    """It leads a group of its own, with exactly the environment it was given."""
    state = found("spawned")

    check_begins_anew(state)
    assert state["leads"]
    assert state["environment"] == ["COMMUTE_RANK", "PATH"]
    assert (state["status"], state["err"], state["rank"]) == (0, "", 5)


def test_a_rank_ends_with_its_launcher(job):
    """Also when the launcher is killed, and with all that the rank has started."""
    assert job([sys.executable, FORKS, "spawned_and_killed"]).wait().code == -signal.SIGKILL


def test_what_is_in_a_buffer_is_written_once(job):
    assert job([sys.executable, FORKS, "unflushed"]).wait().out == "once and no more\n"


def test_understudies(found):
    """One that is told does its part; one that is not, ends; one that is gone does no harm.

    Ctrl-C came before: it disturbs nobody who waits, and is not lost on the one that is told.
    """
    assert found("understudies") == {
        "before": None,
        "told": len("a word with a ü") + 100,  # and Ctrl-C came once
        "dismissed": 0,
        "killed": -signal.SIGKILL,
        "files": 4,  # the standard ones, and the one that lists them
        "threads": False,
    }


def test_understudies_of_a_process_that_is_killed(job):
    """The pipe ends with it, for no understudy holds the pipe of another."""
    ended = job([sys.executable, FORKS, "understudies_of_a_killed_process"]).wait()

    assert ended.code == -signal.SIGKILL
    assert len(json.loads(ended.out)["waiting"]) == 3


def run(job: Any, how: str) -> Any:
    command = [sys.executable, "-m", "commute", "run", "-n", "1", "--servers", "1"]
    return job([*command, FORKS, "server", how], timeout=40.0).wait()


def test_a_server_that_was_an_understudy(job):
    """It joins and serves, in a session of its own; one that is not needed goes on waiting."""
    ended = run(job, "well")
    served, after = (json.loads(line.partition("] ")[2]) for line in ended.out.splitlines())

    assert ended.code == 0, ended.err
    assert served == {
        "value": [1.0] * 4,
        "alone": True,
        "called": "commute-server",
        "stdout": "/dev/null",
    }
    assert after == {"served": 0, "waits": None}


def test_a_server_that_ends_before_it_has_joined(job):
    """As any server that does: whoever has started it says how it ended."""
    ended = run(job, "killed")

    assert ended.code == 1
    assert "a server of the store ended (exit code -9) before it had joined" in ended.err
