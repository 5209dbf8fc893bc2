# SPDX-License-Identifier: Apache-2.0
"""How ranks with a store talk to their test, and values that tell who was counted how often.

A contribution of rank r is 1 << 20 r in every element.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import commute


def say(**what):
    # One write per line, so that lines of several ranks do not mix.
    os.write(1, f"said {json.dumps(what)}\n".encode())


def ready(world):
    say(me=world.rank, ready=os.getpid())


def wait_for_file(name, within=40.0):
    until = time.monotonic() + within
    while not Path(name).exists():
        assert time.monotonic() < until, f"nobody has made {name}"
        time.sleep(0.01)
    return Path(name).read_text()


def leave_file(name, text):
    """It appears whole."""
    Path(f"{name}.new").write_text(text)
    Path(f"{name}.new").rename(name)


def staleness_of(text):
    return None if text == "None" else int(text)


def contribution(world, shape):
    return np.full(shape, 1 << 20 * world.rank)


def counts(value, size):
    """How often each rank is counted, per element."""
    return [value >> 20 * rank & (1 << 20) - 1 for rank in range(size)]


def counted(value, size):
    """As `counts`, of a value that must be the same everywhere."""
    assert (value == value[0]).all(), "the parts of the table are of different rounds"
    return [int(each[0]) for each in counts(value, size)]


def run_as_rank(functions):
    """Runs the function that the first argument names, in a world; what it returns is said."""
    with commute.init() as world:
        found = functions[sys.argv[1]](world)
    say(me=world.rank, fine=True, **(found or {}))
