# SPDX-License-Identifier: Apache-2.0
"""Parsed examples beside the data: the same examples, or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from commute import DataError, _core
from commute.learn import cache as cache_module
from commute.learn.cache import HEAD_BYTES, Block, cached
from commute.learn.reader import BadLines, Stream
from commute.learn.recipe import Recipe
from commute.learn.settings import Plan, Training
from commute.learn.sources import deal, find

pytestmark = pytest.mark.timeout(30)

LINES = {
    "plain": b"".join(b"%d |f a%d b%d\n" % (i % 2, i, i % 7) for i in range(100)),
    "values": b"".join(b"%d |f a:%d.5 b%d\n" % (i % 2, i, i % 7) for i in range(100)),
    "weights": b"".join(b"%d %d |f a%d\n" % (i % 2, i % 3 + 1, i) for i in range(100)),
    "both": b"".join(b"%d %d |f a:%d\n" % (i % 2, i % 3 + 1, i) for i in range(100)),
    "mixed": b"1 |f a b c\n" * 30 + b"0 2 |f a:2\n" * 30 + b"1 |\n" * 5,
    "none": b"",
}
BATCH = 16


class Run:
    """All passes of a run over the data, and what it said."""

    def __init__(self, path: Path, *, streams: int = 1, epochs: int = 2, **changes: Any) -> None:
        recipe = changes.pop("recipe", Recipe(format="vw"))
        training = Training(**{"epochs": epochs, "cache": True, "batch": BATCH, **changes})
        self.sources = find([str(path)])
        plan = Plan(training=training, recipe=recipe, data=tuple(self.sources), folder="")
        self.said: list[str] = []
        self.batches: list[list[Block]] = []
        self.streams = [
            Stream(recipe, pieces, size=training.batch_after, bad=BadLines(0))
            for pieces in deal(self.sources, streams)
        ]
        for i, stream in enumerate(self.streams):
            self.batches.append(list(cached(plan, stream, i, streams, self.said.append)))


def same(batch: Block, other: Block) -> None:
    assert batch.count == other.count
    for name in ("labels", "weights", "offsets", "keys", "index", "values"):
        one, two = getattr(batch, name), getattr(other, name)
        assert (one is None) == (two is None), name
        if one is not None:
            np.testing.assert_array_equal(one, two, err_msg=name, strict=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.vw"
    path.write_bytes(LINES["plain"])
    return path


def cache_of(data: Path, number: int = 0, streams: int = 1) -> Path:
    return data.with_name(f"{data.name}.cache.{number}-of-{streams}")


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("kind", LINES)
def test_cached_examples_are_the_parsed_ones(tmp_path, kind, streams):
    """All arrays, batch by batch: within the run that makes it, and in one that finds it."""
    data = tmp_path / "data.vw"
    data.write_bytes(LINES[kind])
    made = Run(data, streams=streams)
    found = Run(data, streams=streams, epochs=1)

    for stream, both, again in zip(made.streams, made.batches, found.batches, strict=True):
        half = len(both) // 2
        assert len(both) == 2 * half and len(again) == half
        assert stream.passes == 2 or not half
        for parsed, second, other in zip(both[:half], both[half:], again, strict=True):
            same(parsed, second)
            same(parsed, other)
    assert made.said == found.said == []
    assert sum(b.count for batches in found.batches for b in batches) == len(
        LINES[kind].splitlines()
    )


@pytest.mark.parametrize("kind", LINES)
def test_keys_are_there_once_and_numbered(tmp_path, kind):
    """Of every block: with its index its keys are those of the text, place by place."""
    data = tmp_path / "data.vw"
    data.write_bytes(LINES[kind])
    run = Run(data)
    again = Stream(
        Recipe(format="vw"), deal(run.sources, 1)[0], size=lambda _: BATCH, bad=BadLines(0)
    )

    for block, parsed in zip(run.batches[0], [*again, *again], strict=True):
        np.testing.assert_array_equal(block.keys[block.index], parsed.keys, strict=True)
        np.testing.assert_array_equal(np.sort(block.keys), np.unique(parsed.keys))
        assert block.index.dtype == np.uint32
        assert block.keys.tolist() == sorted(block.keys.tolist(), key=hashed)


def test_distinct_keys_are_in_the_order_of_their_hashes(rng):
    """Whatever they were given in; none and one are lists too."""
    for count, different in ((0, 1), (1, 1), (9, 3), (3000, 500), (5000, 1 << 62)):
        given = rng.integers(0, different, count, dtype=np.uint64)
        keys, index = _core.distinct_keys(given)
        np.testing.assert_array_equal(keys[index], given, strict=True)
        np.testing.assert_array_equal(keys, sorted(set(given.tolist()), key=hashed))


def hashed(key: int) -> int:
    """As rows.h hashes keys."""
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    key = (key ^ key >> 27) * 0x94D049BB133111EB % (1 << 64)
    return key ^ key >> 31


def test_a_cache_that_is_there_is_read_and_not_the_text(data, monkeypatch):
    """The parser has nothing to do."""
    Run(data)
    monkeypatch.setattr(Stream, "__iter__", lambda _: pytest.fail("the text was read"))

    assert len(Run(data, epochs=3).batches[0]) == 3 * 7


def test_passes_are_counted(data):
    """For the display: from the cache as from the text."""
    run = Run(data, epochs=1)
    again = Run(data, epochs=3)

    assert run.streams[0].passes == 1 and again.streams[0].passes == 3


def refused(data: Path, why: str, **changes: Any) -> Run:
    """A run that says why it cannot use the cache, makes it again, and the next one that can."""
    run = Run(data, **changes)
    [said] = run.said
    assert why in said and said.startswith(cache_of(data).name)
    assert Run(data, **changes).said == []
    return run


def test_a_file_that_has_changed(data):
    """By size or by its time."""
    Run(data)
    data.write_bytes(LINES["plain"] + b"1 |f new\n")
    run = refused(data, "is of other data, or the file has changed: it is made again")
    assert sum(b.count for b in run.batches[0]) == 2 * 101

    status = data.stat()
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    refused(data, "the file has changed")


def test_other_settings(data):
    """Another recipe or size of batches; what does not change examples is no reason."""
    Run(data)
    assert Run(data, lr=0.5, model="svm", epochs=3).said == []
    refused(data, "made with other settings", recipe=Recipe(format="vw", constant=False))
    refused(data, "made with other settings", recipe=Recipe(format="vw", crosses=(("f", "f"),)))
    run = Run(data)
    assert "made with other settings" in run.said[0]


def test_another_size_of_batches(data):
    """A cache keeps batches as they are."""
    Run(data)
    sources = find([str(data)])
    training = Training(epochs=1, cache=True, batch=BATCH + 1)
    recipe = Recipe(format="vw")
    plan = Plan(training=training, recipe=recipe, data=tuple(sources), folder="")
    stream = Stream(recipe, deal(sources, 1)[0], size=training.batch_after, bad=BadLines(0))
    said: list[str] = []

    assert next(iter(cached(plan, stream, 0, 1, said.append))).count == BATCH + 1
    assert "made with other settings" in said[0]


def test_batches_that_grow_in_another_way(data, monkeypatch):
    """A cache of a version whose batches grew faster, or slower, is of other batches."""
    Run(data, batch=0)
    assert Run(data, batch=0).said == []
    monkeypatch.setattr(cache_module, "BATCH_SHARE", 64)

    assert "made with other settings" in Run(data, batch=0).said[0]


@pytest.mark.parametrize("left", [-1, -8, HEAD_BYTES + 3, HEAD_BYTES])
def test_a_cache_that_is_cut(data, left):
    """Its length is in its head."""
    Run(data)
    cache = cache_of(data)
    cache.write_bytes(cache.read_bytes()[:left])

    refused(data, " bytes instead of ")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"commute cache 2\n",
        b"commute cache 2\n\x00\x00",
        b"commute cache 2\n" + b"\xff" * 5000,
        b"commute cache 2\n\x05\x00\x00\x00hello",
        b"commute cache 2\n\x02\x00\x00\x00{}",
        b"something else entirely" * 1000,
        b"commute cache 1\n\x02\x00\x00\x00{}",
    ],
    ids=["empty", "magic", "cut", "length", "text", "struct", "foreign", "older"],
)
def test_what_is_no_cache(data, raw):
    """Or only the beginning of one."""
    cache_of(data).write_bytes(raw)

    refused(data, "is no cache, and made again: ")


# Of the first block: 16 names, 7 names and a constant, one of each in an example.
PLACES, KEYS = 3 * BATCH, BATCH + 7 + 1
OFFSETS_AT = 16 + 4 * BATCH
INDEX_AT = OFFSETS_AT + 4 * (BATCH + 2) + 8 * KEYS


@pytest.mark.parametrize(
    ("at", "number", "why"),
    [
        (0, 1 << 31, "a block is longer than the file"),
        (8, 5, "expected 5 keys, got number "),
        (OFFSETS_AT + 4, PLACES + 1, "its offsets lead nowhere"),
        (OFFSETS_AT + 4 * BATCH, PLACES + 1, "its offsets lead nowhere"),
        (INDEX_AT, KEYS, f"expected {KEYS} keys, got number {KEYS}; remove it"),
        (INDEX_AT + 4 * (PLACES - 1), KEYS, f"expected {KEYS} keys, got number {KEYS}; remove it"),
    ],
    ids=["count", "keys", "offset", "last offset", "index", "last index"],
)
def test_a_damaged_block(data, at, number, why):
    """Of the right length, but the core must not follow its numbers."""
    Run(data)
    cache = cache_of(data)
    raw = bytearray(cache.read_bytes())
    raw[HEAD_BYTES + at : HEAD_BYTES + at + 4] = number.to_bytes(4, "little")
    cache.write_bytes(raw)

    with pytest.raises(DataError, match=f"is damaged at byte 4,096: {why}"):
        Run(data)


def test_half_a_cache_is_never_read(data):
    """A run that ends early leaves none, and neither does one whose data is bad."""
    sources = find([str(data)])
    recipe, training = Recipe(format="vw"), Training(cache=True, batch=BATCH)
    plan = Plan(training=training, recipe=recipe, data=tuple(sources), folder="")
    stream = Stream(recipe, deal(sources, 1)[0], size=training.batch_after, bad=BadLines(0))
    batches = cached(plan, stream, 0, 1, pytest.fail)
    next(batches)
    during = sorted(path.name for path in data.parent.iterdir())
    batches.close()  # type: ignore[attr-defined]

    assert during == ["data.vw", "data.vw.cache.0-of-1.new"]
    assert [path.name for path in data.parent.iterdir()] == ["data.vw"]

    data.write_bytes(LINES["plain"] + b"bad\n")
    with pytest.raises(DataError, match=r"data\.vw:101"):
        Run(data)
    assert [path.name for path in data.parent.iterdir()] == ["data.vw"]


def test_what_a_killed_run_left_is_written_over(data):
    """A .new that nobody finished is no cache."""
    cache = cache_of(data)
    left = cache.with_name(cache.name + ".new")
    left.write_bytes(b"half of something")
    run = Run(data)

    assert run.said == [] and cache.exists() and not left.exists()


def test_a_cache_for_each_number_of_streams(data):
    """They lie beside each other."""
    Run(data, streams=1)
    Run(data, streams=2)

    assert Run(data, streams=1).said == Run(data, streams=2).said == []
    assert cache_of(data, 1, 2).exists()


def test_a_cache_that_cannot_be_written(data):
    """One sentence that says what to do."""
    cache_of(data).with_name(cache_of(data).name + ".new").mkdir()

    with pytest.raises(DataError, match="cannot be written: Is a directory; leave --cache out"):
        Run(data)


def test_many_files_make_a_long_head(tmp_path):
    """Longer than the room that is usual for it."""
    paths = [tmp_path / f"{'long' * 40}{i:03d}.vw" for i in range(40)]
    for path in paths:
        path.write_bytes(b"1 |f a b\n")
    pattern = tmp_path / "long*.vw"
    first, second = Run(pattern), Run(pattern)

    assert len(msgspec.json.encode(first.sources)) > HEAD_BYTES
    assert second.said == [] and len(second.batches[0]) == 80
