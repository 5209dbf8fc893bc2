# SPDX-License-Identifier: Apache-2.0
"""What contributions do to a value: every update against NumPy and against torch's optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import commute
from commute import FTRL, SGD, Adagrad, Adam, Group, Momentum
from references import values_after

ROUNDS = 6
COUNT = 20_011  # of float32 and of float64 more than one chunk, and no multiple of anything
DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.2),
    Momentum(lr=0.1),
    Momentum(lr=0.05, momentum=0.7, dampening=0.3),
    Momentum(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    Momentum(lr=0.05, momentum=0.0),
    Adagrad(),
    Adagrad(lr=0.3, lr_decay=0.25, initial=0.5, eps=1e-3, weight_decay=0.1),
    Adam(),
    Adam(lr=0.02, betas=(0.6, 0.8), eps=1e-2, weight_decay=0.3),
    FTRL(),
    FTRL(lr=0.5, beta=0.3, l2=0.2),
    FTRL(lr=0.2, beta=0.5, l1=1.5, l2=0.1),
]


def start(update: Any, value: Any) -> Any:
    """The `init` of a table: this value, and none for FTRL, which begins with zeros."""
    return None if isinstance(update, FTRL) else value


def began(update: Any, value: Any) -> Any:
    """The first value of a table with the `init` above."""
    return np.zeros_like(value) if isinstance(update, FTRL) else value


def expected(update: Any, value: Any, gradients: Any) -> list[Any]:
    return values_after([update] * len(gradients), began(update, value), gradients)


def train(
    together: Any,
    update: Any,
    dtype: str,
    seed: int,
    *,
    shape: tuple[int, ...] = (COUNT,),
    **options: Any,
) -> tuple[list[list[Any]], Any, list[Any]]:
    """What each rank saw after each round, the first value, and the rounds' sums in rank order."""

    def gradient(rank: int, turn: int) -> Any:
        return np.random.default_rng([seed, rank, turn]).normal(size=shape).astype(dtype)

    first = np.random.default_rng(seed).normal(size=shape).astype(dtype)

    def work(group: Group) -> list[Any]:
        store = group.store("updates", **options)
        w = store.dense("w", shape, dtype, update=update, init=start(update, first))
        seen = []
        for turn in range(ROUNDS):
            if turn % 2:
                seen.append(w.push_pull(gradient(group.rank, turn)))
            else:
                w.push(gradient(group.rank, turn))
                seen.append(w.pull())
        return seen

    seen = together.values(work)
    sums = [sum(gradient(rank, turn) for rank in range(len(seen))) for turn in range(ROUNDS)]
    return seen, first, sums


# ---- optimizers ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("update", OPTIMIZERS, ids=str)
def test_optimizer_agrees_with_numpy(together, seed, update, dtype):
    """After every round all ranks pull what ten lines of NumPy compute from the round's sum."""
    seen, first, sums = train(together, update, dtype, seed)
    values = expected(update, first, sums)

    for rank_saw in seen:
        for found, value in zip(rank_saw, values, strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for rank_saw in seen[1:]:
        for found, other in zip(rank_saw, seen[0], strict=True):
            assert found.tobytes() == other.tobytes()  # all ranks receive the same bits


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("update", OPTIMIZERS, ids=str)
def test_optimizer_has_the_bits_of_numpy(together, seed, update, dtype):
    """One rounding per operation, in the value's type: nothing is fused, nothing is wider."""
    seen, first, sums = train(together, update, dtype, seed, shape=(1_001,), deterministic=True)
    values = expected(update, first, sums)

    for rank_saw in seen:
        for found, value in zip(rank_saw, values, strict=True):
            np.testing.assert_array_equal(found, value, strict=True)


def test_ftrl_keeps_at_zero_what_matters_little(together):
    """Values whose gradients sum to little are exactly 0 by l1, and come back when it falls."""

    def work(group: Group) -> tuple[Any, Any]:
        w = group.store().dense("w", (3,), "float64", update=FTRL(l1=1.0))
        little = w.push_pull(np.array([0.5, -0.5, 6.0]) / group.size)
        if group.rank == 0:
            w.set(l1=0.25)
        group.barrier()
        return little, w.push_pull(np.zeros(3))

    for little, more in together.values(work):
        assert little[:2].tolist() == [0, 0] and little[2] < 0
        assert (np.sign(more) == [-1, 1, -1]).all() and more[2] < little[2]


TWINS = [
    (SGD(lr=0.1), "SGD", {"lr": 0.1}),
    (SGD(lr=0.1, weight_decay=0.2), "SGD", {"lr": 0.1, "weight_decay": 0.2}),
    (Momentum(lr=0.1), "SGD", {"lr": 0.1, "momentum": 0.9}),
    (
        Momentum(lr=0.1, momentum=0.8, dampening=0.3),
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3},
    ),
    (
        Momentum(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
        "SGD",
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    (Adagrad(), "Adagrad", {}),
    (
        Adagrad(lr=0.3, lr_decay=0.25, initial=0.5, eps=1e-3, weight_decay=0.1),
        "Adagrad",
        {
            "lr": 0.3,
            "lr_decay": 0.25,
            "initial_accumulator_value": 0.5,
            "eps": 1e-3,
            "weight_decay": 0.1,
        },
    ),
    (Adam(), "Adam", {}),
    (
        Adam(lr=0.02, betas=(0.6, 0.8), eps=1e-2, weight_decay=0.3),
        "Adam",
        {"lr": 0.02, "betas": (0.6, 0.8), "eps": 1e-2, "weight_decay": 0.3},
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("update, name, numbers", TWINS, ids=[str(twin[0]) for twin in TWINS])
def test_optimizer_agrees_with_torch(together, seed, update, name, numbers, dtype):
    """The numbers and their defaults mean what they mean in torch.optim."""
    torch = pytest.importorskip("torch")
    seen, first, sums = train(together, update, dtype, seed, shape=(70, 3))
    parameter = torch.nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = getattr(torch.optim, name)([parameter], **numbers)

    for turn, g in enumerate(sums):
        parameter.grad = torch.from_numpy(g)
        optimizer.step()
        value = parameter.detach().numpy()
        for rank_saw in seen:
            np.testing.assert_allclose(
                rank_saw[turn], value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("update", OPTIMIZERS, ids=str)
def test_optimizer_on_arrival(stores, rng, update):
    """Without bounds each push is a step of its own, whoever made it and however late: its state
    is on the server."""
    rank_0, rank_1 = stores(2, staleness=None)
    tables = [s.dense("w", (50,), "float64", update=update) for s in (rank_0, rank_1)]
    gradients = rng.normal(size=(6, 50))
    for turn, g in enumerate(gradients):
        tables[turn // 2 % 2].push_async(g).wait()
    value = expected(update, np.zeros(50), gradients)[-1]

    for table in tables:
        np.testing.assert_allclose(table.pull(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", OPTIMIZERS, ids=str)
def test_empty_round_is_no_step(together, update, seed):
    """A round of ticks alone changes nothing: no decay, no momentum, no count of steps."""

    def work(group: Group) -> tuple[Any, Any, Any]:
        store = group.store()
        w = store.dense("w", (7,), "float64", update=update, init=start(update, 2.0))
        g = np.random.default_rng([seed, group.rank]).normal(size=7)
        first = w.push_pull(g)
        store.tick()  # of the iteration that pushed
        store.tick()
        store.tick()
        assert w.info().clock == 3
        return first, w.pull(), w.push_pull(g)

    seen = together.values(work)
    total = sum(np.random.default_rng([seed, rank]).normal(size=7) for rank in range(len(seen)))
    values = expected(update, np.full(7, 2.0), [total, total])

    for first, idle, second in seen:
        assert first.tobytes() == idle.tobytes()
        np.testing.assert_allclose(second, values[1], rtol=1e-12, atol=1e-12)


# ---- the plain ones ----

PLAIN = {
    "sum": (3, lambda value, round_: value + sum(round_)),
    "assign": (3, lambda value, round_: round_[-1]),
    "min": (9, lambda value, round_: np.minimum.reduce([value, *round_])),
    "max": (1, lambda value, round_: np.maximum.reduce([value, *round_])),
    "prod": (1, lambda value, round_: value * np.prod(round_, axis=0)),
}


@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("update", PLAIN)
def test_plain_update_agrees_with_numpy(together, seed, update, dtype):
    """Exactly, over all dtypes; `assign` takes the highest rank's."""
    start, combine = PLAIN[update]
    kind = numpy_dtype(dtype)

    def gradient(rank: int, turn: int) -> Any:
        high = 2 if update == "prod" else 8
        numbers = np.random.default_rng([seed, rank, turn]).integers(1, high + 1, size=(5, 7))
        return numbers if update != "prod" or turn == 0 else np.sign(numbers)

    def work(group: Group) -> list[Any]:
        first = np.full((5, 7), start).astype(kind)
        w = group.store().dense("w", (5, 7), dtype, update=update, init=first)
        seen = []
        for turn in range(3):
            out = np.empty((5, 7), kind)
            assert w.push_pull(gradient(group.rank, turn).astype(kind), out=out) is out
            seen.append(out)
        return seen

    seen = together.values(work)
    value = np.full((5, 7), start)
    for turn in range(3):
        value = combine(value, [gradient(rank, turn) for rank in range(len(seen))])
        for rank_saw in seen:
            np.testing.assert_array_equal(rank_saw[turn].astype(np.float64), value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_integers_wrap_around(together, dtype):
    """As NumPy's do."""
    largest = np.iinfo(dtype).max

    def work(group: Group) -> Any:
        w = group.store().dense("w", (2,), dtype, init=np.array([largest, 0], dtype))
        return w.push_pull(np.array([2, 1], dtype))

    seen = together.values(work)
    with np.errstate(over="ignore"):
        value = np.array([largest, 0], dtype) + np.array([2, 1], dtype) * np.array(len(seen), dtype)

    assert [found.tolist() for found in seen] == [value.tolist()] * len(seen)


@pytest.mark.parametrize("update", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinities(together, update, dtype):
    """They are numbers like others to min and max."""

    def work(group: Group) -> Any:
        w = group.store().dense("w", (3,), dtype, update=update, init=1.0)
        return w.push_pull(np.array([np.inf, -np.inf, group.rank], dtype))

    seen = together.values(work)
    value = [1, -np.inf, 0] if update == "min" else [np.inf, 1, max(1, len(seen) - 1)]

    assert [found.tolist() for found in seen] == [value] * len(seen)


@pytest.mark.parametrize("update", PLAIN)
def test_empty_contribution_is_the_identity(stores, update):
    """Who ticks does not take part: no zero in a product, no zero as the minimum."""
    rank_0, rank_1 = stores(2)
    a, b = (s.dense("w", (3,), "int32", update=update, init=5) for s in (rank_0, rank_1))
    a.push(np.array([2, 7, 5], "int32"))
    rank_1.tick()
    value = PLAIN[update][1](np.full(3, 5), [np.array([2, 7, 5])])

    assert a.pull().tolist() == b.pull().tolist() == value.tolist()


def test_assign_on_arrival_takes_the_last(stores):
    rank_0, rank_1 = stores(2, staleness=None)
    a, b = (s.dense("w", (), "int64", update="assign") for s in (rank_0, rank_1))
    b.push_async(np.array(11)).wait()
    a.push_async(np.array(10)).wait()

    assert a.pull() == b.pull() == 10


# ---- set ----


def test_set_takes_effect_with_the_next_round(stores):
    """Of the rank that sets it: not with a round that it has pushed to already."""
    rank_0, rank_1 = stores(2)
    a, b = (s.dense("w", (2,), "float64", update=SGD(lr=1.0)) for s in (rank_0, rank_1))
    one = np.ones(2)
    a.push_async(one).wait()
    a.set(lr=0.25)  # its clock is 1: from round 2 on
    b.push(one)
    first = b.pull().tolist()
    b.set(lr=0.5)  # its clock is 1 too
    b.push_async(one).wait()
    second = a.push_pull(one).tolist()

    assert first == [-2.0, -2.0]
    assert second == [-3.0, -3.0]


def test_set_before_my_push_is_in_time_for_the_open_round(stores):
    rank_0, rank_1 = stores(2)
    a, b = (s.dense("w", (2,), "float64", update=SGD(lr=1.0)) for s in (rank_0, rank_1))
    a.push_async(np.ones(2)).wait()
    b.set(lr=0.25)  # its clock is 0

    assert b.push_pull(np.ones(2)).tolist() == [-0.5, -0.5] == a.pull().tolist()


@pytest.mark.parametrize("update, change", [
    (SGD(lr=0.1), {"lr": 0.4, "weight_decay": 0.3}),
    (Momentum(lr=0.1), {"momentum": 0.5}),
    (Adagrad(lr=0.1), {"eps": 0.5, "lr": 0.2}),
    (Adam(lr=0.1), {"betas": (0.5, 0.6)}),
    (FTRL(lr=0.1), {"l1": 0.7}),
    (FTRL(lr=0.1), {"lr": 0.2, "beta": 0.5, "l2": 0.3}),
], ids=lambda x: type(x).__name__ if not isinstance(x, dict) else "-".join(x))  # fmt: skip
def test_set_keeps_the_state(together, seed, update, change):
    """New numbers from round 3 on, with the momentum and the steps of the rounds before."""
    rng = np.random.default_rng(seed)
    first, gradients = rng.normal(size=30), rng.normal(size=(4, 30))

    def work(group: Group) -> Any:
        init = start(update, first)
        w = group.store().dense("w", (30,), "float64", update=update, init=init)
        for turn, g in enumerate(gradients):
            if turn == 2 and group.rank == 0:
                w.set(**change)
            group.barrier()
            w.push_pull(g if group.rank == 0 else np.zeros(30))
        return w.pull()

    changed = dataclasses.replace(update, **change)
    updates = [update, update, changed, changed]
    value = values_after(updates, began(update, first), gradients)[-1]

    for found in together.values(work):
        np.testing.assert_allclose(found, value, rtol=1e-12, atol=1e-12)


def test_set_on_arrival(stores):
    """Without rounds, from the next contribution on."""
    rank_0, rank_1 = stores(2, staleness=None)
    a, b = (s.dense("w", (1,), "float64", update=SGD(lr=1.0)) for s in (rank_0, rank_1))
    b.push_async(np.ones(1)).wait()
    a.set(lr=0.5)
    b.push_async(np.ones(1)).wait()

    assert a.pull().tolist() == [-1.5]


def test_set_of_two_ranks(stores):
    """Numbers that one rank has set stay set when another rank sets others."""
    rank_0, rank_1 = stores(2)
    a, b = (s.dense("w", (1,), "float64", update=SGD(lr=1.0), init=1.0) for s in (rank_0, rank_1))
    a.set(lr=0.5)
    b.set(weight_decay=2.0)
    a.push(np.ones(1))
    b.push(np.ones(1))

    assert a.pull().tolist() == [1.0 - 0.5 * (2.0 + 2.0 * 1.0)]


# ---- deterministic ----


IN_RANK_ORDER = [
    ("prod", "sum"),
    *((update, reduce) for update in ("sum", *OPTIMIZERS[::3]) for reduce in ("sum", "mean")),
]


@pytest.mark.parametrize("update, reduce", IN_RANK_ORDER, ids=str)
def test_deterministic_is_one_process_in_rank_order(stores, seed, update, reduce):
    """Whatever order contributions arrive in: the bits of one process that adds in rank order."""
    rng = np.random.default_rng(seed)
    size, shape = 4, (20_001,)  # two chunks
    workers = stores(size, deterministic=True)
    options = {"update": update, "init": start(update, 1.0), "reduce": reduce}
    tables = [store.dense("w", shape, "float32", **options) for store in workers]
    # Of magnitudes so different that every order of adding gives other bits.
    exponents = rng.uniform(-1, 1, size=(3, size, *shape))
    rounds = (rng.choice([-1, 1], size=exponents.shape) * 10**exponents).astype("float32")
    for contributions in rounds:
        for rank in rng.permutation(size):
            tables[rank].push_async(contributions[rank]).wait()  # arrived
    seen = [table.pull() for table in tables]

    with commute.init() as world:
        alone = world.store().dense("w", shape, "float32", update=update, init=start(update, 1.0))
        for contributions in rounds:
            total = contributions[0].copy()
            for more in contributions[1:]:
                total = total * more if update == "prod" else total + more
            alone.push(total / np.float32(size) if reduce == "mean" else total)
        value = alone.pull()

    assert {found.tobytes() for found in seen} == {value.tobytes()}
