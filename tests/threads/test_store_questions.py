# SPDX-License-Identifier: Apache-2.0
"""What can be asked of a table where it lies: norm, sum, nonzero, top; and what is known of it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commute import FTRL, SGD, Adam, Group, Semiring

DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
CHUNK_BYTES = 64 << 10


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def numbers(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Random, with zeros, ties and, where there are any, numbers below zero."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        limit = min(np.iinfo(kind).max, 10_000)
        return rng.integers(-limit if kind.kind == "i" else 0, limit + 1, size=shape).astype(kind)
    values = rng.normal(size=shape) * rng.integers(0, 2, size=shape)
    return np.asarray(values, kind)


def largest(values: Any, k: int) -> tuple[list[int], list[float]]:
    """Of largest magnitude first, of equals the first."""
    flat = values.reshape(-1).astype("float64")
    order = np.lexsort((np.arange(flat.size), -np.abs(flat)))[:k]
    return order.tolist(), flat[order].tolist()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7, 11), (40_001,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.split())
def test_questions_agree_with_numpy(together, seed, dtype, shape):
    """The same answers on all ranks, from all chunks."""
    values = numbers(dtype, shape, seed)
    wide = values.astype("float64")

    def work(group: Group) -> None:
        w = group.store().dense("w", shape, dtype, init=values)
        assert math.isclose(w.norm(), float(np.linalg.norm(wide.reshape(-1))), rel_tol=1e-9)
        if values.dtype.kind in "iu":
            assert w.sum() == int(values.astype(object).sum()) and isinstance(w.sum(), int)
        else:
            assert math.isclose(w.sum(), float(wide.sum()), rel_tol=1e-9, abs_tol=1e-9)
        assert w.nonzero() == np.count_nonzero(wide)
        for k in (1, 3, 50, 100_000):
            indices, found = w.top(k)
            assert (indices.tolist(), found.tolist()) == largest(values, k)
            assert indices.dtype == np.int64 and found.dtype == np.float64

    together.values(work)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_sums_of_large_integers_are_exact(together, dtype):
    """Where float64 would round; beyond 64 bits they wrap around, as NumPy's do."""
    info = np.iinfo(dtype)
    values = np.array([info.max, 3, info.min, 1, info.max // 3, 5], dtype)
    many = np.tile(values, 9_000)  # several chunks

    def work(group: Group) -> None:
        store = group.store()
        for name, given in (("few", values[1:5]), ("many", many)):
            w = store.dense(name, given.shape, dtype, init=given)
            with np.errstate(over="ignore"):
                assert w.sum() == int(given.sum(dtype=dtype))

    together.values(work)


def test_numbers_that_are_not(together):
    """NaN is left out of the top and counts as not zero, infinities come first."""
    values = np.array([0.0, np.nan, -np.inf, 2.0, np.nan, -3.0])

    def work(group: Group) -> None:
        w = group.store().dense("w", (6,), "float64", init=values)
        indices, found = w.top(4)
        assert indices.tolist() == [2, 5, 3, 0] and found.tolist() == [-np.inf, -3.0, 2.0, 0.0]
        assert w.nonzero() == 5
        assert math.isnan(w.norm()) and math.isnan(w.sum())

    together.values(work)


def test_questions_see_the_round(stores):
    """They wait as a pull does: asked after a push, they are of the round it took part in."""
    rank_0, rank_1 = stores(2)
    a, b = (s.dense("w", (20_000,), "int64") for s in (rank_0, rank_1))
    a.push(np.ones(20_000, "int64"))
    b.push(np.ones(20_000, "int64"))

    assert (a.sum(), b.nonzero()) == (40_000, 20_000)
    assert b.top(2)[1].tolist() == [2.0, 2.0] and a.norm() == math.sqrt(4 * 20_000)


# ---- what is known ----


def test_info(stores):
    """Name, shape, bytes, update and clock, as declared and as it stands."""
    rank_0, rank_1 = stores(2, staleness=3)
    options: dict[str, Any] = {"update": SGD(lr=0.5), "staleness": 0, "reduce": "mean"}
    a, b = (s.dense("w", (100, 7), "float64", **options) for s in (rank_0, rank_1))
    a.push(np.ones((100, 7)))
    b.push_pull(np.ones((100, 7)))
    info = a.info()

    assert (info.name, info.shape, info.dtype, info.bytes) == ("w", (100, 7), "float64", 5600)
    assert (info.update, info.reduce, info.staleness) == ("SGD(lr=0.5)", "mean", 0)
    assert (info.clock, b.info().clock) == (1, 1)
    assert sum(info.slots.values()) == 1


@pytest.mark.parametrize("dtype, width", [("int8", 1), ("bfloat16", 2), ("float16", 2),
                                          ("float32", 4), ("uint64", 8)])  # fmt: skip
def test_bytes_and_slots(stores, dtype, width):
    """A chunk of 64 KB is a slot's; both shards get their share."""
    (rank_0,) = stores(1)
    count = (5 * CHUNK_BYTES + 1) // width + 1
    info = rank_0.dense("w", (count,), dtype).info()

    assert info.bytes == count * width
    assert info.slots == {"shard 0": 3, "shard 1": 3}


def test_slots_of_many_tables_are_spread(stores):
    """Small tables do not crowd one shard."""
    (rank_0,) = stores(1)
    tables = [rank_0.dense(f"w{i}", (10,)) for i in range(40)]
    shards: dict[str, int] = {}
    for w in tables:
        for shard, slots in w.info().slots.items():
            shards[shard] = shards.get(shard, 0) + slots

    assert shards == {"shard 0": 20, "shard 1": 20}


def test_slots_in_this_process(together):
    def work(group: Group) -> Any:
        return group.store().dense("w", (10,)).info().slots

    seen = together.values(work)

    assert seen in ([{"this process": 1}], [{"shard 0": 1}] * 3, [{"shard 1": 1}] * 3)


def test_copies(together):
    """Plain `push` copies what it is given, once; the other verbs keep the caller's array."""

    def work(group: Group) -> None:
        w = group.store().dense("w", (1000,), "float64")
        g = np.ones(1000)
        w.push_pull(g)
        w.push_pull_async(g).wait()
        w.push_async(g).wait()
        w.pull()
        assert (w.info().copies, w.info().copied_bytes) == (0, 0)
        w.push(g)
        w.pull()
        w.push(g, accumulate=True)
        w.push([g, g])
        assert (w.info().copies, w.info().copied_bytes) == (3, 24_000)

    together.values(work)


def test_tables_in_the_order_of_their_declaration(together):
    def work(group: Group) -> None:
        store = group.store("main")
        assert store.tables() == []
        made = [store.dense(name, (2,)) for name in ("b", "a", "c")]
        assert store.tables() == made
        assert [w.name for w in store.tables()] == ["b", "a", "c"]
        assert store["a"] is made[1]
        assert repr(store) == "<Store 'main', staleness 0, 3 tables>"
        assert repr(made[0]) == "<DenseTable 'b' (2,) float32>"

    together.values(work)


def test_updates_in_words(together):
    """What a mismatch shows and `info` says."""
    words = {
        "min": "min",
        SGD(lr=0.1, weight_decay=0.2): "SGD(lr=0.1, weight_decay=0.2)",
        Adam(): "Adam(lr=0.001, beta1=0.9, beta2=0.999, eps=1e-08)",
        Semiring(add="min", mul="+"): "Semiring(add=min, mul=sum)",
        FTRL(): "FTRL(lr=0.1, beta=1, l1=0, l2=0)",
        FTRL(0.5, beta=0.25, l1=1e-7, l2=2): "FTRL(lr=0.5, beta=0.25, l1=1e-07, l2=2)",
    }

    def work(group: Group) -> None:
        store = group.store()
        for i, (update, text) in enumerate(words.items()):
            assert store.dense(f"w{i}", (2,), update=update).info().update == text
        adam = store["w2"]
        if group.rank == 0:
            adam.set(lr=0.01, betas=(0.5, 0.75))
            assert adam.info().update == "Adam(lr=0.01, beta1=0.5, beta2=0.75, eps=1e-08)"

    together.values(work)


@pytest.mark.parametrize("staleness", [2, None])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_clocks_of_all(stores, kind, staleness):
    """Of each rank, without waiting for anybody; not of one that has left."""
    workers = stores(3, staleness=staleness)
    a, b, c = workers.tables("w", 2) if kind == "dense" else workers.rows("w", 2)
    given = [np.ones(2, "float32")] if kind == "dense" else [[7], np.ones((1, 2), "float32")]
    b.push(*given)
    b.push(*given)
    a._store.tick()
    workers.settle()
    assert a.clocks() == b.clocks() == c.clocks() == {0: 1, 1: 2, 2: 0}

    c._store.leave()
    assert a.clocks() == {0: 1, 1: 2}
