# SPDX-License-Identifier: Apache-2.0
"""One integer and one rule (DESIGN D6): who waits for whom, exactly, and what a cache may say.

Most tests drive all ranks from one thread. `stores(...).settle()` makes "it is not done" a fact:
the shards have seen everything and answered what they could.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import commute
from commute import SGD, Group, OperationTimeoutError

ONE = np.ones(3, "int64")
SHORT = 0.05  # seconds, where waiting in vain is the point


def tick(store: Any, times: int) -> None:
    for _ in range(times):
        store.tick()


# ---- pulls ----


@pytest.mark.parametrize("mine", range(7))
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_a_pull_waits_for_the_slowest_to_be_at_mine_minus_s(stores, staleness, mine):
    """At every clock of mine and of the slowest: answered exactly from mine - s on."""
    workers = stores(2, staleness=staleness)
    a, _ = workers.tables("w", (3,), "int64")
    tick(workers[0], mine)
    pull = a.pull_async(fresh=True)
    for slowest in range(8):
        workers.settle()
        assert pull.done() == (slowest >= mine - staleness), f"slowest at {slowest}"
        workers[1].tick()

    assert pull.wait().tolist() == [0, 0, 0]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_pull_waits_for_pushes_as_for_ticks(stores, staleness):
    """The same rule where clocks move by pushes; push_pull waits as a pull after the push does."""
    workers = stores(2, staleness=staleness)
    a, b = workers.tables("w", (3,), "int64")
    for _ in range(staleness + 1):
        a.push(ONE)
    pull = a.pull_async(fresh=True)
    workers.settle()
    assert not pull.done()
    b.push(ONE)
    seen = pull.wait()
    exchange = a.push_pull_async(ONE)
    workers.settle()
    assert not exchange.done()
    b.push(ONE)
    after = exchange.wait()

    assert seen.tolist() == ([2, 2, 2] if staleness == 0 else [staleness + 2] * 3)
    assert after.tolist() == [staleness + 4] * 3


def test_the_slowest_of_three(stores):
    """One who is in time does not help while another is late."""
    workers = stores(3, staleness=1)
    a, b, c = workers.tables("w", (3,), "int64")
    tick(workers[0], 3)
    pull = a.pull_async(fresh=True)
    tick(workers[1], 5)
    tick(workers[2], 1)
    workers.settle()
    assert not pull.done()
    assert b.info().clock == 5 and c.info().clock == 1
    workers[2].tick()

    assert pull.wait().tolist() == [0, 0, 0]


def test_who_is_behind_does_not_wait(stores):
    """A pull of the slowest is answered at once, however far the others are."""
    workers = stores(2, staleness=1)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    a.push(ONE)
    tick(workers[0], 10)
    workers.settle()

    assert b.pull().tolist() == [2, 2, 2]


def test_without_bound_nobody_waits(stores):
    """Neither pushes nor pulls; each sees at least its own pushes, applied as they arrive."""
    workers = stores(2, staleness=None)
    a, b = workers.tables("w", (3,), "int64")
    for _ in range(50):
        a.push(ONE)
    mine = a.pull().tolist()
    others = b.pull().tolist()

    assert mine == others == [50, 50, 50]


@pytest.mark.parametrize("staleness", [0, 4, None])
def test_alone_nobody_waits(staleness):
    """In a world of one every round is complete when it is pushed."""
    with commute.init() as world:
        store = world.store(staleness=staleness)
        w = store.dense("w", (3,), "int64")
        for turn in range(1, 20):
            w.push(ONE)
            assert w.pull(fresh=True).tolist() == [turn] * 3
        tick(store, 30)
        assert w.push_pull(ONE).tolist() == [20] * 3


def test_a_pull_gives_the_round_and_nothing_later(stores):
    """At 0, round 1 while a contribution to round 2 is there already."""
    workers = stores(3)
    tables = workers.tables("w", (50_000,), "int64")
    for w in tables:
        w.push(np.full(50_000, 1))
    tables[1].push(np.full(50_000, 10))
    tables[2].push(np.full(50_000, 10))
    workers.settle()
    first = np.unique(tables[0].pull()).tolist()
    handles = [w.pull_async() for w in tables[1:]]
    workers.settle()
    assert not any(handle.done() for handle in handles)
    tables[0].push(np.full(50_000, 10))
    second = [np.unique(handle.wait()).tolist() for handle in handles]

    assert first == [3] and second == [[33], [33]]


def test_a_pull_before_any_push_does_not_wait(stores):
    """It asks for the first value, and may see what others have pushed since only above 0."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64", init=5)
    b.push(ONE)
    workers.settle()

    assert a.pull().tolist() == [5, 5, 5]


# ---- pushes ----


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_push_waits_beyond_s_plus_one(stores, staleness):
    """Push n is taken exactly when n <= slowest + s + 1."""
    workers = stores(2, staleness=staleness)
    a, b = workers.tables("w", (3,), "int64")
    last = staleness + 5
    pushes = [a.push_async(ONE) for _ in range(last)]
    for slowest in range(last):
        workers.settle()
        taken = [push.done() for push in pushes]
        assert taken == [n <= slowest + staleness + 1 for n in range(1, last + 1)]
        workers[1].tick()
    for push in pushes:
        push.wait()

    assert a.pull().tolist() == b.pull().tolist() == [last] * 3


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_blocking_push_waits_too(stores, staleness):
    """It times out, goes on, and counts once."""
    workers = stores(2, staleness=staleness)
    a, b = workers.tables("w", (3,), "int64")
    for _ in range(staleness + 1):
        a.push(ONE, timeout=SHORT)
    with pytest.raises(OperationTimeoutError, match=r"push to 'w' has not finished after 0.05 s"):
        a.push(ONE, timeout=SHORT)
    waiting = threading.Thread(target=lambda: a.push(ONE), daemon=True)
    waiting.start()
    for _ in range(staleness + 3):
        b.push_async(ONE)
    waiting.join(20)

    assert not waiting.is_alive()
    assert a.info().clock == staleness + 3
    assert a.pull().tolist() == b.pull().tolist() == [2 * (staleness + 3)] * 3


def test_pieces_of_a_push_that_must_wait_wait_too(stores):
    """They belong to a contribution that may not be made yet, and are not lost."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    piece = a.push_async(ONE * 10, accumulate=True)
    workers.settle()
    assert not piece.done()
    b.push(ONE)
    piece.wait()
    a.push(ONE * 100)
    b.push(ONE)

    assert a.pull().tolist() == b.pull().tolist() == [113] * 3


# ---- ticks ----


def test_a_tick_never_waits(stores):
    """A thousand of them, and the rounds close when the others come along."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    tick(workers[0], 1000)
    assert a.info().clock == 1000
    for _ in range(3):
        b.push(ONE)
    pull = b.pull_async()

    assert pull.wait().tolist() == [3, 3, 3]


def test_a_tick_counts_what_was_not_pushed(stores):
    """Empty contributions for the tables without one since the last tick, and only for them."""
    workers = stores(2)
    pushed, idle = ([s.dense(name, (3,), "int64") for s in workers] for name in ("p", "i"))
    for turn in range(1, 4):
        pushed[0].push(ONE)
        for store in workers:
            store.tick()
        clocks = [w.info().clock for w in (*pushed, *idle)]
        assert clocks == [turn] * 4
        assert pushed[1].pull().tolist() == [turn] * 3 and not idle[0].pull().any()


def test_a_tick_after_pushes_that_wait(stores):
    """It names the number reached, and counts once the contributions before it are in."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    pushes = [a.push_async(ONE) for _ in range(3)]
    workers[0].tick()
    workers[0].tick()
    workers.settle()
    assert [push.done() for push in pushes] == [True, False, False] and a.info().clock == 4
    for _ in range(3):
        b.push(ONE)
    workers[1].tick()
    workers[1].tick()

    assert a.pull().tolist() == b.pull().tolist() == [6, 6, 6]


# ---- what is held here ----


def test_a_pull_may_be_answered_from_what_is_held(stores):
    """While its guaranteed clock is at least mine - s; it may lack my own last s pushes."""
    workers = stores(2, staleness=2)
    a, b = workers.tables("w", (3,), "int64")
    assert a.pull().tolist() == [0, 0, 0]  # from the servers, guaranteed for clock 0
    for clock in (0, 1, 2):
        assert a.info().clock == clock
        assert a.pull().tolist() == [0, 0, 0]
        assert a.info().cache_hits == clock + 1
        a.push(ONE)
    pull = a.pull_async()  # at clock 3 the slowest must have reached 1
    workers.settle()
    assert not pull.done()
    b.push(ONE)
    seen = pull.wait().tolist()

    assert seen == [4, 4, 4] and a.info().cache_hits == 3
    assert a.pull().tolist() == [4, 4, 4] and a.info().cache_hits == 4
    assert b.info().cache_hits == 0


def test_fresh_goes_to_the_servers(stores):
    """And sees what has arrived there; what it brought is held from then on."""
    workers = stores(2, staleness=2)
    a, b = workers.tables("w", (3,), "int64")
    a.pull()
    b.push(ONE)
    workers.settle()
    held, fresh, after = a.pull(), a.pull(fresh=True), a.pull()

    assert [x.tolist() for x in (held, fresh, after)] == [[0] * 3, [1] * 3, [1] * 3]
    assert a.info().cache_hits == 2


def test_a_held_value_is_a_copy(stores):
    """Whoever writes into what a pull gave changes nothing but that."""
    a, _ = stores(2, staleness=1).tables("w", (3,), "int64", init=7)
    out = np.empty(3, "int64")
    for pulled in (a.pull(), a.pull(), a.pull(out=out), a.pull_async().wait()):
        assert pulled.tolist() == [7, 7, 7]
        pulled[:] = -1

    assert a.info().cache_hits == 3


@pytest.mark.parametrize("staleness", [0, None])
def test_nothing_is_held_at_0_and_none(stores, staleness):
    """In step it would never do; without bound every pull asks."""
    workers = stores(2, staleness=staleness)
    a, b = workers.tables("w", (3,), "int64")
    for turn in range(3):
        a.pull()
        b.push(ONE)
        if staleness is None:
            workers.settle()
            assert a.pull().tolist() == [turn + 1] * 3
        else:
            a.push(ONE)

    assert a.info().cache_hits == b.info().cache_hits == 0


def test_questions_are_not_answered_from_what_is_held(stores):
    workers = stores(2, staleness=2)
    a, b = workers.tables("w", (3,), "int64")
    a.pull()
    b.push(ONE)
    workers.settle()

    assert a.sum() == 3 and a.nonzero() == 3


# ---- tables of one store ----


def test_a_table_may_have_another_bound(stores):
    """The store's holds where none is given."""
    workers = stores(2, staleness=1)
    made = {
        bound: workers.tables(f"w{bound}", (3,), "int64", staleness=bound) for bound in (0, 3, None)
    }
    made[1] = workers.tables("w", (3,), "int64")
    assert {bound: w[0].info().staleness for bound, w in made.items()} == {
        bound: bound for bound in made
    }
    for clock in range(1, 5):
        workers[0].tick()
        pulls = {bound: w[0].pull_async(fresh=True) for bound, w in made.items()}
        workers.settle()
        done = {bound: pull.done() for bound, pull in pulls.items()}
        assert done == {bound: bound is None or clock <= bound for bound in made}
    tick(workers[1], 4)


def test_one_table_in_step_and_one_free_in_one_loop(ranks):
    """The parameters are exact after every round; the statistics never hold anybody up."""
    turns = 12

    def work(group: Group) -> tuple[list[Any], float]:
        store = group.store()
        w = store.dense("w", (20_000,), "float64", update=SGD(lr=1.0), reduce="mean")
        seen = store.dense("seen", (), "int64", staleness=None)
        values = []
        for turn in range(turns):
            values.append(np.unique(w.push_pull(np.full(20_000, 1.0 * turn + group.rank))).tolist())
            seen.push(group.rank + 1)
            assert seen.pull() >= (turn + 1) * (group.rank + 1)  # my own pushes at least
            store.tick()
        store.flush()
        group.barrier()
        return values, seen.pull().item()

    results = ranks(3).values(work)
    expected = [[-value] for value in np.cumsum([turn + 1.0 for turn in range(turns)])]

    assert all(values == expected for values, _ in results)
    assert [total for _, total in results] == [turns * 6] * 3


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "held"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_random_speeds(ranks, seed, staleness, fresh):
    """However the ranks run: each pull has all that the rule promises, and nothing it forbids."""
    size, turns = 3, 30
    # A rank at clock c has in its pull all contributions up to c - s of everybody, and of nobody
    # one beyond c + s + 1, at 0 none beyond c; a fresh one has all of its own.
    beyond = staleness + 1 if staleness else 0
    pulls = np.random.default_rng(seed).integers(0, 4, size=(size, turns))

    def work(group: Group) -> None:
        store = group.store(staleness=staleness)
        tables = [store.dense(f"w{i}", (20_000,), "int64") for i in range(2)]
        for turn in range(turns):
            for w in tables:
                w.push(np.full(20_000, 1000**group.rank))
            for _ in range(pulls[group.rank, turn]):
                for w in tables:
                    found = np.unique(w.pull(fresh=fresh))
                    clock = turn + 1
                    for value in found.tolist():
                        clocks = [value // 1000**rank % 1000 for rank in range(size)]
                        assert all(clock - staleness <= c <= clock + beyond for c in clocks)
                        assert not fresh or clocks[group.rank] == clock
                    assert staleness or len(found) == 1, "at 0 a pull is a consistent cut"

    ranks(size).values(work)
