# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_store_faults.py do: the first argument says which scenario.

The test waits for what is said here ("ready", "waiting"), injects its fault, and reads what every
rank says about it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from saying import (
    contribution,
    counted,
    counts,
    leave_file,
    ready,
    run_as_rank,
    say,
    staleness_of,
    wait_for_file,
)

import commute

SHAPE = (60_000,)  # several chunks of 64 KB


def table_of(world, store, name="w"):
    """A table, and what this rank pushes to it."""
    return store.dense(name, SHAPE, "int64"), contribution(world, SHAPE)


def outcome(call):
    """The error that a call raises, as a dictionary; None when it raises none."""
    try:
        call()
    except commute.CommuteError as error:
        return {
            "kind": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "text": str(error),
        }
    return None


# ---- a worker is lost ----


def in_step(world):
    """The victim is killed between its 5th and 6th round, while the others wait for it."""
    victim, on_loss = int(sys.argv[2]), sys.argv[3]
    store = world.store(staleness=0, on_loss=None if on_loss == "default" else on_loss)
    w, mine = table_of(world, store)
    for number in range(1, 6):
        assert counted(w.push_pull(mine), world.size) == [number] * world.size
    ready(world)
    if world.rank == victim:
        signal.pause()
    if on_loss == "continue":
        for number in range(6, 106):
            expected = [5 if rank == victim else number for rank in range(world.size)]
            assert counted(w.push_pull(mine), world.size) == expected
        say(me=world.rank, rounds=number)
        return
    w.push(mine)
    errors = [outcome(w.pull), outcome(w.pull), outcome(lambda: w.push_pull(mine))]
    say(me=world.rank, errors=errors)


def pushing(world):
    """The victim is killed in the middle of a push; what it had flushed is there."""
    victim = int(sys.argv[2])
    w, mine = table_of(world, store := world.store(staleness=staleness_of(sys.argv[3])))
    pushed = 0
    ready(world)
    if world.rank == victim:
        while True:
            w.push(mine)
            pushed += 1
            if pushed % 10 == 0:
                store.flush()
                say(committed=pushed)
    # The first of those who are left says when it is enough; the others are near it, or past it.
    others = [rank for rank in range(world.size) if rank != victim]
    until = None
    while until is None or pushed < until:
        w.push_pull(mine)
        pushed += 1
        if until is None and world.rank == others[0] and Path("killed").exists():
            until = pushed + 100
            leave_file("until", str(until))
        elif until is None and Path("until").exists():
            until = int(Path("until").read_text())
    store.flush()
    leave_file(f"pushed{world.rank}", str(pushed))
    totals = {rank: int(wait_for_file(f"pushed{rank}")) for rank in others}
    # All that the others pushed is committed, and nobody pushes any more.
    found = counts(w.pull(fresh=True), world.size)
    for rank, total in totals.items():
        assert (found[rank] == total).all(), (rank, total, found[rank].min(), found[rank].max())
    lost = found[victim]
    steps = int(np.count_nonzero(np.diff(lost)))
    parts = sum(w.info().slots.values())
    say(me=world.rank, least=int(lost.min()), most=int(lost.max()), steps=steps, parts=parts)
    leave_file(f"looked{world.rank}", "")
    for rank in others:  # whoever leaves first must not be what the others wait for
        wait_for_file(f"looked{rank}")


def revived(world):
    """Rank 2 is stopped until it counts as lost, and goes on when the others are far ahead."""
    staleness = staleness_of(sys.argv[2])
    w, mine = table_of(world, world.store(staleness=staleness, on_loss="continue"))
    for _ in range(5):
        w.push_pull(mine)
    world.barrier()
    ready(world)
    if world.rank == 2:
        wait_for_file("revived")
        first = outcome(lambda: w.push_pull(mine, timeout=20))
        say(me=2, errors=[first, outcome(lambda: w.push_pull(mine, timeout=20))])
        return
    wait_for_file("stopped")
    for _ in range(100):
        value = w.push_pull(mine)
    say(me=world.rank, counted=[int(each.max()) for each in counts(value, world.size)])
    wait_for_file("told")
    w.push_pull(mine)
    leave_file(f"pushed{world.rank}", "")
    wait_for_file(f"pushed{1 - world.rank}")
    say(me=world.rank, late=counted(w.pull(), world.size))
    leave_file(f"looked{world.rank}", "")
    wait_for_file(f"looked{1 - world.rank}")


def no_server(world):
    """The server cannot be started: rank 0 fails, and nobody waits for it."""
    if world.rank == 0:
        sys.executable = shutil.which("false")
        world.store()
    say(me=world.rank, errors=[outcome(world.store)])


# ---- a server is lost ----


def server_lost(world):
    """Two ranks push and pull, the third waits for a round that nobody closes."""
    w, mine = table_of(world, store := world.store(staleness=None))
    never = store.dense("never", SHAPE, "int64", staleness=0)
    w.push_pull(mine)
    if world.rank == 2:
        never.push(mine)
    ready(world)

    def work():
        if world.rank == 2:
            never.pull()
        while True:
            w.push_pull(mine)

    errors = [
        outcome(call)
        for call in (work, w.pull, lambda: w.push(mine), store.flush, lambda: store.dense("x", 3))
    ]
    say(me=world.rank, errors=errors)
    world.close()
    say(me=world.rank, closed=True)


def undisturbed(world):
    """Rounds until the test has made the file `stop`."""
    w, mine = table_of(world, world.store(staleness=0))
    number, stop = 0, np.zeros(1)
    while not stop[0]:
        number += 1
        assert counted(w.push_pull(mine), world.size) == [number] * world.size
        if number == 5:
            ready(world)
        stop[0] = Path("stop").exists()
        world.broadcast(stop)


# ---- Ctrl-C and deadlines ----


def interrupted(world):
    """Rank 0 waits in each way in turn; what it was interrupted in counts once all the same."""
    store = world.store(staleness=0)
    for what in ("pull", "push_pull", "wait", "push", "flush"):
        w, mine = table_of(world, store, what)
        world.barrier()
        handle = None
        if world.rank == 0:
            if what in ("pull", "push", "flush"):
                w.push(mine)
            if what == "flush":
                w.push_async(mine)
            if what == "wait":
                handle = w.push_pull_async(mine)
            wait = {
                "pull": w.pull,
                "push_pull": lambda w=w, mine=mine: w.push_pull(mine),
                "wait": handle and handle.wait,
                "push": lambda w=w, mine=mine: w.push(mine),
                "flush": store.flush,
            }[what]
            say(waiting=what, pid=os.getpid())
            try:
                wait()
            except KeyboardInterrupt:
                say(interrupted=what)
        world.barrier()
        pushes = 2 if what in ("push", "flush") else 1
        if world.rank == 1:
            for _ in range(pushes):
                w.push(mine)
        if handle is not None:
            assert counted(handle.wait(), world.size) == [1, 1]
        assert counted(w.pull(), world.size) == [pushes, pushes]
        store.flush()


def interrupted_at_once(world):
    """Signals come in the first moments of a wait, whose arrays nobody else holds."""

    def ring(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, ring)
    w, mine = table_of(world, world.store(staleness=0))
    caught = 0
    for number in range(1, 21):
        if world.rank == 0:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.005 * number)
                if number % 2:
                    w.push_pull(mine.copy())
                else:
                    w.push(mine)
                    w.pull()
            except KeyboardInterrupt:
                caught += 1
        world.barrier()
        if world.rank == 0 and w.info().clock < number:  # interrupted before it was sent
            w.push(mine)
        if world.rank == 1:
            w.push(mine)
        assert counted(w.pull(), world.size) == [number] * world.size
    say(me=world.rank, caught=caught)


def deadlines(world):
    """Rank 1 does not push, rank 2 does not even declare; rank 0's waits have deadlines."""
    store = world.store(staleness=0)
    if world.rank != 2:
        w, mine = table_of(world, store)
    world.barrier()
    if world.rank == 0:
        w.push(mine)
        handle = w.pull_async()
        errors = {
            "pull": outcome(lambda: w.pull(timeout=0.2)),
            "wait": outcome(lambda: handle.wait(timeout=0.2)),
            "push": outcome(lambda: w.push(mine, timeout=0.2)),
            "flush": outcome(lambda: store.flush(timeout=0.2)),
            "push_pull": outcome(lambda: w.push_pull(mine, timeout=0.2)),
        }
        say(me=0, errors=errors)
    world.barrier()
    if world.rank == 2:
        w, mine = table_of(world, store)
    if world.rank != 0:
        for _ in range(3):
            w.push(mine)
    # What passed its deadline goes on, and counts once.
    if world.rank == 0:
        assert counted(handle.wait(), world.size) == [1, 1, 1]
    assert counted(w.pull(), world.size) == [3, 3, 3]


def slow(world):
    """Rank 0 waits for longer than 10 seconds: a line says for whom."""
    logging.basicConfig(format="%(name)s %(message)s")
    w, mine = table_of(world, world.store(staleness=0))
    if world.rank == 0:
        say(me=0, value=counted(w.push_pull(mine), world.size))
        return
    wait_for_file("go on")
    w.push(mine)


if __name__ == "__main__":
    run_as_rank(globals())
