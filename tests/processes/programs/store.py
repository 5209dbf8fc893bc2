# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_store.py do: the first argument says which part.

Contributions are whole numbers, so sums are exact in any order and NumPy's answer is the only one.
A part ends by saying `fine`; one that finds a wrong value raises.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import numpy as np
from saying import contribution, counted, ready, run_as_rank, say, wait_for_file

import commute


def given(rank, number, shape, dtype):
    """What a rank pushes in round `number`."""
    pattern = np.arange(math.prod(shape)).reshape(shape) % 13
    return np.asarray((pattern + rank + 1) * (number % 5 + 1), dtype)


def given_by_all(size, number, shape, dtype):
    pattern = np.arange(math.prod(shape)).reshape(shape) % 13
    return np.asarray((size * pattern + size * (size + 1) // 2) * (number % 5 + 1), dtype)


def exchange(table, gradient, number):
    """A push and a pull, each time in another way."""
    if number % 3 == 0:
        table.push(gradient)
        gradient[...] = 0  # it may be used again at once
        return table.pull()
    if number % 3 == 1:
        return table.push_pull(gradient, out=np.empty_like(gradient))
    pushed, pulled = table.push_async(gradient), table.pull_async()
    pushed.wait()
    return pulled.wait()


# Name, shape, dtype, and every how many rounds it is pushed. Chunks are 64 KB.
TABLES = (
    ("small", (7,), "float64", 1),
    ("scalar", (), "int64", 1),
    ("chunks", (3, 100_000), "float32", 8),
    ("large", (1 << 20,), "float32", 20),
)


def in_step(world, rounds):
    """At staleness 0 every pull is the sum of the rounds so far, on every rank."""
    store = world.store("in step", staleness=0)
    totals = {}
    for name, shape, dtype, _ in TABLES:
        store.dense(name, shape, dtype, init=given(7, 3, shape, dtype))
        totals[name] = given(7, 3, shape, dtype)
    for number in range(rounds):
        for name, shape, dtype, every in TABLES:
            if number % every:
                continue
            mine = given(world.rank, number, shape, dtype)
            totals[name] = totals[name] + given_by_all(world.size, number, shape, dtype)
            got = exchange(store[name], mine, number)
            np.testing.assert_array_equal(got, totals[name], f"{name} in round {number}")
        store.tick()
    return store


def descends(world, rounds):
    """An optimizer on the mean of the round: the same float32 operations as NumPy's."""
    store = world.store("descends", staleness=0)
    shape, expected = (20_001,), np.linspace(-1, 1, 20_001, dtype="float32")
    w = store.dense("w", shape, update=commute.SGD(lr=0.5), init=expected, reduce="mean")
    for number in range(rounds):
        mean = given_by_all(world.size, number, shape, "float32") / np.float32(world.size)
        expected = expected - np.float32(0.5) * mean
        got = exchange(w, given(world.rank, number, shape, "float32"), number)
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=f"in round {number}")


def unbounded(world, rounds):
    """With None nobody waits; after flush and barrier the totals are exact."""
    store = world.store("unbounded", staleness=None)
    for name, shape, dtype, _ in TABLES:
        store.dense(name, shape, dtype)
    handles = []
    for number in range(rounds):
        for name, shape, dtype, every in TABLES:
            if number % every:
                continue
            mine = given(world.rank, number, shape, dtype)
            if number % 2:
                store.push_pull(name, mine)
            elif name == "large":
                handles.append(store.push_async(name, mine))
            else:
                store.push(name, mine)
    store.flush()
    world.barrier()
    for name, shape, dtype, every in TABLES:
        pushed = range(0, rounds, every)
        total = sum(given_by_all(world.size, number, shape, dtype) for number in pushed)
        np.testing.assert_array_equal(store.pull(name), total, name)
    assert all(handle.done() for handle in handles)
    world.barrier()  # nobody leaves, and nothing changes, before all have looked


def bounded(world, rounds):
    """With 2 a pull lacks at most two of anybody's pushes, and has at most three too many."""
    w = world.store("bounded", staleness=2).dense("w", (30_000,), "int64")
    for number in range(1, rounds + 1):
        got = exchange(w, np.ones(30_000, "int64"), number)
        assert (number - 2) * world.size <= got.min(), (number, got.min())
        assert got.max() <= number + (world.size - 1) * (number + 3), (number, got.max())
    world.barrier()
    assert (w.pull(fresh=True) == rounds * world.size).all()
    world.barrier()


def rounds(world):
    """Everything, with as many rounds as the second argument says."""
    many = int(sys.argv[2])
    store = in_step(world, many)
    descends(world, many // 4)
    unbounded(world, many // 2)
    bounded(world, many // 2)
    return {"places": store["large"].info().slots}


def alone(world):
    """One rank: where its table is."""
    store = world.store(staleness=0)
    w = store.dense("w", (50_000,), "int64")
    for number in range(1, 11):
        assert (w.push_pull(np.full(50_000, 3)) == 3 * number).all()
    return {"places": w.info().slots}


def no_server(world):
    """Asking for a store where no server may be."""
    try:
        world.store()
    except commute.JoinError as error:
        return {"error": str(error)}
    raise AssertionError("a store without a server")


def misses(world):
    """A server that is started elsewhere does not come."""
    try:
        world.store()
    except commute.CommuteError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    raise AssertionError("a store without all its servers")


def lazily(world):
    """The first store is opened when the test says so."""
    world.barrier()
    say(me=world.rank, without=True)
    wait_for_file("open")
    store = world.store(staleness=0)
    w = store.dense("w", (5,), "int64")
    second = world.store("second", staleness=None).dense("w", (5,), "int64")
    assert (w.push_pull(np.ones(5, "int64")) == world.size).all()
    assert (second.pull() == 0).all()
    say(me=world.rank, opened=True)
    wait_for_file("end")
    return {}


def forever(world):
    """Rounds without end; with "raises", rank 1 ends them by an exception."""
    w = world.store(staleness=0).dense("w", (100_000,), "int64")
    number = 0
    while True:
        number += 1
        assert (w.push_pull(np.ones(100_000, "int64")) == number * world.size).all()
        if number == 5:
            ready(world)
        if number == 10 and world.rank == 1 and "raises" in sys.argv[2:]:
            raise ValueError("the reason")


def early(world):
    """One rank is done after 5 rounds; the others go on for 300, in which it has no part."""
    first_to_go = int(sys.argv[2])
    with world.store(staleness=0) as store:
        w, mine = store.dense("w", (40_000,), "int64"), contribution(world, (40_000,))
        number = 0
        while number < (5 if world.rank == first_to_go else 300):
            number += 1
            expected = [min(number, 5) if r == first_to_go else number for r in range(world.size)]
            assert counted(w.push_pull(mine), world.size) == expected
            if number == 6:
                say(me=world.rank, going_on=True)
    say(me=world.rank, left=os.getpid())
    if world.rank == first_to_go:
        world.close()  # whoever started the servers waits here until the others are done
    return {}


def parting(world):
    """Rank 1 pushes and ends at once; what it pushed is there when its process is long gone."""
    shape, pushes = (1 << 17,), 40
    w = world.store(staleness=None).dense("w", shape, "int64")
    pids = world.allgather(np.array(os.getpid()))
    if world.rank == 1:
        for _ in range(pushes):
            w.push(contribution(world, shape))
        return {}
    until = time.monotonic() + 30
    while Path(f"/proc/{pids[1]}").exists():
        assert time.monotonic() < until, "rank 1 does not end"
        time.sleep(0.01)
    assert counted(w.pull(), world.size) == [0, pushes, 0]
    return {}


def worlds(world):
    """Two worlds with stores of their own, two stores in one, and a world made again."""
    for again in range(2):
        with commute.init(name="a") as a, commute.init(name="b") as b:
            tables = [
                a.store("one", staleness=0).dense("w", (40_000,), "int64"),
                a.store("two", staleness=0).dense("w", (40_000,), "int64"),
                b.store("one", staleness=0).dense("w", (40_000,), "int64"),
            ]
            for number in range(1, 31):
                for at, table in enumerate(tables):
                    value = table.push_pull(np.full(40_000, 10**at))
                    assert (value == number * 10**at * a.size).all(), (again, number, at)
            servers = [next(iter(table.info().slots)) for table in tables]
            assert servers[0] == servers[1] != servers[2], servers
            a.barrier()
        say(me=world.rank, again=again, servers=servers)
    w = world.store("one", staleness=0).dense("w", (3,), "int64")
    assert (w.push_pull(np.ones(3, "int64")) == world.size).all()
    return {}


def main():
    if "forgets" in sys.argv[2:]:  # to close: the end of the interpreter does
        world = commute.init()
        say(me=world.rank, fine=True, **globals()[sys.argv[1]](world))
        return
    run_as_rank(globals())


if __name__ == "__main__":
    main()
