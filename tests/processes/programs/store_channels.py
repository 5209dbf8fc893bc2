# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_store_channels.py do: the first argument says which scenario."""

from __future__ import annotations

import os
import random
import re
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
from saying import (
    contribution,
    counted,
    counts,
    ready,
    run_as_rank,
    say,
    staleness_of,
    wait_for_file,
)

import commute

SHAPE = (131_072,)  # 1 MB, 16 chunks
CHUNK = 8192  # elements


# ---- cutting ----


def connections():
    """The connected sockets of this process, as copies, each with the name of its other end."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed since
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as found:
            try:
                yield found, found.getpeername()
            except OSError:  # it listens, or has ended
                continue


def open_store(world, **options):
    """A store, and the names of its servers' ends: what is connected to them is a channel."""
    for _ in range(2):  # whatever links the ranks need among themselves are there then
        world.allgather(np.zeros(4, dtype=np.int64))
        world.barrier()
    before = {name for _, name in connections()}
    store = world.store(**options)
    return store, {name for _, name in connections()} - before


def cut(servers):
    """Ends all channels, as a network does: in the middle of whatever travels. How many."""
    done = 0
    for connection, name in connections():
        if name in servers:
            try:
                connection.shutdown(socket.SHUT_RDWR)
                done += 1
            except OSError:  # it had ended
                pass
    return done


class Cutter:
    """A thread that cuts, now and then, while the other one waits."""

    def __init__(self, servers):
        self.cuts = 0
        self._servers = servers
        self._wanted = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def now(self):
        self.cuts += cut(self._servers)

    def soon(self):
        self._wanted.release()

    def _run(self):
        while self._wanted.acquire():
            self.now()


def held(pids):
    """How many descriptors, and how many bytes of memory, the processes have."""
    page = os.sysconf("SC_PAGE_SIZE")
    resident = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids]
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids], resident


def lets_go(pids, before, within=10.0):
    """Of what the channels that ended held nothing is kept: no descriptor, less memory than of two.

    The last ones take a moment.
    """
    until = time.monotonic() + within
    while True:
        files, memory = np.subtract(held(pids), before)
        if max(files) <= 0 and max(memory) < 32 << 20:
            return
        assert time.monotonic() < until, f"{files} more descriptors, {memory} more bytes"
        time.sleep(0.02)


def cuts(world):
    """Rounds with cut channels: before a push, in the middle of one, while an answer is awaited."""
    staleness, seed = staleness_of(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(1000 * seed + world.rank)
    store, servers = open_store(world, staleness=staleness)
    assert len(servers) == 2, servers
    cutter = Cutter(servers)
    w, mine = store.dense("w", SHAPE, "int64"), contribution(world, SHAPE)
    w.pull()
    world.barrier()
    everybody = [os.getpid(), *(int(pid) for pid in re.findall(r"pid (\d+)", str(w.info().slots)))]
    before = held(everybody)
    world.barrier()
    rounds = 40
    for number in range(1, rounds + 1):
        how = rng.randrange(5)
        if how == 0:
            cutter.now()
            value = w.push_pull(mine)
        elif how == 1:
            cutter.soon()
            value = w.push_pull(mine)
        elif how == 2:
            handle = w.push_async(mine)
            cutter.now()
            value = w.pull(fresh=True)
            handle.wait()
        elif how == 3:
            w.push(mine)
            cutter.soon()
            value = w.pull(fresh=True)
            cutter.now()
        else:
            value = w.push_pull(mine)
        check(value, number, world, staleness)
    store.flush()
    world.barrier()
    assert counted(w.pull(fresh=True), world.size) == [rounds] * world.size
    world.barrier()
    lets_go(everybody, before)
    world.barrier()
    return {"cuts": cutter.cuts}


def check(value, number, world, staleness):
    """Who is counted how often after my n-th push."""
    if staleness == 0:
        assert counted(value, world.size) == [number] * world.size, f"round {number}"
        return
    found = counts(value, world.size)
    assert found[world.rank].max() <= number
    assert found[world.rank].min() == number, f"my own pushes in round {number}"
    if staleness is not None:
        assert min(each.min() for each in found) >= number - staleness


def every_call(world):
    """A cut before each kind of call: it works, and does what it says once."""
    store, servers = open_store(world, staleness=0)
    size, made = world.size, 0

    def after_a_cut(call, *arguments, **options):
        nonlocal made
        made += cut(servers)
        return call(*arguments, **options)

    w = after_a_cut(store.dense, "w", SHAPE, "int64")
    v = after_a_cut(store.dense, "v", 1000, update=commute.SGD(lr=1.0), init=0.0)
    one = np.ones(SHAPE, "int64")
    for number in range(0, 40, 4):
        after_a_cut(w.push, one)
        assert (after_a_cut(w.pull) == size * (number + 1)).all()
        assert (after_a_cut(w.push_pull, one) == size * (number + 2)).all()
        assert (after_a_cut(w.push_pull_async, one).wait() == size * (number + 3)).all()
        after_a_cut(w.push, one, accumulate=True)
        assert after_a_cut(w.pull_async).wait()[0] == size * (number + 3)
        after_a_cut(store.tick)
        after_a_cut(w.push_async, -one).wait()
        after_a_cut(store.flush)
        assert after_a_cut(w.sum) == size * (number + 3) * one.size
        w.push_pull(one)
        world.barrier()
        # The same number of contributions to v: a tick each round, and this.
        if world.rank == 0:
            after_a_cut(v.set, lr=0.5)
        world.barrier()
        after_a_cut(v.push, np.full(1000, 2.0, "float32"))
        after_a_cut(v.norm)
        assert after_a_cut(v.top, 1)[1][0] == -size * (number // 4 + 1)
    after_a_cut(store.leave)
    return {"cuts": made}


# ---- clients that behave badly ----


def floods(world):
    """Rank 2 pushes and never waits; the others finish their rounds beside it."""
    store = world.store(staleness=None)
    w, mine = store.dense("w", SHAPE, "int64"), contribution(world, SHAPE)
    w.pull()
    ready(world)
    pushed = 0
    if world.rank == 2:
        wait_for_file("flood")
        while not Path("stop").exists():
            w.push(mine)
            pushed += 1
            if pushed == 200:
                say(flooding=True)
    else:
        wait_for_file("go")
        for _ in range(200):
            w.push_pull(mine)
            pushed += 1
        say(me=world.rank, done=pushed)
        wait_for_file("stop")
    store.flush()
    everyone = world.allgather(np.array(pushed))  # and so all have flushed
    assert counted(w.pull(), world.size) == everyone.tolist()
    world.barrier()
    return {"pushed": pushed}


def deaf(world):
    """Rank 2 pulls, or pushes, a large table over and over, until the test stops its process."""
    store = world.store(staleness=None)
    big = store.dense("big", (1 << 22,), "int64")  # 32 MB
    w = store.dense("w", SHAPE, "int64")
    mine, much = contribution(world, SHAPE), contribution(world, big.shape)
    big.push_pull(much)
    ready(world)
    pushed = 1
    if world.rank == 2:
        handles = []
        while not Path("stop").exists():
            if sys.argv[2] == "push":
                big.push(much)
                pushed += 1
                continue
            handles.append(big.pull_async(fresh=True))
            if len(handles) == 4:
                value = handles.pop(0).wait().reshape(-1, CHUNK)
                assert (value == value[:, :1]).all(), "a part of the table is torn"
    else:
        wait_for_file("go")
        for number in range(100):
            w.push_pull(mine)
            if number % 20 == 0:
                big.push(much)
                pushed += 1
        store.flush()
        say(me=world.rank, done=100)
        wait_for_file("stop")
    store.flush()
    everyone = world.allgather(np.array(pushed))
    assert counted(big.pull(), world.size) == everyone.tolist()
    assert counted(w.pull(), world.size) == [100, 100, 0]
    world.barrier()
    return {}


if __name__ == "__main__":
    run_as_rank(globals())
