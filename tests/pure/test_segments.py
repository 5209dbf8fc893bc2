# SPDX-License-Identifier: Apache-2.0
"""The format of checkpoints: segments are safetensors files, manifests say what they are."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commute import CheckpointError
from commute.store import appender, segments
from commute.store.manifest import Manifest, SavedPart, SavedTable, segment_name
from commute.store.segments import FileRecord, Segment, SegmentWriter, checksum

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "emb/0012/keys": np.array([3, 1 << 63, 0], np.uint64),
    "emb/0012/value": np.arange(12, dtype=np.float32).reshape(3, 4),
    "odd/0000/value": np.array([1, -2, 3], np.int8),  # what follows is not aligned
    'a/b "ü"/0000/value': np.array(2.5),
    "none/0000/value": np.empty((0, 7), np.float16),
    "step": np.array([7], np.uint32),
}


def written(path: Path, room: int = 4096) -> FileRecord:
    writer = SegmentWriter(str(path), room)
    for name, tensor in TENSORS.items():
        raw = np.frombuffer(tensor.tobytes(), np.uint8)
        pieces = [raw[:5], raw[5:]]
        writer.add(name, tensor.dtype.name, tensor.shape, pieces)
    return writer.finish({"store": "main"})


@pytest.mark.parametrize("held", [1, 20, 1 << 20], ids=["by the piece", "some", "at the end"])
def test_round_trip(tmp_path, monkeypatch, held):
    """However it is written, it reads the same, and every block is checked."""
    monkeypatch.setattr(segments, "HELD_BYTES", held)
    monkeypatch.setattr(segments, "BLOCK_BYTES", 32)
    record = written(tmp_path / "x.safetensors")
    segment = Segment(str(tmp_path), record)
    found = segment.tensors()
    for block in range(len(record.blocks)):
        segment.check(block)
    total = sum(tensor.nbytes for tensor in TENSORS.values())

    assert record.bytes == (tmp_path / "x.safetensors").stat().st_size
    assert len(record.blocks) == -(-total // 32)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        place = found[name]
        assert place.shape == tensor.shape
        assert segment.read(place.begin, place.end).tobytes() == tensor.tobytes()
    segment.close()


@pytest.mark.parametrize("held", [1, 1 << 20])
def test_the_package_opens_it(tmp_path, monkeypatch, held):
    """`safetensors` reads what we write, with reserved room and without."""
    numpy_reader = pytest.importorskip("safetensors.numpy")
    monkeypatch.setattr(segments, "HELD_BYTES", held)
    written(tmp_path / "x.safetensors")
    found = numpy_reader.load_file(tmp_path / "x.safetensors")

    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_every_dtype_has_a_name(tmp_path):
    """All of ours, bfloat16 among them, as the package calls them."""
    package = pytest.importorskip("safetensors")
    writer = SegmentWriter(str(tmp_path / "x"), 4096)
    for name in segments.DTYPES:
        size = segments.item_bytes(name)
        writer.add(name, name, (3,), [np.zeros(3 * size, np.uint8)])
    writer.finish({})
    with package.safe_open(tmp_path / "x", "np") as file:
        for name, short in segments.DTYPES.items():
            assert file.get_slice(name).get_dtype() == short


def test_the_bytes(tmp_path):
    """As the format is written down: length, JSON filled up with spaces, data."""
    record = written(tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])

    assert 8 + length == record.data_begin
    assert record.data_begin % 64 == 0
    assert header.pop("__metadata__") == {"store": "main"}
    assert header["emb/0012/keys"] == {"dtype": "U64", "shape": [3], "data_offsets": [0, 24]}
    assert [entry["data_offsets"][0] for entry in header.values()] == [0, 24, 72, 75, 83, 83]


def test_no_room_for_the_header(tmp_path, monkeypatch):
    """An error, no broken file that looks whole."""
    monkeypatch.setattr(segments, "HELD_BYTES", 1)
    writer = SegmentWriter(str(tmp_path / "x"), room=10)
    for i in range(100):
        writer.add(f"w/{i:04}/value", "uint8", (1,), [np.zeros(1, np.uint8)])
    with pytest.raises(OSError, match="no room for a header"):
        writer.finish({})
    writer.close()


def without_direct(monkeypatch):
    monkeypatch.setattr(appender, "_set_direct", lambda fd, direct: False)


def refusing_direct(monkeypatch):
    """As a file system does whose blocks are larger: every write past the cache is refused."""
    write = os.pwrite

    def refused(fd: int, data: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refused)


def writing_little(monkeypatch):
    """A system call that writes some of what it is given."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:4096], at))


@pytest.mark.parametrize(
    "change", [lambda _: None, without_direct, refusing_direct, writing_little]
)
def test_appending(tmp_path, monkeypatch, change):
    """What was taken is what the file holds, block or no block, past the cache or through it."""
    change(monkeypatch)
    rng = np.random.default_rng(5)
    expected = bytes(4096)
    with (tmp_path / "x").open("wb") as file:
        appended = appender.Appender(file.fileno(), 4096)
        for size in (0, 1, 4095, 3, 10_000, 0, 4096, 70_001, 12):
            pieces = np.split(rng.integers(0, 256, size, np.uint8), [size // 3])
            assert appended.take(pieces).tobytes() == b"".join(pieces)
            appended.write()
            expected += b"".join(pieces)
        appended.finish()

    assert (tmp_path / "x").read_bytes() == expected


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    """Not taken for a file system that cannot write past the cache."""
    with open("/dev/full", "wb") as file:
        appended = appender.Appender(file.fileno(), 0)
        appended.take([np.zeros(8192, np.uint8)])
        with pytest.raises(OSError, match="No space left"):
            appended.write()


def test_checksums_are_xxh64():
    """The published values; in pieces as at once."""
    data = bytes(range(256)) * 3

    assert checksum(b"") == "ef46db3751d8e999"
    assert checksum(b"a") == "d24ec4f1a98c6e5b"
    assert checksum(b"Nobody inspects the spammish repetition") == "fbcea83c8a378bf1"
    for cut in (0, 1, 31, 32, 33, 64, 500):
        assert checksum(data[:cut], data[cut:]) == checksum(data)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
    ],
)
def test_headers_that_make_no_sense(tmp_path, header):
    """Refused by name, also where all checksums are right."""
    before = struct.pack("<Q", len(header)) + header
    data = bytes(8)
    (tmp_path / "x").write_bytes(before + data)
    size = len(before)
    record = FileRecord("x", size + 8, size, checksum(before), [checksum(data)])
    segment = Segment(str(tmp_path), record)
    with pytest.raises(CheckpointError, match="/x has a header that makes no sense"):
        segment.tensors()
    segment.close()


def test_manifest_round_trip():
    """What is encoded is decoded, and a person can read it."""
    part = SavedPart(0, 24, (1 << 64) - 1)
    table = SavedTable(
        "dense", "float64", [3], "sum", "float64 with sum", None, 5, ["value"], 0, [part]
    )
    file = FileRecord(segment_name(0, 1), 100, 64, checksum(b""), [])
    manifest = Manifest(store="main", slots=1024, tables={"ü/w": table}, files=[file])
    text = manifest.encode()
    found = Manifest.decode(text, "m")

    assert found.tables == manifest.tables
    assert found.files == manifest.files
    assert text.splitlines()[1].strip() == b'"format": "commute checkpoint",'


@pytest.mark.parametrize("seed", range(40))
def test_damaged_manifests(seed):
    """Any byte that is changed is noticed, or makes no difference."""
    table = SavedTable("sparse", "float32", [4], "sum", "float32 with sum", 0, 5, ["keys"], 9, [])
    text = Manifest(store="main", slots=1024, tables={"w": table}, files=[]).encode()
    rng = np.random.default_rng(seed)
    at = int(rng.integers(len(text)))
    bad = text[:at] + bytes([text[at] ^ (1 << int(rng.integers(8)))]) + text[at + 1 :]
    try:
        found = Manifest.decode(bad, "m")
    except CheckpointError as error:
        assert str(error).startswith("m ")
    else:
        assert found == Manifest.decode(text, "m")
