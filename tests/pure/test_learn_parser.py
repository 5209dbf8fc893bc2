# SPDX-License-Identifier: Apache-2.0
"""The parser of `commute learn` as Python sees it; its grammar is tested in core/tests."""

from __future__ import annotations

import gc
import struct
import threading
from typing import Any

import numpy as np
import pytest

from commute import _core

ALL = 1 << 60
MASK = (1 << 64) - 1


def made(format: str = "vw", **changes: Any) -> _core.Parser:
    settings: dict[str, Any] = {
        "separator": ",",
        "columns": [],
        "crosses": [],
        "positive": [],
        "binary": False,
        "constant": False,
    }
    return _core.Parser(format, **{**settings, **changes})


def column(name: str, kind: str, edges: tuple[float, ...] = ()) -> tuple[Any, ...]:
    return (name, kind, False, 0.0, 1.0, list(edges))


def parsed(
    parser: _core.Parser, text: bytes, most: int = ALL, *, last: bool = True
) -> _core.Examples:
    array = np.frombuffer(text, np.uint8)
    return parser.parse(array.ctypes.data, array.size, most, last)


def names(parser: _core.Parser, text: bytes, keys: np.ndarray) -> dict[int, str]:
    array = np.frombuffer(text, np.uint8)
    return parser.names(array.ctypes.data, array.size, keys.ctypes.data, keys.size)


def last_block(seed: int, low: int, high: int, length: int) -> int:
    product = (low ^ 0x8BB84B93962EACC9) * (high ^ seed)
    product = (product & MASK ^ 0x2D358DCCAA6C78A5 ^ length) * (product >> 64 ^ 0x8BB84B93962EACC9)
    return product & MASK ^ product >> 64


def text_hash(seed: int, text: bytes) -> int:
    """As the head of feature_hash.h says."""
    whole = max(0, (len(text) - 1) // 16 * 16)
    for low, high in struct.iter_unpack("<QQ", text[:whole]):
        product = (low ^ 0x8BB84B93962EACC9) * (high ^ seed)
        seed = product & MASK ^ product >> 64
    low, high = struct.unpack("<QQ", text[whole:].ljust(16, b"\0"))
    return last_block(seed, low, high, len(text))


def key(name: str, text: str) -> int:
    return text_hash(text_hash(0x9E3779B97F4A7C15, name.encode()), text.encode())


def test_examples_are_arrays():
    """One row per line; arrays have the types that tables and NumPy's sums want."""
    text = b"1 2 |f a b:0.5\n# no\nbad \xff\n-1 |g c\n0 |f"
    found = parsed(made(), text, last=False)

    assert (found.count, found.lines, found.consumed) == (2, 4, len(text) - 4)
    assert found.labels.tolist() == [1, -1]
    assert found.weights.tolist() == [2, 1]
    assert found.offsets.tolist() == [0, 2, 3]
    assert found.keys.tolist() == [key("f", "a"), key("f", "b"), key("g", "c")]
    assert found.values is not None
    assert found.values.tolist() == [1, 0.5, 1]
    assert found.bad == [(2, "no '|' before the features", "bad \ufffd")]
    types = [found.labels, found.weights, found.offsets, found.keys, found.values]
    assert [array.dtype.name for array in types] == [
        *("float32", "float32", "uint32", "uint64", "float32")
    ]


def test_values_that_are_all_one_are_left_out():
    """Then a model sums weights, and multiplies nothing."""
    assert parsed(made(), b"1 |f a b:1\n").values is None
    assert parsed(made(), b"").values is None
    assert parsed(made(), b"").offsets.tolist() == [0]
    assert parsed(made(), b"").keys.shape == (0,)


def test_arrays_outlive_their_examples():
    """They share its memory, and keep it."""
    found = parsed(made(), b"1 |f a\n" * 1000)
    keys, labels = found.keys, found.labels
    assert np.shares_memory(keys, found.keys)
    del found
    gc.collect()

    assert np.all(keys == key("f", "a"))
    assert np.all(labels == 1)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100])
def test_keys_are_as_written_down(size):
    """The hash is part of saved models: a second implementation finds the same keys."""
    word = ("abcdefghijklmnopqrstuvwxyz-äöü" * 4)[:size]
    csv = made("csv", columns=[column("y", "label"), column("ä" * size, "category")])
    found = parsed(csv, f"1,{word}\n".encode())

    assert found.keys.tolist() == [key("ä" * size, word)]


def test_features_have_names():
    """Those of the keys that are asked for, if the text has them."""
    columns = [
        column("y", "label"),
        column("city", "category"),
        column("age", "number", (18, 65)),
        column("cost", "number"),
    ]
    csv = made("csv", columns=columns, crosses=[["city", "age"]], constant=True)
    text = b"1,Z\xc3\xbcrich,18,3\n0,\xff,,?\n"
    keys = np.append(parsed(csv, text).keys, np.uint64(5))

    assert set(names(csv, text, keys).values()) == {
        *("city=Zürich", "age in [18, 65)", "cost", "city=Zürich & age in [18, 65)", "constant"),
        *("city=\ufffd", "age=missing", "cost=missing", "city=\ufffd & age=missing"),
    }
    assert names(csv, text, keys[:1]) == {key("city", "Zürich"): "city=Zürich"}
    assert names(csv, text, keys[:0]) == {}
    vw = made("vw", crosses=[["a", "b"]])
    text = b"1 |a x |b y | z"
    assert set(names(vw, text, parsed(vw, text).keys).values()) == {"a^x", "b^y", "z", "a^x & b^y"}
    svm = made("svm")
    assert names(svm, b"1 7:2", np.array([key("", "7")], np.uint64)) == {key("", "7"): "7"}


def test_labels():
    """Numbers, words, or none."""
    assert parsed(made("svm", binary=True), b"-1 a\n2 a\n").labels.tolist() == [0, 1]
    assert parsed(made("svm", positive=["ja"]), b"ja a\nnein a\n").labels.tolist() == [1, 0]
    assert parsed(made(), b"|f a").bad == [(0, "no label", "|f a")]
    assert parsed(made(labels_needed=False), b"|f a").labels.tolist() == [0]


def test_what_is_shown_of_bad_lines_is_short():
    """80 characters, whatever they are."""
    ((line, what, text),) = parsed(made(), ("ä€😀" * 100 + "\n").encode()).bad

    assert (line, text) == (0, ("ä€😀" * 27)[:80])
    assert what


@pytest.mark.parametrize(
    ("format", "changes", "match"),
    [
        ("xml", {}, "one of svm, vw, csv, not 'xml'"),
        ("csv", {}, "list of its columns"),
        ("csv", {"separator": ", ", "columns": [column("y", "label")]}, "one character"),
        ("csv", {"columns": [column("y", "colour")]}, "kind is one of ignore, category"),
        ("csv", {"columns": [column("y", "label")], "crosses": [["y", "y"]]}, "cannot cross 'y'"),
        ("vw", {"crosses": [["a"]]}, "two names"),
    ],
)
def test_recipes_that_cannot_be(format, changes, match):
    """The message says what would do."""
    with pytest.raises(ValueError, match=match):
        made(format, **changes)


def test_threads_share_a_parser():
    """It keeps nothing of a text."""
    parser = made(crosses=[["a", "b"]])
    texts = [b"".join(b"%d |a x%d |b y%d:2\n" % (i, i, t) for i in range(3000)) for t in range(4)]
    expected = [parsed(parser, text).keys.tolist() for text in texts]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if parsed(parser, texts[index]).keys.tolist() != expected[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
