# SPDX-License-Identifier: Apache-2.0
"""What is pushed is what is pulled: every shape and dtype, every verb, every kind of array."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import commute
from commute import SGD, Group

DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
CHUNK_BYTES = 64 << 10
SHAPES = {
    "0-d": (),
    "empty": (0,),
    "empty in the middle": (3, 0, 2),
    "one element": (1,),
    "one row": (1, 7),
    "three axes": (2, 3, 4),
    "one chunk": (CHUNK_BYTES // 4,),
    "one more": (CHUNK_BYTES // 4 + 1,),
    "several chunks": (25_001, 4),
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def small(shape: tuple[int, ...], dtype: str, *seed: int) -> Any:
    """Whole numbers that are exact in every dtype, also when some are added."""
    numbers = np.random.default_rng(seed).integers(0, 9, size=shape)
    return np.asarray(numbers).astype(numpy_dtype(dtype))


def in_threads(*bodies: Callable[[], None]) -> None:
    """Runs them at the same time; the first exception is raised when all have ended."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(b,), daemon=True) for b in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]

    assert not any(thread.is_alive() for thread in threads)


# ---- shapes and dtypes ----


@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_and_dtype(together, seed, shape, dtype):
    """Sums of rounds, exactly, by push and pull and by push_pull, into the array that is given."""

    def work(group: Group) -> tuple[Any, Any]:
        first = small(shape, dtype, seed)
        w = group.store().dense("w", shape, dtype, init=first)
        one, two = np.empty(shape, first.dtype), np.empty(shape, first.dtype)
        w.push(small(shape, dtype, seed, group.rank, 1))
        assert w.pull(out=one) is one
        assert w.push_pull(small(shape, dtype, seed, group.rank, 2), out=two) is two
        return one, two

    seen = together.values(work)
    value = small(shape, "int64", seed)
    for turn in (1, 2):
        value = value + sum(small(shape, "int64", seed, rank, turn) for rank in range(len(seen)))
        for found in seen:
            assert found[turn - 1].shape == shape
            np.testing.assert_array_equal(found[turn - 1].astype("int64"), value)


@pytest.mark.parametrize("dtype", [name for name in DTYPES.split() if name != "bfloat16"])
def test_a_pull_makes_an_array(together, dtype):
    """Of the table's shape and dtype, new each time; NumPy scalars where there are no axes."""

    def work(group: Group) -> None:
        store = group.store()
        w = store.dense("w", (2, 3), dtype)
        first, second = w.pull(), w.push_pull(np.ones((2, 3), dtype))
        assert first.shape == (2, 3) and first.dtype == dtype and not first.any()
        assert second.shape == (2, 3) and second.dtype == dtype and (second == group.size).all()
        z = store.dense("z", (), dtype)
        assert z.push_pull(1).shape == () and z.pull() == group.size

    together.values(work)


def test_shapes_and_dtypes_by_other_names(together):
    """A number is a shape of one axis; dtypes by class, object, and torch's."""

    def work(group: Group) -> None:
        store = group.store()
        for i, shape in enumerate((5, np.int64(5), [5], (np.int8(5),), torch.Size([5]))):
            assert store.dense(f"shape {i}", shape).shape == (5,)
        for name in ("int8", "float32", "float64"):
            for i, dtype in enumerate(
                (name, np.dtype(name), getattr(np, name), getattr(torch, name))
            ):
                assert store.dense(f"{name} {i}", 2, dtype).dtype == name
        assert store.dense("b", 2, torch.bfloat16).dtype == "bfloat16"
        assert store.dense("default", 2).dtype == "float32"

    together.values(work)


# ---- the verbs ----

VERBS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "store.push, store.pull": lambda s, w, g: (s.push("w", g), s.pull("w"))[1],
    "push, pull": lambda s, w, g: (w.push(g), w.pull())[1],
    "store.push_pull": lambda s, w, g: s.push_pull("w", g),
    "push_pull": lambda s, w, g: w.push_pull(g),
    "push_async, pull_async": lambda s, w, g: (w.push_async(g), w.pull_async())[1].wait(),
    "push_async and waited for": lambda s, w, g: (w.push_async(g).wait(), w.pull())[1],
    "store.push_async, store.pull_async": lambda s, w, g: (
        s.push_async("w", g),
        s.pull_async("w"),
    )[1].wait(),
    "push_pull_async": lambda s, w, g: w.push_pull_async(g).wait(),
    "store.push_pull_async": lambda s, w, g: s.push_pull_async("w", g).wait(),
    "push, flush, fresh pull": lambda s, w, g: (w.push(g), s.flush(), w.pull(fresh=True))[2],
    "store.pull(out=)": lambda s, w, g: (s.push("w", g), s.pull("w", out=np.empty_like(g)))[1],
    "pull_async(out=)": lambda s, w, g: (w.push(g), w.pull_async(out=np.empty_like(g)).wait())[1],
    "push_pull in place": lambda s, w, g: w.push_pull(g, out=g),
    "getitem": lambda s, w, g: s["w"].push_pull(g),
}


@pytest.mark.parametrize("count", [5, 50_000])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_one_round(together, verb, count):
    """By name and on the table, at once and asynchronous: round n is everybody's n-th push."""

    def work(group: Group) -> None:
        store = group.store()
        w = store.dense("w", (count,), "int64")
        value = np.zeros(count, "int64")
        for turn in range(4):
            mine = small((count,), "int64", group.rank, turn)
            value += sum(small((count,), "int64", rank, turn) for rank in range(group.size))
            np.testing.assert_array_equal(VERBS[verb](store, w, mine), value)
        assert w.info().clock == 4

    together.values(work)


def test_the_array_of_a_push_may_be_reused(together):
    """As soon as `push` has returned, also where it is larger than what is on its way."""

    def work(group: Group) -> None:
        w = group.store().dense("w", (2_000_000,), "int32")  # 8 MB
        g = np.empty(2_000_000, "int32")
        for turn in (1, 10):
            g[:] = turn
            w.push(g)
            g[:] = -99
            assert np.unique(w.pull()).tolist() == [(turn if turn == 1 else 11) * group.size]

    together.values(work)


def test_several_in_flight(together):
    """Rounds of one table and of others, waited for in another order, each with its own value."""

    def work(group: Group) -> None:
        store = group.store()
        # In the largest, rounds close while answers of the round before wait to be sent.
        sizes = (1, 1000, 20_000, 1_000_000)
        tables = [store.dense(f"w{i}", (n,), "int64") for i, n in enumerate(sizes)]
        handles = [
            (turn, w.push_pull_async(np.full(w.shape, 10**turn)))
            for turn in range(5)
            for w in tables
        ]
        for turn, handle in reversed(handles):
            rounds = int("1" * (turn + 1))
            assert np.unique(handle.wait()).tolist() == [rounds * group.size]
            assert handle.done() and handle.wait() is handle.wait()

    together.values(work)


def test_handles(together):
    """A push has nothing to return; a pull returns the array it wrote into."""

    def work(group: Group) -> None:
        w = group.store().dense("w", (3,), "float64")
        push = w.push_async(np.ones(3))
        assert push.wait() is None and push.done()
        out = np.empty(3)
        pull = w.pull_async(out=out)
        assert pull.wait() is out and pull.done() and out.tolist() == [group.size] * 3
        assert isinstance(pull, commute.Handle)
        assert repr(pull) == "<Handle of pull of 'w', done>"

    together.values(work)


# ---- contributions of several parts ----


@pytest.mark.parametrize("verb", ["push", "push_async", "push_pull", "push_pull_async"])
def test_a_list_of_device_gradients(together, verb):
    """Their sum is one contribution."""

    def work(group: Group) -> None:
        store = group.store()
        w = store.dense("w", (30_000,), "float32", reduce="mean")
        devices = [np.full(30_000, i, "float32") for i in (1, 2)] + [torch.full((30_000,), 3.0)]
        for turn, pushed in enumerate((devices, tuple(devices), devices[:1]), 1):
            done = getattr(w, verb)(pushed)
            if verb.endswith("async"):
                done.wait()
            assert set(w.pull().tolist()) == {6 * turn if turn < 3 else 13}
            assert w.info().clock == turn

    together.values(work)


@pytest.mark.parametrize("update, value", [
    ("sum", 5 + 6), ("prod", 5 * 6), ("min", 1), ("max", 5), ("assign", 3)
])  # fmt: skip
def test_devices_combine_as_the_update_does(together, update, value):
    def work(group: Group) -> Any:
        w = group.store().dense("w", (2,), "int64", update=update, init=5)
        devices = [np.full(2, i) for i in (1, 2, 3)]
        return w.push_pull(devices if group.rank == 0 else np.full(2, 1 if update != "sum" else 0))

    seen = together.values(work)
    expected = value if update != "assign" or len(seen) == 1 else 1

    assert [found.tolist() for found in seen] == [[expected] * 2] * len(seen)


@pytest.mark.parametrize("end", ["push", "push_pull", "tick"])
def test_accumulate(together, end):
    """Pieces travel and do not count; the push after them, or the tick, makes them one."""

    def work(group: Group) -> None:
        store = group.store()
        w = store.dense("w", (20_000,), "float64", reduce="mean")
        for turn in range(1, 4):
            for piece in (1.0, 2.0):
                w.push(np.full(20_000, piece), accumulate=True)
            w.push_async(np.full(20_000, 4.0), accumulate=True).wait()
            assert w.info().clock == turn - 1
            assert set(w.pull().tolist()) == {(turn - 1) * (7.0 if end == "tick" else 15.0)}
            group.barrier()  # nobody closes the round while another rank looks
            if end == "tick":
                store.tick()
            else:
                getattr(w, end)(np.full(20_000, 8.0))
                store.tick()  # ends the iteration: it has its contribution
            assert w.info().clock == turn
            assert set(w.pull().tolist()) == {turn * (7.0 if end == "tick" else 15.0)}

    together.values(work)


def test_a_tick_completes_pieces_after_a_push(together):
    """The piece belongs to a second contribution, which the tick completes."""

    def work(group: Group) -> Any:
        store = group.store()
        w = store.dense("w", (1,), "int64")
        w.push(np.array([1]))
        w.push(np.array([10]), accumulate=True)
        store.tick()
        return w.info().clock, w.pull().item()

    seen = together.values(work)

    assert seen == [(2, 11 * len(seen))] * len(seen)


def test_mean_is_over_those_that_pushed(stores):
    """Who ticks is not counted; pieces and devices of one worker count once."""
    workers = stores(3)
    tables = [s.dense("w", (2,), "float32", update=SGD(lr=1.0), reduce="mean") for s in workers]
    one = np.ones(2, "float32")
    tables[0].push(one * 2)
    tables[1].push([one, one * 3])
    workers[2].tick()
    first = tables[2].pull().tolist()
    workers[0].tick()  # of the iteration that pushed
    workers[0].tick()
    tables[1].push(one, accumulate=True)
    tables[1].push(one, accumulate=True)
    tables[1].push(one)
    tables[2].push(one * 5)
    second = tables[0].pull().tolist()

    assert first == [-3.0, -3.0]
    assert second == [-7.0, -7.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_mean_of_every_float(together, dtype):
    def work(group: Group) -> Any:
        kind = numpy_dtype(dtype)
        w = group.store().dense("w", (40_000,), dtype, reduce="mean")
        out = np.empty(40_000, kind)
        return np.unique(w.push_pull(np.full(40_000, 2 * group.rank + 1, kind), out=out)).tolist()

    seen = together.values(work)

    assert seen == [[len(seen)]] * len(seen)


# ---- arrays ----


def test_torch_tensors(together):
    """Pushed, pulled into, as first value; parameters and their gradients too."""

    def work(group: Group) -> None:
        store = group.store()
        for name in DTYPES.split():
            dtype = getattr(torch, name)
            w = store.dense(name, (3, 2), dtype, init=torch.full((3, 2), 2).to(dtype))
            out = torch.empty((3, 2), dtype=dtype)
            assert w.push_pull(torch.ones((3, 2)).to(dtype), out=out) is out
            assert out.double().eq(2.0 + group.size).all(), name
            w.push(torch.ones((3, 2)).to(dtype))
            assert w.pull(out=out).double().eq(2.0 + 2 * group.size).all(), name
        layer = torch.nn.Linear(2, 3)
        layer(torch.ones(1, 2)).sum().backward()
        w = store.dense("layer", (3, 2), torch.float32, init=layer.weight)
        with torch.no_grad():
            w.push_pull(layer.weight.grad, out=layer.weight)
        assert layer.weight.requires_grad

    together.values(work)


def test_bfloat16(together):
    """NumPy has none: a pull makes a torch tensor, or writes into ml_dtypes' array."""

    def work(group: Group) -> None:
        w = group.store().dense("w", (3,), "bfloat16", init=torch.full((3,), 0.5).bfloat16())
        made = w.push_pull(torch.ones(3, dtype=torch.bfloat16))
        assert made.dtype == torch.bfloat16 and made.tolist() == [group.size + 0.5] * 3
        out = np.empty(3, ml_dtypes.bfloat16)
        w.push(np.ones(3, ml_dtypes.bfloat16))
        assert w.pull(out=out) is out
        assert out.astype("float32").tolist() == [2 * group.size + 0.5] * 3
        handle = w.pull_async()
        assert handle.wait().tolist() == [2 * group.size + 0.5] * 3

    together.values(work)


def test_arrays_that_are_not_contiguous(together):
    """They can be pushed, and be a first value; all verbs read the right elements."""

    def work(group: Group) -> None:
        base = np.arange(48.0)
        x = base.reshape(6, 8)[::2, 1:7:2]
        views = {
            "strided": x,
            "transposed": np.ascontiguousarray(x.T).T,
            "fortran": np.asfortranarray(x),
            "backwards": np.ascontiguousarray(x[::-1])[::-1],
            "torch": torch.from_numpy(base).reshape(6, 8)[::2, 1:7:2],
            "read-only": np.frombuffer(x.tobytes()).reshape(3, 3),
        }
        store = group.store()
        for name, view in views.items():
            w = store.dense(name, (3, 3), "float64", init=view)
            w.push(view)
            w.push_async(view).wait()
            np.testing.assert_array_equal(w.push_pull(view), x * (1 + 3 * group.size))

    together.values(work)


def test_the_buffer_protocol(together):
    """array.array and memoryview, to push and to pull into."""

    def work(group: Group) -> None:
        w = group.store().dense("w", (2, 2), "float64")
        view = memoryview(array.array("d", [1, 2, 3, 4])).cast("B").cast("d", [2, 2])
        out = memoryview(array.array("d", [0] * 4)).cast("B").cast("d", [2, 2])
        assert w.push_pull(view, out=out) is out
        assert out.tolist() == [[group.size, 2 * group.size], [3 * group.size, 4 * group.size]]

    together.values(work)


# ---- the first value ----


def test_the_first_value(together):
    """An array, a number for all elements, or zeros; before and after the first push."""

    def work(group: Group) -> None:
        store = group.store()
        given = np.arange(50_000, dtype="float32")
        for name, init, value in (
            ("array", given, given),
            ("number", 2.5, np.full(50_000, 2.5)),
            ("NumPy's number", np.float32(2.5), np.full(50_000, 2.5)),
            ("none", None, np.zeros(50_000)),
        ):
            w = store.dense(name, (50_000,), "float32", init=init)
            np.testing.assert_array_equal(w.pull(), value)
            group.barrier()
            np.testing.assert_array_equal(w.push_pull(np.ones_like(given)), value + group.size)
        assert store.dense("z", (), "int8", init=-3).pull() == -3
        assert store.dense("empty", (0,), init=1).pull().shape == (0,)

    together.values(work)


def test_the_first_value_is_its_makers(stores):
    """The worker whose declaration comes first; the others' is not looked at."""
    rank_0, rank_1 = stores(2)
    b = rank_1.dense("w", (40_000,), "int32", init=7)
    a = rank_0.dense("w", (40_000,), "int32", init=np.arange(40_000, dtype="int32"))

    assert set(a.pull().tolist()) == set(b.pull().tolist()) == {7}


def test_the_first_value_is_whole(ranks):
    """All declare at once, each with a value of its own: one rank's is used, in every chunk."""

    def work(group: Group) -> list[int]:
        store = group.store()
        group.barrier()
        tables = [store.dense(f"w{i}", (50_000,), "int32", init=group.rank) for i in range(5)]
        return [np.unique(w.pull()).tolist() for w in tables]

    seen = ranks(4).values(work)

    assert all(found == seen[0] for found in seen)
    assert all(len(value) == 1 and 0 <= value[0] < 4 for value in seen[0])


def test_declaring_again_is_the_same_table(together):
    """It gives the table that is there, with its value."""

    def work(group: Group) -> None:
        store = group.store()
        w = store.dense("w", (3,), init=1)
        w.push_pull(np.ones(3, "float32"))
        again = store.dense("w", (3,), init=100)
        assert again is w and store.tables() == [w]
        assert again.pull().tolist() == [1.0 + group.size] * 3

    together.values(work)


# ---- several stores, several threads ----


def test_stores_do_not_touch_each_other(ranks):
    """Tables of the same name in stores of different names, each with its own clocks."""

    def work(group: Group) -> None:
        one, two = group.store("one"), group.store("two", staleness=None)
        a, b = one.dense("w", (3,), "int64"), two.dense("w", (4,), "float64", init=0.5)
        assert a.push_pull(np.ones(3, "int64")).tolist() == [group.size] * 3
        assert one.tables() == [a] and two.tables() == [b]
        assert (a.info().clock, b.info().clock) == (1, 0)
        assert b.pull().tolist() == [0.5] * 4
        two.tick()
        assert (a.info().clock, b.info().clock) == (1, 1)
        two.leave()
        assert a.push_pull(np.ones(3, "int64")).tolist() == [2 * group.size] * 3

    ranks(2).values(work)


def test_several_threads_on_one_store(together):
    """Each with a table of its own, in step with the same thread of the other ranks."""

    def work(group: Group) -> None:
        store = group.store()

        def body(name: str) -> None:
            w = store.dense(name, (20_000,), "int64")
            for turn in range(1, 9):
                found = w.push_pull(np.ones(20_000, "int64"))
                assert set(found.tolist()) == {turn * group.size}

        in_threads(*(lambda name=f"w{i}": body(name) for i in range(4)))  # type: ignore[misc]
        assert len(store.tables()) == 4

    together.values(work)


def test_several_threads_on_one_table(together):
    """Every contribution is counted once, also with hundreds of calls under way."""

    def work(group: Group) -> Any:
        store = group.store(staleness=None)
        w = store.dense("w", (500,), "int64")

        def body() -> None:
            handles = [w.push_async(np.ones(500, "int64")) for _ in range(150)]
            for handle in handles:
                handle.wait()

        in_threads(*[body] * 4)
        group.barrier()
        return np.unique(w.pull()).tolist()

    seen = together.values(work)

    assert seen == [[600 * len(seen)]] * len(seen)


# ---- everything at once ----

WAYS = ["push", "push_pull", "devices", "pieces", "pieces and tick", "async", "tick"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_random_rounds(together, seed, deterministic):
    """Tables of many sizes, each rank contributing in a way of its own: NumPy's sums, exactly."""
    plan = np.random.default_rng(seed)
    sizes = plan.integers(0, 40_000, size=4).tolist()
    turns = 15
    ways = plan.choice(WAYS, size=(3, turns, len(sizes)))

    def contribute(store: Any, w: Any, way: str, g: Any) -> None:
        if way == "push_pull":
            w.push_pull_async(g)
        elif way == "devices":
            w.push([g - 1, np.ones_like(g)])
        elif way.startswith("pieces"):
            w.push(g - 2, accumulate=True)
            w.push(np.ones_like(g), accumulate=True)
            last = np.ones_like(g)
            w.push(last, accumulate=True) if way == "pieces and tick" else w.push(last)
        elif way == "async":
            w.push_async(g)
        elif way == "push":
            w.push(g)

    def work(group: Group) -> None:
        store = group.store(deterministic=deterministic)
        tables = [store.dense(f"w{i}", (n,), "int64", init=i) for i, n in enumerate(sizes)]
        values = [np.full(n, i) for i, n in enumerate(sizes)]
        for turn in range(turns):
            for i, w in enumerate(tables):
                for rank in range(group.size):
                    way = ways[rank, turn, i]
                    g = small(w.shape, "int64", seed, rank, turn, i)
                    values[i] = values[i] + (g if way != "tick" else 0)
                    if rank == group.rank:
                        contribute(store, w, way, g)
            store.tick()
            for i in np.random.default_rng([seed, group.rank, turn]).permutation(len(tables)):
                np.testing.assert_array_equal(tables[i].pull(), values[i])
                assert tables[i].info().clock == turn + 1

    together.values(work)
