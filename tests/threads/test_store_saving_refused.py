# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are refused, and how one takes the place of another."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commute
from checkpoints import assert_same, contents, declare, train
from commute import (
    SGD,
    Adagrad,
    Adam,
    CheckpointError,
    Group,
    MismatchError,
    Store,
)
from commute.store import manifest as manifests
from commute.store import segments

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


@pytest.mark.parametrize("where", ["pwrite", "fsync"])
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
    real = os.pwrite

    def failing(fd: int, data: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    with commute.init() as world:
        store = world.store()
        store.sparse("e", 64).push(np.arange(20_000), np.ones((20_000, 64), "float32"))
        monkeypatch.setattr(os, "pwrite", failing)
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
