# SPDX-License-Identifier: Apache-2.0
"""Saving a store and loading it: what comes back."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import commute
from checkpoints import UPDATES, assert_same, contents, declare, train
from commute import (
    SGD,
    Adagrad,
    Adam,
    CheckpointError,
    Group,
    Normal,
    Store,
)

# ---- round trips ----


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_training_goes_on_as_if_it_had_never_stopped(together, tmp_path, update):
    """Bit for bit, with every update: states, steps and clocks are in the checkpoint."""

    def work(group: Group) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        first = declare(group.store("first", deterministic=True), update)
        train(first, group.rank, range(3))
        first.save(tmp_path / "ck")
        at_save = contents(first)
        train(first, group.rank, range(3, 6))
        second = declare(group.store("second", deterministic=True), update)
        train(second, group.rank + 10, range(2))  # something else, which must go
        second.load(tmp_path / "ck")
        assert_same(contents(second), at_save)
        train(second, group.rank, range(3, 6))
        return contents(first), contents(second), at_save

    for through, again, at_save in together.values(work):
        assert_same(again, through)
        assert at_save["clocks"] == [3, 3, 3, 3, 3, 3]
        assert any((through[name] != at_save[name]).any() for name in ("w", "wide"))


@pytest.mark.parametrize("staleness", [2, None])
def test_tables_that_are_not_in_step(together, tmp_path, staleness):
    """Contributions that are applied as they arrive; a pull after a load is not a cached one."""

    def work(group: Group) -> None:
        store = group.store(staleness=staleness)
        w = store.dense("w", (5,), "int64")
        rows = store.sparse("e", 2, "int64")
        for _ in range(3):
            w.push(np.ones(5, "int64"))
            rows.push([1, 2], np.ones((2, 2), "int64"))
        store.flush()
        group.barrier()
        before = w.pull(fresh=True), rows.pull([1, 2, 3])
        store.save(tmp_path / "ck")
        w.push(np.ones(5, "int64"))
        rows.push([2, 3], np.ones((2, 2), "int64"))
        w.pull()
        store.load(tmp_path / "ck")
        np.testing.assert_array_equal(w.pull(), before[0])
        np.testing.assert_array_equal(rows.pull([1, 2, 3]), before[1])
        assert w.info().clock == rows.info().clock == 3
        group.barrier()
        w.push(np.ones(5, "int64"))
        store.flush()
        group.barrier()
        np.testing.assert_array_equal(w.pull(fresh=True), before[0] + group.size)

    together.values(work)


@pytest.mark.parametrize("dtype", "int8 uint16 int64 float16 bfloat16 float64".split())
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 64])
def test_every_dtype_and_width(tmp_path, dtype, width):
    """Dense and sparse, also where rows have gaps between value and clock."""
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    given = np.arange(width * 100).reshape(100, width).astype(numpy_dtype)

    def declared(world: Group, name: str) -> Store:
        store = world.store(name)
        store.sparse("e", width, dtype, expire_after=50)
        store.dense("w", (100, width), dtype)
        return store

    with commute.init() as world:
        first, second = declared(world, "first"), declared(world, "second")
        first.push("e", np.arange(100), given)
        first.push("w", given)
        first.save(tmp_path / "ck")
        second.load(tmp_path / "ck")
        out, rows = np.empty_like(given), np.empty_like(given)
        second.pull("w", out=out)
        second.pull("e", np.arange(100), out=rows)

    np.testing.assert_array_equal(out, given)
    np.testing.assert_array_equal(rows, given)


def test_bfloat16_by_torch(tmp_path):
    """A tensor of torch's goes in and comes out."""
    with commute.init() as world:
        store = world.store()
        store.dense("w", (4,), torch.bfloat16, init=torch.arange(4, dtype=torch.bfloat16))
        store.save(tmp_path / "ck")
        store.push("w", torch.ones(4, dtype=torch.bfloat16))
        store.load(tmp_path / "ck")

        assert store.pull("w").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_three_shards_become_others(ranks, tmp_path, workers, shards):
    """Saved by three workers on three shards; rows and tensors are the same on all others."""

    def saving(group: Group) -> Any:
        store = declare(group.store())
        train(store, group.rank, range(3))
        store.save(tmp_path / "ck")
        return contents(store)

    def loading(group: Group) -> Any:
        store = declare(group.store())
        store.load(tmp_path / "ck")
        return contents(store)

    saved = ranks(3, shards=3).values(saving)[0]
    names = sorted(os.listdir(tmp_path / "ck"))

    assert names == ["manifest.json", *(f"segment-000{i}-of-0003.safetensors" for i in (1, 2, 3))]
    for loaded in ranks(workers, shards=shards).values(loading):
        assert_same(loaded, saved)


def test_slots_of_more_rows_than_a_message(tmp_path):
    """Rows of 32 KB: each block, and each message, has a few."""
    keys = np.arange(500, dtype=np.uint64) << np.uint64(40)
    given = np.random.default_rng(0).normal(size=(500, 4096)).astype("float32")
    with commute.init() as world:
        first = world.store("first").sparse("e", 4096, update=Adagrad(lr=0.1))
        first.push(keys, given)
        world.store("first").sparse("e", 4096, update=Adagrad(lr=0.1))
        world._stores[0].save(tmp_path / "ck")
        store = world.store("second")
        second = store.sparse("e", 4096, update=Adagrad(lr=0.1))
        store.load(tmp_path / "ck")
        first.push(keys[::-1], given)
        second.push(keys[::-1], given)

        np.testing.assert_array_equal(second.pull(keys), first.pull(keys))
        assert second.count() == 500


def test_more_segments_than_ranks(tmp_path, monkeypatch):
    """Where there are so many tables that a header would be too long."""
    from commute.store import saving

    monkeypatch.setattr(saving, "_ROOM_MAX", 400_000)
    with commute.init() as world:
        first, second = declare(world.store("first")), declare(world.store("second"))
        train(first, 0, range(2))
        first.save(tmp_path / "ck")
        second.load(tmp_path / "ck")

        assert_same(contents(second), contents(first))
    assert len(os.listdir(tmp_path / "ck")) > 4


def test_a_table_may_be_declared_otherwise(tmp_path):
    """Numbers, staleness, expiry and what absent rows hold are those that are declared now."""
    with commute.init() as world:
        store = world.store("first")
        store.sparse("e", 2, update=SGD(lr=1.0)).push([1], np.ones((1, 2), "float32"))
        store.dense("w", 3, update=Adam(lr=1.0))
        store.save(tmp_path / "ck")
        again = world.store("second", staleness=None)
        e = again.sparse("e", 2, update=SGD(lr=0.5), init=Normal(0.1, 5.0), expire_after=2)
        again.dense("w", 3, update=Adam(lr=2.0))
        again.load(tmp_path / "ck")
        e.push([1], np.ones((1, 2), "float32"))

        assert e.pull([1]).tolist() == [[-1.5, -1.5]]
        assert (e.pull([2]) > 3).all()


def test_what_is_not_in_both(tmp_path):
    """Named, unless strict=False: then what is only here stays as it is."""
    with commute.init() as world:
        first = world.store("first")
        first.dense("a", 2, init=1.0)
        first.dense("b", 2, init=1.0)
        first.save(tmp_path / "ck")
        second = world.store("second")
        second.dense("b", 2, init=7.0)
        with pytest.raises(CheckpointError, match="has a table 'a', which is not declared here"):
            second.load(tmp_path / "ck")
        second.dense("c", 2, init=7.0)
        with pytest.raises(CheckpointError, match=r"no table 'c'.*it has \['a', 'b'\]"):
            second.load(tmp_path / "ck")
        assert second.pull("b").tolist() == [7, 7]
        second.load(tmp_path / "ck", strict=False)

        assert [second.pull(name).tolist() for name in "bc"] == [[1, 1], [7, 7]]
