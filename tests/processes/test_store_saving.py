# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between real processes: other numbers of ranks and servers, a death on the way."""

from __future__ import annotations

import os
import signal

PROGRAM = "store_saving.py"


def told_by(started, size, key="saved"):
    """What all ranks say alike."""
    (found,) = {repr(line[key]) for line in started.said(key, size)}
    return found


def test_three_servers_become_one_two_and_five(launched, tmp_path):
    """The same rows, tensors and clocks; and training goes on to the same bits."""
    path = tmp_path / "ck"
    first = launched(3, PROGRAM, "save", path, flags=["--servers", "3", "--shards", "1"])
    first.all_fine(3)
    for size, servers, shards in ((2, 1, 1), (1, 2, 2), (3, 5, 1)):
        flags = ["--servers", str(servers), "--shards", str(shards)]
        again = launched(size, PROGRAM, "load", path, flags=flags)
        again.all_fine(size)

        assert told_by(again, size) == told_by(first, 3)
        assert told_by(again, size, "later") == told_by(first, 3, "later")
    assert os.listdir(tmp_path).count("ck") == 1


def test_killed_while_saving(launched, replays, tmp_path):
    """The old checkpoint is there and whole; the next save removes what was left behind."""
    path = tmp_path / "ck"
    started = launched(2, PROGRAM, "slowly", path, flags=["--servers", "2"])
    saved = told_by(started, 2)
    for pid in started.ranks(2).values():
        os.kill(pid, signal.SIGKILL)
    started.jobs[0].wait()
    started.all_gone()
    left = [name for name in os.listdir(tmp_path) if name.startswith(".ck.tmp-")]
    again = launched(1, PROGRAM, "load", path)
    again.all_fine(1)
    launched(2, PROGRAM, "save", path).all_fine(2)

    assert len(left) == 1
    assert told_by(again, 1) == saved
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ck")]
    replays.expected = False


def test_a_damaged_checkpoint_is_refused_by_all(launched, tmp_path):
    """Whichever rank finds it."""
    path = tmp_path / "ck"
    launched(2, PROGRAM, "save", path).all_fine(2)
    segment = path / "segment-0002-of-0002.safetensors"
    with segment.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    started = launched(3, PROGRAM, "load", path)
    ended = started.jobs[0].wait()

    assert ended.code != 0
    assert started.text.count(f"CheckpointError: {segment} is damaged somewhere in bytes") >= 1
