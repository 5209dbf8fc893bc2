# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_sparse.py do: the first argument says which scenario.

Rank r of n adds 1 << (60 // n) r to rows of one element, so a row tells who is counted in it how
often.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
from saying import leave_file, ready, run_as_rank, say, staleness_of, wait_for_file
from store_channels import Cutter, open_store
from store_faults import outcome

COUNT = 30_000  # keys of a list: many messages to each shard


def keys_of(seed=1, count=COUNT):
    """Unsorted; the same on all ranks."""
    keys = np.random.default_rng(seed).integers(0, 2**64, size=count, dtype=np.uint64)
    return np.random.default_rng(seed).permutation(np.unique(keys))


def mine(world, keys):
    return np.full((len(keys), 1), 1 << 60 // world.size * world.rank)


def counts(value, size):
    """How often each rank is counted, per row."""
    bits = 60 // size
    return [value >> bits * rank & (1 << bits) - 1 for rank in range(size)]


def check(world, value, number, staleness):
    """Who is counted how often after my n-th push."""
    found = counts(value, world.size)
    assert (found[world.rank] == number).all(), f"my own pushes in round {number}"
    if staleness == 0:
        assert (np.array(found) == number).all(), f"round {number}"
    elif staleness is not None:
        assert min(each.min() for each in found) >= number - staleness


def at_the_end(world, store, e, keys, rounds):
    """All is committed and nobody pushes any more."""
    store.flush()
    world.barrier()
    assert (np.array(counts(e.pull(keys), world.size)) == rounds).all()
    assert e.count() == len(keys)
    world.barrier()


# ---- values ----


def rounds(world):
    """A dense table in step and three sparse ones with other bounds, in one loop."""
    store = world.store(staleness=0)
    w = store.dense("w", (1000,), "int64")
    keys = keys_of()
    tables = {
        staleness: store.sparse(f"e{staleness}", 1, "int64", staleness=staleness, cache_keys=cached)
        for staleness, cached in ((0, False), (2, True), (None, False))
    }
    number = 0
    for number in range(1, int(sys.argv[2]) + 1):
        for staleness, e in tables.items():
            rows, ticket = e.pull(keys, ticket=True)
            given = ticket if number % 2 else keys
            if number % 3:
                e.push(given, mine(world, keys))
                rows = e.pull(given, out=rows)
            else:
                rows = e.push_pull(given, mine(world, keys))
            check(world, rows, number, staleness)
        assert (w.push_pull(np.ones(1000, "int64")) == number * world.size).all()
        store.tick()
    for e in tables.values():
        at_the_end(world, store, e, keys, number)
    return {}


# ---- faults ----


def cuts(world):
    """Channels are cut, again and again, in the middle of lists that are many messages."""
    staleness, seed = staleness_of(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(1000 * seed + world.rank)
    store, servers = open_store(world, staleness=staleness)
    cutter = Cutter(servers)
    e = store.sparse("e", 1, "int64", cache_keys=world.rank % 2 == 0)
    keys, number = keys_of(), 0
    ticket = e.pull(keys, ticket=True)[1]
    world.barrier()
    for number in range(1, 31):
        given = rng.choice((keys, ticket))
        how = rng.randrange(4)
        if how == 0:
            cutter.now()
            value = e.push_pull(given, mine(world, keys))
        elif how == 1:
            cutter.soon()
            value = e.push_pull(given, mine(world, keys))
        elif how == 2:
            half = len(keys) // 2
            e.push(keys[:half], mine(world, keys)[:half], accumulate=True)
            cutter.now()
            e.push(keys[half:], mine(world, keys)[half:])
            cutter.soon()
            value = e.pull(given)
        else:
            handle = e.push_async(given, mine(world, keys))
            cutter.now()
            value = e.pull(given)
            handle.wait()
        check(world, value, number, staleness)
    at_the_end(world, store, e, keys, number)
    return {"cuts": cutter.cuts}


def server_lost(world):
    """Ranks push and pull until a server is killed; rank 2 waits for a round that nobody closes."""
    store = world.store(staleness=None)
    e = store.sparse("e", 1, "int64")
    never = store.sparse("never", 1, "int64", staleness=0)
    keys = keys_of(count=5000)
    ticket = e.pull(keys, ticket=True)[1]
    if world.rank == 2:
        never.push(keys, mine(world, keys))
    ready(world)

    def work():
        if world.rank == 2:
            never.pull(keys)
        while True:
            e.push_pull(keys, mine(world, keys))

    calls = (
        work,
        lambda: e.pull(ticket),
        lambda: e.push(ticket, mine(world, keys)),
        lambda: e.drop(keys),
        lambda: list(e.items()),
        e.count,
        store.flush,
        lambda: store.sparse("x", 3),
    )
    say(me=world.rank, errors=[outcome(call) for call in calls])
    world.close()
    say(me=world.rank, closed=True)
    return {}


def pushing(world):
    """The last rank is killed in the middle of a push; what it had flushed is there."""
    victim, staleness = world.size - 1, staleness_of(sys.argv[2])
    store = world.store(staleness=staleness)
    e = store.sparse("e", 1, "int64")
    keys, pushed, until = keys_of(), 0, None
    ready(world)
    while world.rank == victim:
        e.push(keys, mine(world, keys))
        pushed += 1
        if pushed % 5 == 0:
            store.flush()
            say(committed=pushed)
    while until is None or pushed < until:
        e.push_pull(keys, mine(world, keys))
        pushed += 1
        if until is None and world.rank == 0 and Path("killed").exists():
            until = pushed + 20
            leave_file("until", str(until))
        elif until is None and Path("until").exists():
            until = int(Path("until").read_text())
    store.flush()
    leave_file(f"pushed{world.rank}", str(pushed))
    totals = {rank: int(wait_for_file(f"pushed{rank}")) for rank in range(victim)}
    found = counts(e.pull(keys)[:, 0], world.size)
    for rank, total in totals.items():
        assert (found[rank] == total).all(), (rank, total)
    # Of each push a slot has all or nothing.
    order, slots = np.argsort(slot_of(keys)), np.sort(slot_of(keys))
    lost = found[victim][order]
    torn = int(np.count_nonzero((np.diff(lost) != 0) & (np.diff(slots) == 0)))
    say(me=world.rank, least=int(lost.min()), most=int(lost.max()), torn=torn)
    leave_file(f"looked{world.rank}", "")
    for rank in range(victim):  # whoever leaves first must not be what the others wait for
        wait_for_file(f"looked{rank}")
    return {}


def slot_of(keys):
    """As core/store/rows.h, of 1,024 slots."""
    mixed = keys ^ keys >> np.uint64(30)
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed >> np.uint64(54)


def interrupted(world):
    """Rank 0 waits in each way in turn; what it was interrupted in counts once all the same."""
    store = world.store(staleness=0)
    keys = keys_of()
    for what in ("pull", "push_pull", "wait", "push", "drop"):
        e = store.sparse(what, 1, "int64")
        world.barrier()
        handle = None
        if world.rank == 0:
            if what in ("pull", "push"):
                e.push(keys, mine(world, keys))
            if what == "wait":
                handle = e.push_pull_async(keys, mine(world, keys))
            if what == "drop":
                e.push(keys, mine(world, keys))
                e.push_async(keys, mine(world, keys))
            wait = {
                "pull": lambda e=e: e.pull(keys),
                "push_pull": lambda e=e: e.push_pull(keys, mine(world, keys)),
                "wait": handle and handle.wait,
                "push": lambda e=e: e.push(keys, mine(world, keys)),
                "drop": lambda e=e: e.drop([1]),
            }[what]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            say(waiting=what, pid=os.getpid())
            try:
                wait()
            except KeyboardInterrupt:
                say(interrupted=what)
        world.barrier()
        pushes = 2 if what in ("push", "drop") else 1
        while e.info().clock < pushes:  # of rank 0 what was interrupted before it was sent
            e.push(keys, mine(world, keys))
        if handle is not None:
            check(world, handle.wait(), 1, 0)
        check(world, e.pull(keys), pushes, 0)
        store.flush()
    return {}


if __name__ == "__main__":
    run_as_rank(globals())
