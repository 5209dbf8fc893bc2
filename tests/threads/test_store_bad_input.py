# SPDX-License-Identifier: Apache-2.0
"""What is refused, with which words, and that nothing has happened then.

Every error is raised at the caller, is a CommuteError, and says what was expected and what came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import commute
from commute import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    ArrayError,
    CommuteError,
    MismatchError,
    Momentum,
    Semiring,
    SettingError,
    UnknownTableError,
)

PUSHES = ["push", "push_async", "push_pull", "push_pull_async"]
NAN = float("nan")


@pytest.fixture
def pair(stores: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """Table "w" on two ranks; afterwards rank 0's clock and the value's bytes are as before."""
    workers = stores(2)
    first = np.arange(6, dtype="float32").reshape(2, 3)
    a, b = workers.tables("w", (2, 3), init=first, reject_nan=True)
    one = np.ones((2, 3), "float32")
    b.push(one)
    before = a.push_pull(one).tobytes()
    yield a, b
    workers.settle()

    assert a.info().clock == b.info().clock == 1
    assert a.pull().tobytes() == b.pull().tobytes() == before
    b.push(one)
    assert a.push_pull(one).tobytes() == (first + 4).tobytes()  # and it goes on


def refused(kind: type[CommuteError], call: Callable[[], Any], *words: str) -> str:
    """The message; each of the words is in it."""
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)

    assert isinstance(raised.value, CommuteError)
    assert all(word in message for word in words), message
    return message


# ---- contributions ----

BAD_GRADIENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: np.ones((3, 2), "float32"), "(3, 2) of float32"),
    "length": (lambda: np.ones(5, "float32"), "(5,) of float32"),
    "one axis too many": (lambda: np.ones((1, 2, 3), "float32"), "(1, 2, 3) of float32"),
    "no axes": (lambda: np.float32(1), "() of float32"),
    "empty": (lambda: np.ones((0, 3), "float32"), "(0, 3) of float32"),
    "float64": (lambda: np.ones((2, 3)), "(2, 3) of float64"),
    "int32": (lambda: np.ones((2, 3), "int32"), "(2, 3) of int32"),
    "a tensor's dtype": (lambda: torch.ones(2, 3).bfloat16(), "(2, 3) of bfloat16"),
    "a device that does not fit": (
        lambda: [np.ones((2, 3), "float32"), np.ones((2, 3))],
        "(2, 3) of float64",
    ),
    "bool": (lambda: np.ones((2, 3), bool), "(2, 3) of bool"),
    "complex": (lambda: np.ones((2, 3), "complex64"), "(2, 3) of complex64"),
    "objects": (lambda: np.full((2, 3), None), "got object"),
    "big endian": (lambda: np.ones((2, 3), ">f4"), "got >f4"),
    "nothing": (lambda: None, "got NoneType"),
    "text": (lambda: "abc", "got str"),
    "a number": (lambda: 1.0, "got float"),
    "a list of numbers": (lambda: [1.0, 2.0], "got float"),
    "no device": (list, "got none"),
    "a sparse tensor": (lambda: torch.ones(2, 3).to_sparse(), "got torch.sparse_coo"),
    "a tensor elsewhere": (lambda: torch.ones(2, 3, device="meta"), "got a tensor on meta"),
}


@pytest.mark.parametrize("verb", PUSHES)
@pytest.mark.parametrize("bad", BAD_GRADIENTS)
def test_a_gradient_that_does_not_fit(pair, bad, verb):
    """Rank, table, what was expected and what came; nothing was sent."""
    make, got = BAD_GRADIENTS[bad]

    refused(ArrayError, lambda: getattr(pair[0], verb)(make()), "'w'", "rank 0", got)


@pytest.mark.parametrize("bad", [[1, 2], "x", 1j, 1e300, np.ones(2), {}], ids=str)
@pytest.mark.parametrize("verb", PUSHES)
def test_a_scale_that_is_no_number(pair, verb, bad):
    one = np.ones((2, 3), "float32")
    message = refused(ArrayError, lambda: getattr(pair[0], verb)(one, scale=bad), "'w'", "expected")

    assert repr(bad) in message


@pytest.mark.parametrize(
    "dtype, bad", [("int32", 0.5), ("int8", 300), ("uint8", -1), ("int64", NAN)]
)
def test_a_number_that_the_dtype_does_not_have(stores, dtype, bad):
    """As a scale, as a contribution without axes, and as a first value."""
    workers = stores(1)
    (w,) = workers.tables("w", (3,), dtype, init=1)
    (z,) = workers.tables("z", (), dtype, init=1)
    words = (f"fits {dtype}", repr(bad))
    refused(ArrayError, lambda: w.push(np.ones(3, dtype), scale=bad), "'w'", *words)
    refused(ArrayError, lambda: z.push(bad), "'z'", *words)
    refused(ArrayError, lambda: workers[0].dense("new", (3,), dtype, init=bad), "'new'", *words)

    assert w.pull().tolist() == [1, 1, 1] and z.pull() == 1
    assert len(workers[0].tables()) == 2


BAD_OUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: np.empty((3, 2), "float32"), "(3, 2) of float32"),
    "dtype": (lambda: np.empty((2, 3)), "(2, 3) of float64"),
    "tensor": (lambda: torch.empty(6), "(6,) of float32"),
    "strided": (lambda: np.empty((4, 3), "float32")[::2], "not contiguous"),
    "fortran": (lambda: np.empty((2, 3), "float32", order="F"), "not contiguous"),
    "read-only": (lambda: np.frombuffer(bytes(24), "float32").reshape(2, 3), "read-only"),
    "bytes": (lambda: bytes(24), "read-only"),
    "list": (lambda: [0.0] * 6, "got list"),
    "needed by autograd": (lambda: torch.ones(2, 3, requires_grad=True) * 2, "autograd"),
}


@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
@pytest.mark.parametrize("bad", BAD_OUTS)
def test_an_out_that_does_not_fit(pair, bad, verb):
    """Seen before anything is sent: a push_pull has contributed nothing."""
    make, got = BAD_OUTS[bad]
    gradients = [np.ones((2, 3), "float32")] if verb.startswith("push") else []

    refused(
        ArrayError, lambda: getattr(pair[0], verb)(*gradients, out=make()), "'w'", "rank 0", got
    )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("verb", ["push_pull", "push_pull_async"])
def test_an_out_that_overlaps_the_gradient(stores, verb, devices):
    """It would be written while it is still read; the same array is fine."""
    (w,) = stores(1).tables("w", (60_000,), "float64", init=5.0)
    memory = np.ones(60_001)
    gradient = memory[:-1] if devices == 1 else [np.ones(60_000), memory[:-1]]
    refused(ArrayError, lambda: getattr(w, verb)(gradient, out=memory[1:]), "'w'", "overlaps")

    assert np.unique(w.pull()).tolist() == [5.0] and w.info().clock == 0


# ---- NaN ----


@pytest.mark.parametrize("verb", PUSHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_is_rejected_where_asked(stores, verb, dtype):
    """Wherever it is in the array, or in any device's; infinities are no NaN."""
    count = 40_001
    workers = stores(1)
    kind = getattr(torch, dtype)
    (w,) = workers.tables("w", count, dtype, reject_nan=True, init=torch.ones(count, dtype=kind))
    good = torch.ones(count, dtype=kind)
    for at in (0, count // 2, count - 1):
        bad = good.clone()
        bad[at] = NAN
        for gradient in (bad, [good, bad]):
            refused(ArrayError, lambda g=gradient: getattr(w, verb)(g), "'w'", "rank 0", "NaN")
    out = torch.empty(count, dtype=kind)
    assert w.pull(out=out).eq(1).all() and w.info().clock == 0
    good[3] = float("inf")

    assert w.push_pull(good, out=out)[3] == float("inf") and out[4] == 2


def test_nan_that_a_scale_or_a_sum_makes_is_rejected(stores):
    """The contribution is what counts, not only the arrays it is made of."""
    (w,) = stores(1).tables("w", (3,), "float64", reject_nan=True)
    inf = np.full(3, np.inf)
    refused(ArrayError, lambda: w.push(np.ones(3), scale=NAN), "'w'", "NaN")
    refused(ArrayError, lambda: w.push([inf, -inf]), "'w'", "NaN")
    refused(ArrayError, lambda: w.push(inf, scale=0.0), "'w'", "NaN")

    assert w.pull().tolist() == [0, 0, 0] and w.info().clock == 0


def test_nan_is_a_value_where_it_is_not_rejected(stores):
    workers = stores(1)
    (w,) = workers.tables("w", (3,), "float64")
    (whole,) = workers.tables("whole", (3,), "int32", reject_nan=True)  # has none

    assert np.isnan(w.push_pull(np.array([1.0, NAN, 3.0]))).tolist() == [False, True, False]
    assert whole.push_pull(np.ones(3, "int32")).tolist() == [1, 1, 1]


# ---- declarations ----

BAD_DECLARATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown update": ({"update": "average"}, ["'average'", "expected", "'sum'"]),
    "no update": ({"update": None}, ["None", "expected"]),
    "an update's class": ({"update": SGD}, ["SGD", "expected"]),
    "lr below 0": ({"update": SGD(lr=-1)}, ["lr", "SGD", "-1"]),
    "lr NaN": ({"update": Adam(lr=NAN)}, ["lr", "Adam", "nan"]),
    "lr infinite": ({"update": SGD(lr=float("inf"))}, ["lr", "inf"]),
    "lr text": ({"update": SGD(lr="fast")}, ["lr", "'fast'"]),
    "weight decay": ({"update": SGD(lr=1, weight_decay=-1)}, ["weight_decay", "-1"]),
    "momentum": ({"update": Momentum(lr=1, momentum=-1)}, ["momentum", "-1"]),
    "nesterov": ({"update": Momentum(1, nesterov=True, dampening=0.1)}, ["Nesterov", "dampening"]),
    "nesterov alone": ({"update": Momentum(1, momentum=0, nesterov=True)}, ["Nesterov"]),
    "eps": ({"update": Adagrad(eps=-1)}, ["eps", "Adagrad", "-1"]),
    "one beta": ({"update": Adam(betas=(0.9,))}, ["two betas", "(0.9,)"]),
    "beta of 1": ({"update": Adam(betas=(0.9, 1.0))}, ["two betas", "1.0"]),
    "beta is a number": ({"update": Adam(betas=0.9)}, ["two betas", "0.9"]),
    "ftrl's lr of 0": ({"update": FTRL(lr=0)}, ["lr", "FTRL", "above 0", "got 0"]),
    "ftrl's lr": ({"update": FTRL(lr=-1)}, ["lr", "FTRL", "-1"]),
    "ftrl's beta": ({"update": FTRL(beta=-1)}, ["beta", "FTRL", "-1"]),
    "ftrl's l1": ({"update": FTRL(l1=-0.5)}, ["l1", "FTRL", "-0.5"]),
    "ftrl's l1 NaN": ({"update": FTRL(l1=NAN)}, ["l1", "FTRL", "nan"]),
    "ftrl's l2": ({"update": FTRL(l2="much")}, ["l2", "FTRL", "'much'"]),
    "ftrl of integers": ({"update": FTRL(), "dtype": "int64"}, ["FTRL", "int64", "float32"]),
    "ftrl from one": (
        {"update": FTRL(), "init": 1.0},
        ["'new'", "FTRL", "its state", "leave init out"],
    ),
    "ftrl from an array": (
        {"update": FTRL(), "init": np.ones(3, "float32")},
        ["'new'", "FTRL", "its state", "leave init out"],
    ),
    "semiring": ({"update": Semiring(add="min", mul="power")}, ["power", "expected"]),
    "optimizer of integers": ({"update": SGD(1), "dtype": "int32"}, ["SGD", "int32", "float32"]),
    "optimizer of halves": ({"update": Adam(), "dtype": "float16"}, ["Adam", "float16"]),
    "reduce": ({"reduce": "max"}, ["'max'", "expected", '"mean"']),
    "mean of integers": ({"reduce": "mean", "dtype": "int64"}, ["mean of integers"]),
    "mean of minima": ({"reduce": "mean", "update": "min"}, ["mean", "min"]),
    "mean without rounds": ({"reduce": "mean", "staleness": 1}, ["mean", "staleness 0"]),
    "mean, never waiting": ({"reduce": "mean", "staleness": None}, ["mean", "staleness 0"]),
    "deterministic, stale": ({"deterministic": True, "staleness": 2}, ["deterministic", "2"]),
    "deterministic, None": ({"deterministic": True, "staleness": None}, ["deterministic", "None"]),
    "staleness below 0": ({"staleness": -1}, ["staleness", "-1"]),
    "half a clock": ({"staleness": 1.5}, ["staleness", "1.5"]),
    "staleness yes": ({"staleness": True}, ["staleness", "True"]),
    "dtype": ({"dtype": "float8"}, ["float8", "expected", "float32"]),
    "bool": ({"dtype": bool}, ["bool", "expected"]),
    "complex": ({"dtype": np.complex64}, ["complex64", "expected"]),
    "no dtype": ({"dtype": None}, ["None", "expected"]),
    "shape below 0": ({"shape": (2, -1)}, ["(2, -1)", "expected"]),
    "half an element": ({"shape": 2.5}, ["2.5", "expected"]),
    "shape in words": ({"shape": "12"}, ["'12'", "expected"]),
    "shape of shapes": ({"shape": [2, [3]]}, ["[2, [3]]", "expected"]),
    "no shape": ({"shape": None}, ["None", "expected"]),
    "too large for the slots": (
        {"shape": (1 << 30,)},
        ["'new'", str(4 << 30), "more than", str(1 << 30), "1024 slots"],
    ),
    "too large for a number": ({"shape": (1 << 40, 1 << 40)}, [str(1 << 40)]),
    "init's shape": ({"init": np.ones(4, "float32")}, ["'new'", "(3,) of float32", "(4,)"]),
    "init's dtype": ({"init": np.ones(3)}, ["'new'", "(3,) of float32", "float64"]),
    "init is text": ({"init": "zeros"}, ["str", "expected"]),
    "init is a list": ({"init": [1, 2, 3]}, ["list", "expected"]),
    "no name": ({"name": ""}, ["name", "''"]),
    "a number as name": ({"name": 3}, ["name", "3"]),
}


@pytest.mark.parametrize("bad", BAD_DECLARATIONS)
def test_a_declaration_that_cannot_be(stores, bad):
    """It says why; the store has no such table then, and a right one of that name can be made."""
    options, words = BAD_DECLARATIONS[bad]
    workers = stores(2)
    given = {"name": "new", "shape": (3,), "dtype": "float32", **options}
    for store in workers:
        refused(CommuteError, lambda store=store: store.dense(**given), *words)
        assert store.tables() == []
    a, b = workers.tables("new", (3,), "float64")
    b.push(np.ones(3))

    assert a.push_pull(np.ones(3)).tolist() == [2, 2, 2]


def test_a_bad_declaration_is_a_value_error(stores):
    """ArrayError and SettingError are what Python raises for such things, too."""
    (store,) = stores(1)
    with pytest.raises(ValueError):
        store.dense("w", (3,), update="average")
    with pytest.raises(TypeError):
        store.dense("w", (3,), init=np.ones(3))
    with pytest.raises(LookupError):
        store["w"]


def test_a_name_that_is_too_long(stores):
    """It is refused, and the store can be used."""
    workers = stores(1)
    for name in ("x" * (3 << 20), "ü" * (2 << 20)):
        message = refused(SettingError, lambda name=name: workers[0].dense(name, (3,), timeout=2))
        assert len(message) < 10_000

    assert workers[0].dense("w", (3,)).pull(timeout=5).tolist() == [0, 0, 0]


MISMATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "shape": ({"shape": (2, 4)}, "(2, 3)", "(2, 4)"),
    "axes": ({"shape": (6,)}, "(2, 3)", "(6,)"),
    "dtype": ({"dtype": "float64"}, "float32", "float64"),
    "update": ({"update": "max"}, "SGD(lr=0.5)", "max"),
    "numbers": ({"update": SGD(lr=0.25)}, "SGD(lr=0.5)", "SGD(lr=0.25)"),
    "reduce": ({"reduce": "mean"}, "staleness 0", "reduce mean"),
    "staleness": ({"staleness": 1}, "staleness 0", "staleness 1"),
    "never waiting": ({"staleness": None}, "staleness 0", "staleness None"),
    "deterministic": ({"deterministic": True}, "staleness 0", "deterministic"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_two_workers_declare_differently(stores, what):
    """The second is told, with both declarations; the first goes on, and the second may agree."""
    other, first, second = MISMATCHES[what]
    workers = stores(2)
    agreed: dict[str, Any] = {"shape": (2, 3), "dtype": "float32", "update": SGD(lr=0.5)}
    a = workers[0].dense("w", **agreed, init=1.0)
    message = refused(
        MismatchError,
        lambda: workers[1].dense("w", **{**agreed, **other}),
        "'w'",
        "rank 0",
        "rank 1",
    )
    assert workers[1].tables() == []
    b = workers[1].dense("w", **agreed)
    b.push(np.ones((2, 3), "float32"))

    mine, theirs = re.search(r"rank 0 declared (.*), rank 1 (.*)", message).groups()
    assert first in mine and second in theirs
    assert (a.push_pull(np.ones((2, 3), "float32")) == 0).all()


def test_different_numbers_that_look_alike(stores):
    """Numbers are compared, not what is printed of them; the message still tells them apart."""
    workers = stores(2)
    workers[0].dense("w", (3,), update=SGD(lr=0.1))
    message = refused(
        MismatchError, lambda: workers[1].dense("w", (3,), update=SGD(lr=0.1 + 1e-9)), "'w'"
    )
    mine, theirs = re.search(r"rank 0 declared (.*), rank 1 (.*)", message).groups()

    assert mine != theirs


def test_one_worker_declares_twice_differently(stores):
    (store,) = stores(1)
    w = store.dense("w", (3,), init=1)
    refused(MismatchError, lambda: store.dense("w", (4,)), "'w'", "(3,)", "(4,)")

    assert store.tables() == [w] and w.pull().tolist() == [1, 1, 1]


# ---- stores, settings, questions ----


@pytest.mark.parametrize("options, words", [
    ({"name": ""}, ["name", "''"]),
    ({"name": "a/b"}, ["name", "'a/b'"]),
    ({"name": 3}, ["name", "3"]),
    ({"staleness": -1}, ["staleness", "-1"]),
    ({"staleness": "0"}, ["staleness", "'0'"]),
    ({"on_loss": "ignore"}, ["on_loss", "'ignore'", '"continue"']),
    ({"timeout": "soon"}, ["timeout", "'soon'"]),
    ({"timeout": NAN}, ["timeout", "nan"]),
    ({"timeout": -1}, ["timeout", "-1"]),
], ids=str)  # fmt: skip
def test_a_store_that_cannot_be(ranks, options, words):
    """The group is as before: a right store can be made."""
    (group,) = ranks(1).groups
    refused(SettingError, lambda: group.store(**options), *words)

    assert group.store().dense("w", (2,)).pull().tolist() == [0, 0]


@pytest.mark.parametrize("bad", [-1, NAN, "soon"], ids=str)
def test_a_timeout_that_is_none(bad):
    """Whether or not there is something to wait for."""
    with commute.init() as world:
        store = world.store()
        w = store.dense("w", (2,))
        for call in (
            lambda: w.pull(timeout=bad),
            lambda: w.push(np.ones(2, "float32"), timeout=bad),
            lambda: w.push_pull(np.ones(2, "float32"), timeout=bad),
            lambda: w.pull_async().wait(timeout=bad),
            lambda: store.flush(timeout=bad),
            lambda: store.dense("new", (2,), timeout=bad),
        ):
            refused(SettingError, call, "timeout", repr(bad))
        assert w.info().clock == 0 and not w.pull().any()


@pytest.mark.parametrize("verb", [*PUSHES, "pull", "pull_async"])
def test_an_unknown_table(stores, verb):
    """Which are known here is said; on another rank it may exist."""
    workers = stores(2)
    workers.tables("w", (3,))
    workers[1].dense("v", (3,))
    gradients = [np.ones(3, "float32")] if verb.startswith("push") else []

    refused(
        UnknownTableError,
        lambda: getattr(workers[0], verb)("v", *gradients),
        *("'main'", "'v'", "rank 0", "'w'"),
    )
    with pytest.raises(UnknownTableError, match="declared here: none"):
        workers.groups[0].store("empty")["w"]


@pytest.mark.parametrize("numbers, words", [
    ({"lr": -1}, ["lr", "-1"]),
    ({"lr": NAN}, ["lr", "nan"]),
    ({"lr": "x"}, ["lr", "'x'"]),
    ({"momentum": 0.5}, ["SGD", "lr", "momentum"]),
    ({}, ["SGD", "lr", "nothing"]),
], ids=str)  # fmt: skip
def test_numbers_that_cannot_be_set(stores, numbers, words):
    """The update keeps those it has."""
    (w,) = stores(1).tables("w", (2,), "float64", update=SGD(lr=0.5))
    refused(SettingError, lambda: w.set(**numbers), *words)

    assert w.info().update == "SGD(lr=0.5)"
    assert w.push_pull(np.ones(2)).tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("numbers, words", [
    ({"lr": 0}, ["lr", "FTRL", "above 0"]),
    ({"l1": -1}, ["l1", "FTRL", "-1"]),
    ({"weight_decay": 0.1}, ["FTRL has lr, beta, l1, l2 to set", "weight_decay"]),
], ids=str)  # fmt: skip
def test_numbers_that_ftrl_cannot_have(stores, numbers, words):
    """Those of other optimizers, and a learning rate of 0, by which it would divide."""
    (w,) = stores(1).tables("w", (2,), "float64", update=FTRL())
    refused(SettingError, lambda: w.set(**numbers), *words)

    assert w.info().update == "FTRL(lr=0.1, beta=1, l1=0, l2=0)"


@pytest.mark.parametrize("update", ["sum", "assign", Semiring("min", "+")], ids=str)
def test_an_update_without_numbers(stores, update):
    (w,) = stores(1).tables("w", (2,), update=update)

    refused(SettingError, lambda: w.set(lr=0.1), "no numbers to set")


@pytest.mark.parametrize("k", [0, -1, 2.5, "a", None, 1 << 70])
def test_top_of_no_number(stores, k):
    (w,) = stores(1).tables("w", (2,))

    refused(SettingError, lambda: w.top(k), "top", repr(k))
