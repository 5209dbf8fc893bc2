# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is loaded is what was saved, on any number of shards, and nothing else is.

The `replays` fixture makes every shard do its ops twice, so a load that is not made of ops fails.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import commute
from commute import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    CheckpointError,
    Group,
    MismatchError,
    Momentum,
    Normal,
    Semiring,
    Store,
    Uniform,
)
from commute.store import manifest as manifests
from commute.store import segments

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


# ---- what is refused ----


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a world of one."""
    with commute.init() as world:
        store = declare(world.store())
        train(store, 0, range(2))
        store.save(tmp_path / "ck")
    return tmp_path / "ck"


SEGMENT = "segment-0001-of-0001.safetensors"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that says something else, by one who knows how to sum it up."""
    found = json.loads(path.read_text())
    if changes.keys() <= {"format", "version"}:
        path.write_text(json.dumps(found | changes))
        return
    whole = manifests.Manifest.decode(path.read_bytes(), str(path))
    path.write_bytes(manifests.msgspec.structs.replace(whole, **changes).encode())


def swap_segment(folder: Path) -> None:
    """A file of the same length from elsewhere."""
    size = (folder / SEGMENT).stat().st_size
    (folder / SEGMENT).write_bytes(bytes(size))


def become(path: Path, text: str) -> None:
    path.write_text(text)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a byte of the data": (lambda f: flip(f / SEGMENT, -5), rf"{SEGMENT} is damaged somewhere"),
    "a byte of the header": (lambda f: flip(f / SEGMENT, 200), rf"{SEGMENT} is damaged somewhere"),
    "its length": (lambda f: flip(f / SEGMENT, 0), rf"{SEGMENT} is damaged somewhere"),
    "truncated": (lambda f: os.truncate(f / SEGMENT, 5000), rf"{SEGMENT} is damaged: it has 5000"),
    "longer": (lambda f: os.truncate(f / SEGMENT, 9 << 20), rf"{SEGMENT} is damaged: it has 9437"),
    "missing": (lambda f: os.unlink(f / SEGMENT), rf"{SEGMENT} cannot be read: No such file"),
    "of zeros": (swap_segment, rf"{SEGMENT} is damaged somewhere in bytes 0"),
    "no manifest": (lambda f: os.unlink(f / "manifest.json"), "manifest.json cannot be read"),
    "no folder": (shutil.rmtree, "manifest.json cannot be read: No such file"),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 900), "manifest.json is damaged"),
    "manifest's clock": (
        lambda f: become(
            f / "manifest.json",
            (f / "manifest.json").read_text().replace('"clock": 2', '"clock": 3'),
        ),
        "manifest.json is damaged: it is not what was saved",
    ),
    "manifest without tables": (
        lambda f: become(
            f / "manifest.json", (f / "manifest.json").read_text().replace("tables", "tadles")
        ),
        "manifest.json is damaged: .*tables",
    ),
    "foreign": (lambda f: become(f / "manifest.json", '{"a": 1}'), "not the manifest of a check"),
    "foreign text": (
        lambda f: become(f / "manifest.json", "hello"),
        "manifest.json is damaged, or",
    ),
    "newer": (
        lambda f: rewrite(f / "manifest.json", version=2),
        "is of version 2, written by comm",
    ),
    "of fewer files": (lambda f: rewrite(f / "manifest.json", files=[]), "lacks a part of table"),
}


@pytest.mark.parametrize(("harm", "told"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_changes_nothing(saved, together, harm, told):
    """Every rank raises the same, which names the file; tables and clocks stay."""
    harm(saved)

    def work(group: Group) -> str:
        store = declare(group.store())
        train(store, group.rank, range(1))
        before = contents(store)
        with pytest.raises(CheckpointError, match=told) as raised:
            store.load(saved)
        assert_same(contents(store), before)
        train(store, group.rank, range(1, 2))  # and goes on
        return str(raised.value)

    assert len(set(together.values(work))) == 1


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": (2, 2)}, r"its shape is \[2, 2\] here, and \[4\] there"),
    "dtype": ({"dtype": "float64"}, "its dtype is float64 here, and float32 there"),
    "update": ({"update": SGD(lr=1.0)}, "its update is SGD here, and Adam there"),
}


@pytest.mark.parametrize(("options", "told"), MISFITS.values(), ids=MISFITS)
def test_a_table_that_does_not_fit(tmp_path, options, told):
    """Both sides are shown."""
    with commute.init() as world:
        first = world.store("first")
        first.dense("w", 4, update=Adam())
        first.save(tmp_path / "ck")
        second = world.store("second")
        second.dense("w", **{"shape": 4, "update": Adam(), **options})
        with pytest.raises(CheckpointError, match=f"does not fit table 'w': {told}"):
            second.load(tmp_path / "ck")


def test_rows_that_do_not_fit(tmp_path):
    """Kind, width, and a count of steps that was not kept."""
    with commute.init() as world:
        first = world.store("first")
        first.sparse("e", 4, update=Adagrad())
        first.save(tmp_path / "ck")
        for name, told, declare_it in (
            ("a", "it is dense here, and sparse there", lambda s: s.dense("e", 4)),
            ("b", r"its width is \[3\] here, and \[4\]", lambda s: s.sparse("e", 3)),
            ("c", "needs step", lambda s: s.sparse("e", 4, update=Adagrad(lr_decay=0.1))),
        ):
            store = world.store(name)
            declare_it(store)
            with pytest.raises(CheckpointError, match=told):
                store.load(tmp_path / "ck")


@pytest.mark.parametrize("verb", ["save", "load"])
def test_unequal_clocks(ranks, tmp_path, verb):
    """Refused on all ranks, with the clocks of all."""

    def work(group: Group) -> str:
        store = group.store(staleness=None)
        w = store.dense("w", 3)
        if group.rank == 1:
            w.push(np.ones(3, "float32"))
        with pytest.raises(MismatchError) as raised:
            getattr(store, verb)(tmp_path / "ck")
        return str(raised.value)

    told = ranks(3).values(work)

    assert len(set(told)) == 1
    assert "clocks of table 'w' differ: rank 0 is at 0, rank 1 is at 1, rank 2 is at 0" in told[0]
    assert not (tmp_path / "ck").exists()


def test_half_built_contributions_and_other_tables(ranks, tmp_path):
    """Pieces that nobody has completed, tables that others lack, another path."""

    def work(group: Group) -> list[str]:
        told = []

        def refused(store: Store, path: Path = tmp_path / "ck") -> None:
            with pytest.raises(MismatchError) as raised:
                store.save(path)
            told.append(str(raised.value))

        first = group.store("first", staleness=None)
        w = first.dense("w", 3)
        if group.rank == 1:
            w.push(np.ones(3, "float32"), accumulate=True)
        refused(first)
        second = group.store("second")
        second.dense("a" if group.rank else "b", 3)
        refused(second)
        third = group.store("third")
        refused(third, tmp_path / str(group.rank))
        return told

    one, two = ranks(2).values(work)

    assert one == two
    assert "rank 1 has pushed pieces to 'w' (accumulate=True)" in one[0]
    assert "rank 0 has declared the tables ['b'], rank 1 ['a']" in one[1]
    assert "rank 0 has the path" in one[2]


# ---- replacing ----


def save_one(store: Store, path: Path, number: float) -> None:
    store.push("w", np.full(3, number, "float32"))
    store.save(path)


def loaded(path: Path) -> list[float]:
    with commute.init() as world:
        store = world.store()
        store.dense("w", 3, update="assign")
        store.load(path)
        return store.pull("w").tolist()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_replaces_another(tmp_path, monkeypatch, can_exchange):
    """Also where folders cannot change places in one step; nothing is left behind."""
    if not can_exchange:
        monkeypatch.setattr(manifests._core, "exchange_paths", lambda a, b: False)
    (tmp_path / "ck").mkdir()  # an empty folder is no obstacle
    with commute.init() as world:
        store = world.store()
        store.dense("w", 3, update="assign")
        for number in (1, 2, 3):
            save_one(store, tmp_path / "ck", number)

            assert loaded(tmp_path / "ck") == [number] * 3
            assert os.listdir(tmp_path) == ["ck"]


def test_interrupted_between_two_renames(tmp_path, monkeypatch):
    """Whoever loads is told which folder is whole; the next save cleans up."""
    monkeypatch.setattr(manifests._core, "exchange_paths", lambda a, b: False)
    rename = os.rename
    with commute.init() as world:
        store = world.store()
        store.dense("w", 3, update="assign")
        save_one(store, tmp_path / "ck", 1)

        def once(a: str, b: str) -> None:
            rename(a, b)
            raise KeyboardInterrupt

        monkeypatch.setattr(manifests.os, "rename", once)
        with pytest.raises(KeyboardInterrupt):
            save_one(store, tmp_path / "ck", 2)
        monkeypatch.setattr(manifests.os, "rename", rename)
        with pytest.raises(CheckpointError, match=r"a save was interrupted, .*\.ck\.old-.* whole"):
            store.load(tmp_path / "ck")
        save_one(store, tmp_path / "ck", 3)

    assert os.listdir(tmp_path) == ["ck"]
    assert loaded(tmp_path / "ck") == [3] * 3


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    """A folder with other files, and a file."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    with commute.init() as world:
        store = world.store()
        store.dense("w", 3)
        with pytest.raises(CheckpointError, match=r"holds 'thesis.tex', which is no part"):
            store.save(tmp_path / "home")
        with pytest.raises(CheckpointError, match="is a file"):
            store.save(tmp_path / "file")

    assert sorted(os.listdir(tmp_path)) == ["file", "home"]
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("where", ["writev", "fsync"])
def test_a_full_disk(ranks, tmp_path, monkeypatch, where):
    """On one rank: all raise the same, the old checkpoint stays, and nothing of the new one."""
    real = getattr(os, where)
    full: list[int] = []

    def work(group: Group) -> str:
        store = group.store()
        store.dense("w", 3, update="assign")
        save_one(store, tmp_path / "ck", group.rank)
        group.barrier()
        if group.rank == 1:
            monkeypatch.setattr(segments.SegmentWriter, "__init__", marking)
            monkeypatch.setattr(os, where, failing)
        group.barrier()
        store.push("w", np.full(3, 9, "float32"))
        with pytest.raises(CheckpointError) as raised:
            store.save(tmp_path / "ck")
        return str(raised.value)

    made = segments.SegmentWriter.__init__

    def marking(self: Any, path: str, room: int) -> None:
        made(self, path, room)
        if "segment-0002" in path:
            full.append(self._fd)

    def failing(fd: int, *arguments: Any) -> Any:
        if fd in full:
            full.remove(fd)  # its number may be another's next
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *arguments)

    told = ranks(3).values(work)
    monkeypatch.undo()

    assert len(set(told)) == 1
    assert "rank 1 failed at writing" in told[0]
    assert "segment-0002-of-0003.safetensors: No space left on device" in told[0]
    assert os.listdir(tmp_path) == ["ck"]
    assert loaded(tmp_path / "ck") == [2] * 3


def test_a_disk_that_fills_up_on_the_way(tmp_path, monkeypatch):
    """Much data, written by a thread while more is asked for."""
    monkeypatch.setattr(segments, "HELD_BYTES", 1 << 16)
    left = [5]
    real = os.writev

    def failing(fd: int, pieces: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, pieces)

    with commute.init() as world:
        store = world.store()
        store.sparse("e", 64).push(np.arange(20_000), np.ones((20_000, 64), "float32"))
        monkeypatch.setattr(os, "writev", failing)
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(tmp_path / "ck")

    assert os.listdir(tmp_path) == []


def test_progress_of_what_takes_long(tmp_path, monkeypatch, capfd):
    """Lines on stderr that say how far it is; of what is quick, none."""
    from commute.store import saving

    with commute.init() as world:
        store = declare(world.store())
        train(store, 0, range(1))
        store.save(tmp_path / "ck")
        quick = capfd.readouterr()
        monkeypatch.setattr(saving, "PROGRESS_SECONDS", 0.0)
        store.save(tmp_path / "ck")
        store.load(tmp_path / "ck")
        slow = capfd.readouterr()

    assert quick.err == quick.out == slow.out == ""
    assert "commute: saving wide: " in slow.err
    assert "commute: saving w: part " in slow.err
    assert "commute: loading wide: " in slow.err
    assert "commute: checking " in slow.err
