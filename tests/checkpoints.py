# SPDX-License-Identifier: Apache-2.0
"""A store with tables of both kinds, trained a little and compared, for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

import commute
from commute import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Momentum,
    Semiring,
    Store,
    Uniform,
)

CHUNK = 64 << 10
UPDATES: dict[str, Any] = {
    "sum": "sum",
    "assign": "assign",
    "min": "min",
    "SGD": SGD(lr=0.1),
    "Momentum": Momentum(lr=0.1),
    "Adagrad": Adagrad(lr=0.1),
    "Adagrad that decays": Adagrad(lr=0.1, lr_decay=0.1),
    "Adam": Adam(lr=0.1),
    "FTRL": FTRL(lr=0.1, l1=0.01),
    "Semiring": Semiring(add="min", mul="+"),
}
KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # all over the slots


def declare(store: Store, update: Any = Adam(lr=0.1), **options: Any) -> Store:  # noqa: B008
    """A tensor of several chunks, a scalar, nothing at all; rows that are narrow, wide, absent."""
    init = None if isinstance(update, FTRL) else Uniform(-1, 1)
    store.dense("w", (3, CHUNK // 8), update=update, **options)
    store.dense("scalar", (), "float64", **options)
    store.dense("nothing", (0, 3), **options)
    store.sparse("wide", 7, update=update, init=init, **options)
    store.sparse("narrow", 1, update=update, seed=3, expire_after=100, **options)
    store.sparse("empty", 4, update=update, **options)
    return store


def train(store: Store, rank: int, steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng((rank, step))
        for name, width in (("wide", 7), ("narrow", 1)):
            keys = rng.choice(KEYS, 60)
            store.push(name, keys, rng.normal(size=(60, width)).astype("float32"))
        store.push("w", rng.normal(size=(3, CHUNK // 8)).astype("float32"))
        store.push("scalar", np.float64(rng.integers(9)))
        store.tick()


def contents(store: Store) -> dict[str, Any]:
    """Everything that can be seen of a store."""
    found: dict[str, Any] = {"clocks": [table.info().clock for table in store.tables()]}
    for table in store.tables():
        if isinstance(table, commute.DenseTable):
            found[table.name] = table.pull()
        else:
            found[table.name] = table.pull(KEYS)
            found[f"rows of {table.name}"] = table.count()
    return found


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)
