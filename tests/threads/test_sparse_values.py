# SPDX-License-Identifier: Apache-2.0
"""Sparse tables against a Python dict: any keys, any calls, tickets, questions, drops."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import commute
from commute import Group, Normal, Semiring, Uniform
from references import RowTable

LAST = 2**64 - 1
DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()
SHARDS = [1, 2, 3, 5]


def gradients(rng: Any, count: int, width: int, dtype: Any) -> Any:
    """Small whole numbers: sums are exact in any order."""
    return rng.integers(1, 4, size=(count, width)).astype(dtype)


# ---- against a dict ----


class Walk:
    """Calls at random on one table, each checked against the dict."""

    def __init__(self, table: Any, expected: RowTable, rng: Any) -> None:
        self.table = table
        self.expected = expected
        self.rng = rng
        few = rng.integers(0, 2**64, size=60, dtype=np.uint64)
        self.pool = np.concatenate([few, np.array([0, 1, 2**63, LAST], np.uint64)])
        self.pieces: list[tuple[Any, Any]] = []
        self.tickets: list[tuple[Any, Any]] = []

    def keys(self) -> Any:
        chosen = self.rng.choice(self.pool, size=int(self.rng.integers(0, 90)))
        fresh = self.rng.integers(0, 2**64, size=int(self.rng.integers(0, 20)), dtype=np.uint64)
        mixed = np.concatenate([chosen, fresh])
        self.rng.shuffle(mixed)
        return mixed

    def step(self) -> None:
        call = self.rng.choice(["push", "push_pull", "pull", "ticket", "piece", "drop", "ask"])
        getattr(self, f"_{call}")(self.keys())

    def _given(self, keys: Any) -> Any:
        return gradients(self.rng, len(keys), self.expected.width, self.expected.dtype)

    def _contributed(self, keys: Any, rows: Any) -> None:
        self.expected.push(*self.pieces, (keys, rows))
        self.pieces.clear()

    def _push(self, keys: Any) -> None:
        rows = self._given(keys)
        self.table.push(keys, rows)
        self._contributed(keys.copy(), rows.copy())
        rows[...] = 0  # it may be used again at once

    def _push_pull(self, keys: Any) -> None:
        rows = self._given(keys)
        out = np.empty_like(rows) if self.rng.random() < 0.5 else rows
        self._contributed(keys, rows.copy())
        got = self.table.push_pull(keys, rows, out=out)
        assert got is out
        np.testing.assert_array_equal(got, self.expected.pull(keys), strict=True)

    def _pull(self, keys: Any) -> None:
        np.testing.assert_array_equal(self.table.pull(keys), self.expected.pull(keys), strict=True)

    def _ticket(self, keys: Any) -> None:
        rows, ticket = self.table.pull(keys, ticket=True)
        np.testing.assert_array_equal(rows, self.expected.pull(keys), strict=True)
        self.tickets.append((ticket, keys))
        ticket, keys = self.tickets[int(self.rng.integers(len(self.tickets)))]
        given = self._given(keys)
        self.table.push(ticket, given, last=bool(self.rng.integers(2)))
        self._contributed(keys, given)
        np.testing.assert_array_equal(self.table.pull(ticket), self.expected.pull(keys))

    def _piece(self, keys: Any) -> None:
        rows = self._given(keys)
        self.table.push(keys, rows, accumulate=True)
        self.pieces.append((keys, rows))

    def _drop(self, keys: Any) -> None:
        self.table.drop(keys[:10])
        self.expected.drop(keys[:10])

    def _ask(self, keys: Any) -> None:
        rows = self.expected.rows
        assert self.table.count() == len(rows) == self.table.info().rows
        values = np.array([row[0] for row in rows.values()]).reshape(-1, self.expected.width)
        assert self.table.nonzero() == np.count_nonzero(values)
        found = {}
        for block, block_rows in self.table.items():
            assert block.dtype == np.uint64 and len(block) == len(block_rows)
            found |= dict(zip(block.tolist(), map(bytes, block_rows), strict=True))
        assert found == {key: row[0].tobytes() for key, row in rows.items()}


@pytest.mark.parametrize(
    ("update", "width", "cached"),
    [
        ("sum", 1, False),
        ("sum", 1, True),
        ("sum", 5, True),
        ("assign", 4, True),
        ("min", 3, False),
        ("max", 40, False),
        (Semiring("max", "+"), 2, False),
    ],
    ids=str,
)
def test_like_a_dict(together_alone, seed, update, width, cached):
    """Hundreds of calls: unsorted, repeated and empty lists, tickets that outlive drops."""

    def work(group: Group) -> None:
        store = group.store(staleness=None)
        table = store.sparse("e", width, "int64", update=update, init=2, cache_keys=cached)
        expected = RowTable(width, "int64", update, lambda key: np.full(width, 2, "int64"))
        walk = Walk(table, expected, np.random.default_rng(seed))
        for _ in range(100):
            walk.step()
        walk._ask(None)

    together_alone(work)


@pytest.fixture(params=[0, 1, 2, 5], ids=["embedded", "1 shard", "2 shards", "5 shards"])
def together_alone(request, ranks):
    """Runs work(group) on one rank, whose store has so many shards."""

    def run(work: Any) -> Any:
        if request.param == 0:
            with commute.init() as world:
                return work(world)
        return ranks(1, shards=request.param).values(work)[0]

    return run


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_every_dtype(stores, rng, dtype):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    (e,) = stores(1).rows("e", 2, dtype, init=1)
    keys = np.array([5, 0, LAST, 5], np.uint64)
    out = np.empty((4, 2), kind)
    e.push(keys, np.full((4, 2), 3, kind))
    e.pull(keys, out=out)

    assert out.astype("float64").tolist() == [[7, 7], [4, 4], [4, 4], [7, 7]]
    assert e.sum() == 30 and e.nonzero() == 6 and e.count() == 3
    found = {
        int(k): float(r[0]) for keys, rows in e.items() for k, r in zip(keys, rows, strict=True)
    }
    assert found == {5: 7.0, 0: 4.0, LAST: 4.0}


@pytest.mark.parametrize("width", [1, 2, 4, 5, 63, 4095, 4096])
@pytest.mark.parametrize("shards", SHARDS)
def test_every_width(ranks, rng, width, shards):
    """Also when a list is many messages."""
    keys = rng.integers(0, 2**64, size=300, dtype=np.uint64)
    rows = rng.normal(size=(300, width)).astype("float32")

    def work(group: Group) -> Any:
        e = group.store(staleness=None).sparse("e", width)
        e.push(keys, rows)
        return e.pull(keys[::-1])

    assert ranks(1, shards=shards).values(work)[0].tobytes() == rows[::-1].tobytes()


# ---- keys ----

FORMS: dict[str, Any] = {
    "list": [3, LAST, 2**63, 3],
    "tuple": (3, LAST, 2**63, 3),
    "nested": [[3, LAST], [2**63, 3]],
    "one": 7,
    "one at the end": LAST,
    "range": range(5),
    "uint64": np.array([3, LAST, 3], np.uint64),
    "int64": np.array([3, 2**62, 3], np.int64),
    "uint8": np.array([3, 255], np.uint8),
    "strided": np.arange(20, dtype=np.int64)[::-3],
    "fortran": np.asfortranarray(np.arange(6, dtype=np.uint32).reshape(2, 3)),
    "big endian": np.array([1, 2**40], ">i8"),
    "read-only": np.frombuffer(bytes(range(16)), np.uint64),
    "tensor": torch.tensor([[3, 4], [5, 3]]),
    "no axes": np.array(9, np.uint16),
    "scalar": np.uint64(LAST),
    "scalars": [np.uint64(LAST), np.uint64(0)],
}


@pytest.mark.parametrize("form", FORMS)
def test_keys_as_users_have_them(stores, form):
    """The rows have the keys' shape and one more axis; keys are as they were."""
    (e,) = stores(1).rows("e", 2, "int64")
    keys = FORMS[form]
    numbers = np.asarray(keys, np.uint64)
    rows = np.arange(1, numbers.size * 2 + 1).reshape(*numbers.shape, 2)
    expected = RowTable(2, "int64")
    expected.push((numbers, rows))
    e.push(keys, rows)

    np.testing.assert_array_equal(e.pull(keys), expected.pull(numbers), strict=True)
    assert (np.asarray(keys, np.uint64) == numbers).all()
    assert sorted(int(k) for block, _ in e.items() for k in block) == sorted(expected.rows)


@pytest.mark.parametrize(
    "none", [[], (), np.empty(0, np.uint64), np.empty((0, 3), int), np.empty(0)]
)
def test_no_keys_at_all(stores, none):
    """It counts as a contribution, and pulls nothing."""
    workers = stores(2)
    a, b = workers.rows("e", 3)
    shape = (*np.shape(none), 3)
    a.push(none, np.empty(shape, "float32"))
    b.push([1], np.ones((1, 3), "float32"))

    assert a.pull(none).shape == shape and a.pull([1]).tolist() == [[1, 1, 1]]
    assert a.push_pull(none, np.empty(shape, "float32")).shape == shape
    b.push([1], np.ones((1, 3), "float32"))
    assert a.pull([1, 2]).tolist() == [[2, 2, 2], [0, 0, 0]]
    _, ticket = a.pull(none, ticket=True)
    a.push(ticket, np.empty(shape, "float32"))
    a.drop(none)
    workers[1].tick()
    workers[1].tick()
    assert a.info().clock == 3 and len(ticket) == 0 and a.count() == 1


def test_rows_of_one_element_may_leave_the_axis_out(stores):
    (e,) = stores(1).rows("e", 1)
    e.push([4, 5], np.array([1.0, 2.0], "float32"))
    e.push([4, 5], np.array([[1.0], [2.0]], "float32"))

    assert e.pull([5, 4]).tolist() == [[4.0], [2.0]]


def test_the_devices_of_a_worker(stores):
    """Several arrays become one contribution; a scale multiplies it."""
    (e,) = stores(1).rows("e", 2, "float64")
    one = np.ones((2, 2))
    e.push([7, 7], [one, 2 * one], scale=0.5)

    assert e.pull([7]).tolist() == [[3.0, 3.0]] and e.info().clock == 1


def test_tensors(stores):
    (e,) = stores(1).rows("e", 2)
    out = torch.empty(2, 2)

    assert e.push_pull(torch.tensor([3, 4]), torch.ones(2, 2), out=out) is out
    assert out.eq(1).all()


# ---- rows that nobody has pushed ----


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("init", [None, 2.5, Uniform(-1, 3), Normal(2.0, mean=1.0)], ids=str)
def test_a_pull_makes_no_rows(ranks, rng, init, shards):
    """All ranks see the same initial rows, however they are spread; a push builds on them."""
    keys = rng.integers(0, 2**64, size=2000, dtype=np.uint64)

    def work(group: Group) -> Any:
        e = group.store(staleness=0).sparse("e", 3, "float64", init=init, seed=7)
        first = e.pull(keys)
        assert e.count() == 0 and not list(e.items())
        e.push(keys[:500], np.ones((500, 3)))
        second = e.pull(keys)
        assert e.count() == 500
        return first, second

    with commute.init() as world:
        e = world.store().sparse("e", 3, "float64", init=init, seed=7)
        alone = e.pull(keys)
    for first, second in ranks(2, shards=shards).values(work):
        assert first.tobytes() == alone.tobytes()
        np.testing.assert_allclose(second[:500], first[:500] + 2)
        assert second[500:].tobytes() == first[500:].tobytes()


def test_seeds_and_keys_make_different_rows(stores):
    (a,) = (workers := stores(1)).rows("a", 4, init=Normal(1.0), seed=1)
    (b,) = workers.rows("b", 4, init=Normal(1.0), seed=2)
    rows = a.pull(range(2000))

    assert len(np.unique(rows)) > 7990 and abs(rows.mean()) < 0.1 and abs(rows.std() - 1) < 0.1
    assert not (b.pull(range(2000)) == rows).any()


# ---- tickets ----


@pytest.mark.parametrize("width", [2, 9])
def test_tickets_across_growth_and_drops(stores, rng, width):
    """The rows of a ticket move when others come, go, and come back."""
    (e,) = stores(1, staleness=None).rows("e", width, "int64")
    keys = rng.integers(0, 2**64, size=50, dtype=np.uint64)
    expected = RowTable(width, "int64")
    e.push(keys[:25], np.ones((25, width), "int64"))
    expected.push((keys[:25], np.ones((25, width), "int64")))
    _, ticket = e.pull(keys, ticket=True)
    for turn in range(8):
        others = rng.integers(0, 2**64, size=40_000 if turn % 2 else 10, dtype=np.uint64)
        e.push(others, np.full((len(others), width), 5))
        rows = np.full((50, width), turn)
        assert ticket.__len__() == 50
        expected.push((keys, rows))
        np.testing.assert_array_equal(e.push_pull(ticket, rows), expected.pull(keys))
        if turn % 3 == 1:
            e.drop(others)
            e.drop(keys[turn : turn + 7])
            expected.drop(keys[turn : turn + 7])
        np.testing.assert_array_equal(e.pull(ticket), expected.pull(keys))
    got, same = e.pull(ticket, ticket=True)
    assert same is ticket and got.shape == (50, width) and "50 keys of table 'e'" in repr(ticket)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("count", [0, 1, 30, 4000])
def test_distinct_keys_are_those_of_numpy(ranks, rng, shards, count):
    """Rows of the ticket by number are rows of the keys, whatever their shape."""
    keys = rng.integers(0, 2**64, size=count // 3 + 1, dtype=np.uint64)
    keys = rng.choice(keys, (2, count))
    keys[:, : count // 10] = LAST
    unique, inverse = np.unique(keys, return_inverse=True)
    given = gradients(rng, len(unique), 2, "int64")

    def work(group: Group) -> Any:
        e = group.store(staleness=None).sparse("e", 2, "int64")
        ticket, index = e.distinct(keys)
        assert len(ticket) == len(unique)
        e.push(ticket, given)
        return index, e.pull(ticket), e.pull(keys), e.push_pull(ticket, given)

    [(index, once, everywhere, twice)] = ranks(1, shards=shards).values(work)
    assert index.shape == keys.shape and index.dtype == np.uint32
    pairs = np.unique(np.stack([index.ravel(), inverse.ravel()]), axis=1)
    assert pairs.shape[1] == len(unique)  # one number for each key, and another for another
    np.testing.assert_array_equal(once, given)
    np.testing.assert_array_equal(everywhere, given[index])
    np.testing.assert_array_equal(twice, 2 * given)


def test_rows_that_no_thread_takes(ranks, rng):
    """They come with `wait`, with `done` if it is asked often enough, and past other calls."""
    keys = rng.integers(0, 2**64, size=40_000, dtype=np.uint64)  # several messages
    given = gradients(rng, len(keys), 1, "int64")

    def work(group: Group) -> Any:
        e = group.store(staleness=None).sparse("e", 1, "int64")
        ticket, index = e.distinct(keys)
        e.push(ticket, given[: len(ticket)])
        handles = [e.pull_async(ticket, background=False) for _ in range(3)]
        e.push(ticket, given[: len(ticket)], last=True)
        while not handles[1].done():
            pass
        return [handle.wait() for handle in handles], e.pull(keys), index

    [(early, late, index)] = ranks(1, shards=2).values(work)
    for rows in early:
        np.testing.assert_array_equal(rows, given[: len(rows)])
    np.testing.assert_array_equal(late, 2 * given[index])


def test_a_ticket_of_a_pull_under_way(stores):
    workers = stores(2)
    a, b = workers.rows("e", 1, "int64")
    one = np.ones((3, 1), "int64")
    a.push([1, 2, 3], one)
    handle = a.pull_async([3, 2, 9], ticket=True)
    workers.settle()
    assert not handle.done()
    b.push([3, 3], 5 * one[:2])
    rows, ticket = handle.wait()
    assert rows.tolist() == [[11], [1], [0]]
    a.push(ticket, one)
    b.push([], one[:0])

    assert b.pull([9, 3]).tolist() == [[1], [12]]


# ---- questions ----


@pytest.mark.parametrize("shards", SHARDS)
def test_questions(ranks, rng, shards):
    """As NumPy answers them, from the rows that are there."""
    keys = rng.permutation(2000).astype(np.uint64) * np.uint64(2**53 + 1)
    rows = rng.normal(size=(2000, 3))

    def work(group: Group) -> None:
        e = group.store(staleness=None).sparse("e", 3, "float64", init=9.0)
        narrow = group.store(staleness=None).sparse("narrow", 1, "float64")
        e.push(keys, rows - 9)
        narrow.push(keys, rows[:, :1])
        norms = np.linalg.norm(rows, axis=1)
        best = np.argsort(-norms)[:20]
        top_keys, top_norms = e.top(20)
        assert top_keys.tolist() == keys[best].tolist()
        np.testing.assert_allclose(top_norms, norms[best])
        best = np.argsort(-abs(rows[:, 0]))[:20]
        top_keys, values = narrow.top(20)
        assert top_keys.tolist() == keys[best].tolist()
        np.testing.assert_allclose(values, rows[best, 0])  # with their sign
        assert len(narrow.top(5000)[0]) == 2000
        np.testing.assert_allclose([e.norm(), e.sum()], [np.linalg.norm(rows), rows.sum()])
        assert e.count() == 2000 and e.nonzero() == 6000
        e.drop(keys[:500])
        assert e.count() == e.info().rows == 1500 and e.nonzero() == 4500
        assert e.info().bytes > 1500 * 32 and sum(e.info().slots.values()) == shards

    ranks(1, shards=shards).values(work)


def test_questions_about_nothing(stores):
    (e,) = stores(1).rows("e", 2, init=3.0)

    assert (e.count(), e.nonzero(), e.norm(), e.sum(), list(e.items())) == (0, 0, 0.0, 0.0, [])
    assert [len(part) for part in e.top(3)] == [0, 0]


def test_items_come_in_blocks(stores, rng):
    """Each row once, in blocks of at most 1 MB."""
    (e,) = stores(1).rows("e", 50, "float64")
    keys = np.unique(rng.integers(0, 2**64, size=9000, dtype=np.uint64))
    e.push(keys, rng.normal(size=(len(keys), 50)))
    blocks = list(e.items())

    assert len(blocks) >= 4 and all(rows.nbytes <= 1 << 20 for _, rows in blocks)
    found = np.concatenate([block for block, _ in blocks])
    assert np.sort(found).tolist() == keys.tolist()
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in blocks]), e.pull(found))


def test_items_while_others_push(stores, rng):
    """Rows that are there all the time come exactly once."""
    a, b = stores(2, staleness=None).rows("e", 8, "float64")
    keys = np.unique(rng.integers(0, 2**64, size=40_000, dtype=np.uint64))
    a.push(keys, np.ones((len(keys), 8)))
    found = []
    for turn, (block, _) in enumerate(a.items()):
        found.append(block)
        if turn < 10:
            more = rng.integers(0, 2**64, size=2000, dtype=np.uint64)
            b.push_async(more, np.ones((2000, 8))).wait()
    got, times = np.unique(np.concatenate(found), return_counts=True)

    assert times.max() == 1 and np.isin(keys, got).all()


# ---- many ----


def test_many_threads_push_to_one_table(stores, rng):
    """Each push counts once, whichever thread made it, in messages that interleave."""
    workers = stores(2, staleness=None)
    tables = workers.rows("e", 2, "int64", cache_keys=True)
    keys = rng.integers(0, 2**64, size=30_000, dtype=np.uint64)
    errors = []

    def push(table: Any, seed: int) -> None:
        try:
            for turn in range(5):
                table.push(keys, np.full((len(keys), 2), 1 + seed * 10))
                if turn == 3:
                    assert (table.pull(keys[:7]) >= (1 + seed * 10) * 4).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(t, n)) for t in tables for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in workers:
        store.flush()

    assert not errors
    distinct, times = np.unique(keys, return_counts=True)
    got = tables[0].pull(distinct)
    assert (got == (times * 2 * 5 * (1 + 11 + 21))[:, None]).all()


@pytest.mark.slow
def test_ten_million_rows(monkeypatch, replays, rng):
    """Made, found, and counted."""
    monkeypatch.delenv("COMMUTE_REPLAYS")  # which would do it all twice
    batch, batches = 1_000_000, 10
    with commute.init() as world:
        e = world.store().sparse("e")
        for turn in range(batches):
            keys = np.arange(turn * batch, (turn + 1) * batch, dtype=np.uint64)
            keys *= np.uint64(0x9E3779B97F4A7C15)  # odd: all are different
            e.push(keys, np.full(batch, turn + 1, "float32"))
        assert e.count() == batch * batches
        for turn in range(batches):
            some = rng.integers(turn * batch, (turn + 1) * batch, size=1000, dtype=np.uint64)
            assert (e.pull(some * np.uint64(0x9E3779B97F4A7C15)) == turn + 1).all()
        info = e.info()
    replays.expected = False

    assert info.bytes < 20 * info.rows
