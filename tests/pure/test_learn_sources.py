# SPDX-License-Identifier: Apache-2.0
"""Files, how they are dealt to streams, and the batches that a stream reads."""

from __future__ import annotations

import gzip
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commute import DataError, SettingError
from commute.learn import sources as sources_module
from commute.learn.reader import BadLines, Stream, ahead, names_of
from commute.learn.recipe import Recipe, guess
from commute.learn.sources import Piece, deal, find, first_lines, format_of, remove_spooled, texts

pytestmark = pytest.mark.timeout(60)

SVM = Recipe(format="svm", binary=False, constant=False)


def written(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return str(path)


def texts_of(pieces: Sequence[Piece]) -> list[bytes]:
    return [bytes(t.data[t.begin : t.end]) for piece in pieces for t in texts(piece)]


def lines_of(pieces: Sequence[Piece]) -> list[bytes]:
    """The lines of a stream that are not empty, without their newlines."""
    return [line for text in texts_of(pieces) for line in text.split(b"\n") if line]


def stream_of(
    pieces: Sequence[Piece], recipe: Recipe = SVM, *, size: int = 1000, bad: int = 0
) -> Stream:
    return Stream(recipe, pieces, size=lambda _: size, bad=BadLines(bad))


def labels_of(stream: Stream) -> list[float]:
    return [label for batch in stream for label in batch.labels.tolist()]


# ---- dealing ----


@st.composite
def files(draw: Any) -> list[tuple[bool, bytes]]:
    """A few files, packed or not: lines of all sorts, and a last one with or without its end."""
    line = st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"x").replace(b"\r", b"y"))
    end = st.sampled_from([b"\n", b"\r\n"])
    whole = st.lists(st.tuples(line, end).map(b"".join), max_size=12).map(b"".join)
    text = st.tuples(whole, st.sampled_from([b"", b"last"])).map(b"".join)
    text = text.filter(lambda text: not text.startswith(sources_module.GZIP))
    return draw(st.lists(st.tuples(st.booleans(), text), min_size=1, max_size=4))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    given_files=files(),
    streams=st.integers(1, 9),
    block=st.integers(1, 40),
    turn=st.integers(1, 100),
)
def test_every_line_is_in_one_stream(given_files, streams, block, turn, tmp_path, monkeypatch):
    """Whole, once, and in the order of its file, however many streams and blocks there are."""
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", block)
    monkeypatch.setattr(sources_module, "TURN_BYTES", turn)
    paths = [
        written(tmp_path, f"{i}.svm{'.gz' if packed else ''}", text)
        for i, (packed, text) in enumerate(given_files)
    ]
    dealt = deal(find(paths), streams)
    found = [line for pieces in dealt for line in lines_of(pieces)]
    expected = [line for _, text in given_files for line in text.split(b"\n") if line]
    # Of files that are not packed, the pieces one after the other are the files.
    plain = [piece for pieces in dealt for piece in pieces if not piece.source.packed]
    plain.sort(key=lambda piece: (paths.index(piece.source.path), piece.begin))
    together = texts_of(plain)

    assert sorted(found) == sorted(expected)
    assert b"".join(together) == b"".join(text for packed, text in given_files if not packed)


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("packed", [False, True])
def test_every_example_is_read_once(tmp_path, streams, packed, monkeypatch):
    """With empty lines, comments, CRLF and no newline at the end; also more streams than lines."""
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", 64)
    text = b"".join(b"%d a:1 b:%d%s" % (i, i, [b"\n", b"\r\n", b"\n\n"][i % 3]) for i in range(30))
    end = ".svm.gz" if packed else ".svm"
    paths = [
        written(tmp_path, f"a{end}", b"# comment\n" + text),
        written(tmp_path, f"b{end}", b""),
        written(tmp_path, f"c{end}", b"30 a:1"),
    ]
    dealt = deal(find(paths), streams)
    found = [labels_of(stream_of(pieces)) for pieces in dealt]

    assert len(dealt) == streams
    assert sorted(label for labels in found for label in labels) == list(range(31))


def test_streams_go_through_large_files_together(tmp_path, monkeypatch):
    """So that what comes last in the files is learned last, whoever learns it."""
    monkeypatch.setattr(sources_module, "TURN_BYTES", 100)
    path = written(tmp_path, "a.svm", b"1 a:1\n" * 200)
    dealt = deal(find([path]), 3)

    assert [len(pieces) for pieces in dealt] == [4, 4, 4]
    for together in zip(*dealt, strict=True):
        assert together[-1].end - together[0].begin <= 3 * 100
    assert sum(len(lines_of(pieces)) for pieces in dealt) == 200


def test_shares_are_about_equal(tmp_path):
    """By bytes, over all files."""
    paths = [written(tmp_path, f"{i}.svm", b"1 a:1\n" * n) for i, n in enumerate((100, 20, 300))]
    counts = [len(lines_of(pieces)) for pieces in deal(find(paths), 4)]

    assert sum(counts) == 420 and max(counts) - min(counts) <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_header_is_read_by_every_stream_and_learned_by_none(tmp_path, packed, monkeypatch):
    """Of each file, and columns may be in another order in the next."""
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", 16)
    end = ".csv.gz" if packed else ".csv"
    paths = [
        written(tmp_path, f"a{end}", b"label,c\n" + b"".join(b"%d,x\n" % i for i in range(20))),
        written(tmp_path, f"b{end}", b"c,label\n" + b"".join(b"x,%d\n" % i for i in range(20, 40))),
    ]
    found = find(paths)
    recipe, _ = guess(first_lines(found[0]), format="csv", binary=False)
    made = [labels_of(stream_of(pieces, recipe)) for pieces in deal(found, 3)]

    assert sorted(label for labels in made for label in labels) == list(range(40))
    assert all(labels for labels in made)


# ---- files ----


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.svm", "svm"),
        ("a.libsvm", "svm"),
        ("a.svmlight", "svm"),
        ("day.1.vw.gz", "vw"),
        ("a.CSV", "csv"),
        ("a.tsv", "tsv"),
        ("a.tab.gz", "tsv"),
        ("a.txt", None),
        ("a.gz", None),
        ("svm", None),
    ],
)
def test_formats_by_name(name, format):
    """Of what is packed, by the name without .gz."""
    assert format_of(name) == format


def test_patterns(tmp_path):
    """A pattern is its files by name; a name with a bracket that is there is still a pattern."""
    paths = [written(tmp_path, name, b"1 a:1\n") for name in ("d2.svm", "d1.svm", "e.svm")]
    found = find([str(tmp_path / "d*.svm"), paths[2]])

    assert [Path(s.path).name for s in found] == ["d1.svm", "d2.svm", "e.svm"]
    assert [s.bytes for s in found] == [6, 6, 6] and not any(s.packed for s in found)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ([], "there is no data: name a file"),
        (["no/such.svm"], "no/such.svm cannot be read: No such file or directory"),
        (["no/such*.svm"], "no file is called no/such*.svm"),
        (["."], ". cannot be read: Is a directory"),
        ([os.devnull], f"{os.devnull} is no file; what comes from a pipe is read as -"),
    ],
)
def test_files_that_are_not_there(patterns, says):
    """One sentence with the name."""
    with pytest.raises(SettingError) as error:
        find(patterns)

    assert says in str(error.value)


def test_gzip_by_content(tmp_path):
    """A packed file is known by its first bytes, whatever it is called."""
    path = tmp_path / "a.svm"
    path.write_bytes(gzip.compress(b"1 a:1\n2 a:1\n"))
    [source] = find([str(path)])

    assert source.packed and first_lines(source, 1) == ["1 a:1\n"]
    assert labels_of(stream_of(deal([source], 1)[0])) == [1, 2]


def test_gzip_that_is_cut(tmp_path):
    """Said in one sentence, when it is looked at and when it is read."""
    path = tmp_path / "a.svm.gz"
    packed = gzip.compress(np.random.default_rng(1).bytes(50_000))
    path.write_bytes(packed[:-5000])
    [source] = find([str(path)])

    with pytest.raises(SettingError, match=r"a\.svm\.gz cannot be read: "):
        first_lines(source, 1 << 30)
    with pytest.raises(SettingError, match=r"a\.svm\.gz cannot be unpacked: "):
        lines_of(deal([source], 1)[0])


def test_a_file_that_becomes_shorter(tmp_path):
    """Is no longer the file that was dealt."""
    path = written(tmp_path, "a.svm", b"1 a:1\n" * 10)
    dealt = deal(find([path]), 1)
    Path(path).write_bytes(b"1 a:1\n")

    with pytest.raises(SettingError, match="became shorter while it was read"):
        lines_of(dealt[0])


def test_standard_input_is_copied_and_only_the_copy_removed(tmp_path, monkeypatch):
    """Also when patterns before it stand for several files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7 a:1\n")))
    paths = [written(tmp_path, f"d{i}.svm", b"%d a:1\n" % i) for i in range(3)]
    found = find([str(tmp_path / "d*.svm"), "-"])
    labels = labels_of(stream_of(deal(found, 1)[0]))
    copies = [s.path for s in found if s.spooled]
    remove_spooled(found)

    assert labels == [0, 1, 2, 7]
    assert len(copies) == 1 and not Path(copies[0]).exists()
    assert all(Path(path).exists() for path in paths)


def test_no_copy_is_made_where_another_file_is_missing(tmp_path, monkeypatch):
    """Standard input is read last."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SettingError, match="cannot be read"):
        find(["-", "no/such.svm"])

    assert list(tmp_path.iterdir()) == []


# ---- batches ----


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_batches_are_what_parsing_at_once_gives(tmp_path, size, packed):
    """Put together: labels, keys, values and how many features each example has."""
    rng = np.random.default_rng(5)
    text = "".join(
        f"{i % 3} " + " ".join(f"{k}:{rng.normal():.3f}" for k in rng.integers(0, 50, i % 6)) + "\n"
        for i in range(200)
    ).encode()
    path = written(tmp_path, "a.svm.gz" if packed else "a.svm", text)
    [pieces] = deal(find([path]), 1)
    batches = list(stream_of(pieces, size=size))
    array = np.frombuffer(text, np.uint8)
    whole = SVM.parser().parse(array.ctypes.data, array.size, 1 << 40, True)

    def together(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name) for batch in batches])

    assert [b.count for b in batches[:-1]] == [size] * (len(batches) - 1)
    np.testing.assert_array_equal(together("labels"), whole.labels)
    np.testing.assert_array_equal(together("keys"), whole.keys)
    values = [np.ones(len(b.keys)) if b.values is None else b.values for b in batches]
    np.testing.assert_array_equal(np.concatenate(values), whole.values)
    np.testing.assert_array_equal(
        np.concatenate([np.diff(b.offsets) for b in batches]), np.diff(whole.offsets)
    )


def test_the_size_of_a_batch_grows_with_what_was_read(tmp_path):
    """Over all passes."""
    path = written(tmp_path, "a.svm", b"1 a:1\n" * 20)
    asked: list[int] = []

    def size(examples: int) -> int:
        asked.append(examples)
        return 10 + examples // 10

    stream = Stream(SVM, deal(find([path]), 1)[0], size=size, bad=BadLines(0))
    counts = [batch.count for _ in range(2) for batch in stream]

    assert counts == [10, 10, 12, 8] and asked == [0, 10, 20, 32]
    assert stream.passes == 2


def test_a_thread_ahead_changes_nothing(tmp_path):
    """Also where it ends with an error, or is closed before its end."""
    path = written(tmp_path, "a.svm", b"1 a:1\n" * 50 + b"bad\n")
    pieces = deal(find([path]), 1)[0]

    assert len(list(ahead(iter(stream_of(pieces, size=10, bad=1))))) == 5
    with pytest.raises(DataError, match=r"a\.svm:51"):
        list(ahead(iter(stream_of(pieces, size=10))))
    closed = ahead(iter(stream_of(pieces, size=10)))
    assert next(closed).count == 10
    closed.close()


# ---- lines that cannot be read ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_bad_lines_have_a_file_and_a_line(tmp_path, packed, streams, monkeypatch):
    """Counted from the beginning of the file, in whichever stream or block they are."""
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", 50)
    lines = [b"1 a:1\n"] * 60
    for at in (0, 31, 59):
        lines[at] = b"1 a:x\n"
    lines[10] = b"\n"
    first = written(tmp_path, "first.svm", b"1 a:1\n" * 10)
    path = written(tmp_path, "a.svm.gz" if packed else "a.svm", b"".join(lines))
    bad = BadLines(3)
    for pieces in deal(find([first, path]), streams):
        for batch in Stream(SVM, pieces, size=lambda _: 7, bad=bad):
            assert batch.count
    places = sorted(int(shown.split(":")[1]) for shown in bad.shown)

    assert bad.count == 3 and places == [1, 32, 60]
    assert all(shown.startswith(f"{path}:") for shown in bad.shown)
    assert all("'1 a:x'" in shown for shown in bad.shown)


def test_bad_lines_below_a_header(tmp_path):
    """The header is line 1."""
    path = written(tmp_path, "a.csv", b"a,label\nx,1\nx,1,2\n")
    recipe, _ = guess(["a,label\n", "x,1\n"], format="csv")
    bad = BadLines(9)
    list(Stream(recipe, deal(find([path]), 1)[0], size=lambda _: 7, bad=bad))

    assert bad.shown[0].startswith(f"{path}:3: ")


def test_more_bad_lines_than_allowed(tmp_path):
    """An error that names the first ones and the limit."""
    path = written(tmp_path, "a.svm", b"1 a:1\n" + b"bad\n" * 20)
    with pytest.raises(DataError) as error:
        labels_of(stream_of(deal(find([path]), 1)[0], bad=7))
    first, *shown = str(error.value).splitlines()

    assert first.startswith("more than 7 lines cannot be read (--bad-lines allows others)")
    assert [line.split(":")[1] for line in shown] == ["2", "3", "4", "5", "6"]


def test_bad_lines_count_once_in_several_passes(tmp_path):
    """The second pass meets the same lines."""
    path = written(tmp_path, "a.svm", b"1 a:1\nbad\n" * 5)
    bad = BadLines(5)
    stream = Stream(SVM, deal(find([path]), 1)[0], size=lambda _: 3, bad=bad)

    assert [len(labels_of(stream)) for _ in range(3)] == [5, 5, 5]
    assert bad.count == 5


# ---- names ----


@pytest.mark.parametrize("packed", [False, True])
def test_names_of_features(tmp_path, packed):
    """Found in the text again; what does not occur has none, and an empty file does no harm."""
    end = ".csv.gz" if packed else ".csv"
    paths = [
        written(tmp_path, f"empty{end}", b""),
        written(tmp_path, f"a{end}", b"c,label\nx,1\ny,0\n"),
    ]
    recipe, _ = guess(["c,label\n", "x,1\n", "y,0\n"], format="csv")
    [pieces] = deal(find(paths), 1)
    [batch] = list(stream_of(pieces, recipe))
    asked = np.append(batch.keys, np.uint64(12345))

    found = names_of(recipe, pieces, asked, 1 << 20)
    assert sorted(found.values()) == ["c=x", "c=y", "constant"]
    assert names_of(recipe, pieces, asked, 0) == {}
