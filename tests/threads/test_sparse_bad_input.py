# SPDX-License-Identifier: Apache-2.0
"""What sparse tables refuse, with which words, and that nothing has happened then."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from commute import (
    FTRL,
    SGD,
    ArrayError,
    ClosedError,
    CommuteError,
    MismatchError,
    Normal,
    SettingError,
    Uniform,
    _core,
)

NAN = float("nan")
PUSHES = ["push", "push_async", "push_pull", "push_pull_async"]
VERBS = [*PUSHES, "pull", "pull_async", "drop"]


@pytest.fixture
def pair(stores: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """Table "e" on two ranks; afterwards rank 0's clock and all rows are as before."""
    workers = stores(2)
    a, b = workers.rows("e", 3, init=5.0, reject_nan=True)
    one = np.ones((2, 3), "float32")
    b.push([1, 2], one)
    a.push([2, 3], one)
    before = a.pull([1, 2, 3, 4]).tobytes()
    yield a, b
    workers.settle()

    assert a.info().clock == b.info().clock == 1 and a.count() == 3
    assert a.pull([1, 2, 3, 4]).tobytes() == b.pull([1, 2, 3, 4]).tobytes() == before
    b.push([4, 4], one)
    assert a.push_pull([4, 9], one)[0].tolist() == [8.0] * 3  # and it goes on


def refused(kind: type[CommuteError], call: Callable[[], Any], *words: str) -> None:
    """The words are in the message."""
    with pytest.raises(kind) as raised:
        call()

    assert isinstance(raised.value, CommuteError)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def call(table: Any, verb: str, keys: Any, rows: Any = None) -> Any:
    rows = np.ones((2, 3), "float32") if rows is None else rows
    return getattr(table, verb)(keys, *([rows] if verb in PUSHES else []))


# ---- keys ----

BAD_KEYS: dict[str, tuple[Any, str]] = {
    "negative": ([3, -1], "from 0 to 2^64 - 1, got [3, -1]"),
    "negative and large": ([2**64 - 1, -1], "from 0 to 2^64 - 1, got [18446744073709551615, -1]"),
    "negative array": (np.array([5, -7]), "got -7"),
    "negative tensor": (torch.tensor([5, -7]), "got -7"),
    "too large": ([2**64, 1], "18446744073709551616"),
    "floats": ([1.0, 2.0], "got float64"),
    "float array": (np.ones(2, "float32"), "got float32"),
    "float tensor": (torch.ones(2), "got float32"),
    "bools": ([True, False], "got bool"),
    "bool array": (np.ones(2, bool), "got bool"),
    "complex": (np.ones(2, complex), "got complex128"),
    "text": ("ab", "got <U2"),
    "texts": (["a", "b"], "got <U1"),
    "bytes": (b"ab", "got |S2"),
    "nothing": (None, "got object"),
    "ragged": ([[1], [2, 3]], "[[1], [2, 3]]"),
    "objects": (np.array([1, None]), "got object"),
    "a set": ({1, 2}, "got object"),
    "a dict": ({1: 2}, "got object"),
    "dates": (np.array(["2020", "2021"], "datetime64[D]"), "got datetime64[D]"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("bad", BAD_KEYS)
def test_keys_that_are_none(pair, bad, verb):
    keys, got = BAD_KEYS[bad]

    refused(ArrayError, lambda: call(pair[0], verb, keys), f"{verb} of table 'e' on rank 0", got)


@pytest.mark.parametrize("verb", [*PUSHES, "pull", "drop"])
def test_a_ticket_of_another_table(pair, verb):
    (other,) = (pair[0]._store.sparse("other", 3),)
    pair[1]._store.sparse("other", 3)
    _, ticket = other.pull([1, 2], ticket=True)
    refused(ArrayError, lambda: call(pair[0], verb, ticket), "'e'", "ticket of table 'other'")
    _, ticket = pair[1].pull([1, 2], ticket=True)
    refused(ArrayError, lambda: call(pair[0], verb, ticket), "'e'", "ticket of table 'e'")


@pytest.mark.parametrize("rows", [-1, 2**64, 1.5, "many", None])
def test_room_for_what_is_no_number(pair, rows):
    said = "reserve of table 'e' on rank 0"
    refused(SettingError, lambda: pair[0].reserve(rows), said, repr(rows))


# ---- rows ----

BAD_ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    "one too few": (lambda: np.ones((1, 3), "float32"), "(1, 3) of float32"),
    "one too many": (lambda: np.ones((3, 3), "float32"), "(3, 3) of float32"),
    "width": (lambda: np.ones((2, 4), "float32"), "(2, 4) of float32"),
    "no width": (lambda: np.ones(2, "float32"), "(2,) of float32"),
    "flat": (lambda: np.ones(6, "float32"), "(6,) of float32"),
    "float64": (lambda: np.ones((2, 3)), "(2, 3) of float64"),
    "int32": (lambda: np.ones((2, 3), "int32"), "(2, 3) of int32"),
    "a device that does not fit": (lambda: [np.ones((2, 3), "float32"), np.ones(3)], "(3,)"),
    "bool": (lambda: np.ones((2, 3), bool), "(2, 3) of bool"),
    "no device": (list, "got none"),
    "text": (lambda: "abc", "got str"),
    "NaN": (lambda: np.array([[1, 1, 1], [1, NAN, 1]], "float32"), "NaN"),
    "NaN of a device": (
        lambda: [np.ones((2, 3), "float32"), np.full((2, 3), NAN, "float32")],
        "NaN",
    ),
}


@pytest.mark.parametrize("verb", PUSHES)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_that_do_not_fit(pair, bad, verb):
    make, got = BAD_ROWS[bad]

    refused(ArrayError, lambda: call(pair[0], verb, [1, 2], make()), "'e'", "rank 0", got)


@pytest.mark.parametrize("verb", PUSHES)
def test_nan_that_repeated_keys_make(pair, verb):
    """They are added up before they travel: infinity and its opposite are no number."""
    rows = np.zeros((3, 3), "float32")
    rows[0, 1], rows[2, 1] = np.inf, -np.inf

    refused(ArrayError, lambda: call(pair[0], verb, [7, 8, 7], rows), "'e'", "NaN")


def test_a_scale_that_is_no_number(pair):
    one = np.ones((2, 3), "float32")
    for bad in ([1, 2], "x", 1j, 1e300):
        refused(ArrayError, lambda bad=bad: pair[0].push([1, 2], one, scale=bad), "'e'", repr(bad))
    refused(ArrayError, lambda: pair[0].push([1, 2], one, scale=NAN), "NaN")


BAD_OUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: np.empty((3, 2), "float32"), "(3, 2) of float32"),
    "dtype": (lambda: np.empty((2, 3)), "(2, 3) of float64"),
    "strided": (lambda: np.empty((4, 3), "float32")[::2], "not contiguous"),
    "read-only": (lambda: np.frombuffer(bytes(24), "float32").reshape(2, 3), "read-only"),
    "list": (lambda: [0.0] * 6, "got list"),
}


@pytest.mark.parametrize("verb", ["pull", "pull_async", "push_pull", "push_pull_async"])
@pytest.mark.parametrize("bad", BAD_OUTS)
def test_an_out_that_does_not_fit(pair, bad, verb):
    make, got = BAD_OUTS[bad]
    given = [[1, 2]] + ([np.ones((2, 3), "float32")] if verb in PUSHES else [])

    refused(ArrayError, lambda: getattr(pair[0], verb)(*given, out=make()), "'e'", "rank 0", got)


def test_an_out_that_overlaps_the_rows(pair):
    memory = np.ones((3, 3), "float32")

    refused(ArrayError, lambda: pair[0].push_pull([1, 2], memory[:2], out=memory[1:]), "overlaps")


@pytest.mark.parametrize("bad", [-1, NAN, "1", None.__class__], ids=str)
@pytest.mark.parametrize("verb", ["push", "push_pull", "pull", "drop"])
def test_timeouts(pair, verb, bad):
    given = [[1, 2]] + ([np.ones((2, 3), "float32")] if verb in PUSHES else [])

    refused(SettingError, lambda: getattr(pair[0], verb)(*given, timeout=bad), "timeout")


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", None, 1 << 32])
def test_top_of_how_many(pair, bad):
    refused(SettingError, lambda: pair[0].top(bad), "top(k)", repr(bad))


def test_top_of_more_than_an_answer_holds(stores):
    """It would not be the top: refused, and not cut short."""
    (e,) = stores(1, staleness=None).rows("e", 1)
    e.push(range(150_000), np.ones(150_000, "float32"))
    refused(SettingError, lambda: e.top(100_000), "65536", "'e'")

    assert len(e.top(65_536)[0]) == 65_536


# ---- declarations ----

BAD_DECLARATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "width 0": ({"width": 0}, ["1 to 4096", "got 0"]),
    "width 4097": ({"width": 4097}, ["1 to 4096", "got 4097"]),
    "width below 0": ({"width": -1}, ["got -1"]),
    "width a float": ({"width": 2.0}, ["got 2.0"]),
    "width a bool": ({"width": True}, ["got True"]),
    "width a shape": ({"width": (3,)}, ["got (3,)"]),
    "admit 0": ({"admit": 0}, ["admit", "1 to 15", "got 0"]),
    "admit 16": ({"admit": 16}, ["admit", "1 to 15", "got 16"]),
    "admit a bool": ({"admit": True}, ["admit", "got True"]),
    "admit none": ({"admit": None}, ["admit", "got None"]),
    "expire_after 0": ({"expire_after": 0}, ["expire_after", "got 0"]),
    "expire_after below 0": ({"expire_after": -1}, ["expire_after", "got -1"]),
    "expire_after too large": ({"expire_after": 1 << 31}, ["expire_after", "got 2147483648"]),
    "expire_after a float": ({"expire_after": 1.5}, ["expire_after", "got 1.5"]),
    "unknown wire": ({"wire": "int8"}, ["wire", '"float16"', "'int8'"]),
    "wire as it is": ({"wire": "float32"}, ["wire", "'float32'"]),
    "wire of float64": ({"wire": "float16", "dtype": "float64"}, ["wire", "float64"]),
    "wire of integers": ({"wire": "bfloat16", "dtype": "int64"}, ["wire", "int64"]),
    "init an array": ({"init": np.ones(3)}, ["init", "ndarray"]),
    "init text": ({"init": "zeros"}, ["init", "str"]),
    "init a class": ({"init": Uniform}, ["init", "type"]),
    "uniform of integers": ({"init": Uniform(), "dtype": "int32"}, ["float32", "int32"]),
    "normal of halves": ({"init": Normal(), "dtype": "float16"}, ["float32", "float16"]),
    "init no integer holds": ({"init": 2**63 - 1, "dtype": "int64"}, ["float64 holds exactly"]),
    "ftrl from one": ({"update": FTRL(), "init": 1.0}, ["FTRL", "leave init out"]),
    "seed below 0": ({"seed": -1}, ["seed", "-1"]),
    "seed too large": ({"seed": 2**64}, ["seed", str(2**64)]),
    "seed a float": ({"seed": 0.5}, ["seed", "0.5"]),
    "mean of integers": ({"reduce": "mean", "dtype": "int64"}, ["mean of integers"]),
    "mean of minima": ({"reduce": "mean", "update": "min"}, ["mean", "min"]),
    "mean without rounds": ({"reduce": "mean", "staleness": None}, ["mean", "staleness 0"]),
    "deterministic without rounds": ({"deterministic": True, "staleness": 1}, ["staleness 0"]),
    "optimizer of integers": ({"update": SGD(1), "dtype": "int32"}, ["SGD", "int32"]),
    "unknown update": ({"update": "average"}, ["'average'"]),
    "unknown dtype": ({"dtype": "complex64"}, ["complex64"]),
    "staleness": ({"staleness": -1}, ["staleness", "-1"]),
    "name": ({"name": ""}, ["name"]),
}


@pytest.mark.parametrize("bad", BAD_DECLARATIONS)
def test_a_table_that_cannot_be(stores, bad):
    """And the name is still free."""
    (store,) = stores(1)
    options, words = BAD_DECLARATIONS[bad]
    refused(SettingError, lambda: store.sparse(**{"name": "new", **options}), *words)

    assert not store.tables()
    assert store.sparse("new", 2).pull([1]).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("dtype", "init"), [("int8", 300), ("uint8", -1), ("float16", 1e6), ("int64", 0.5)]
)
def test_a_first_value_that_does_not_fit(stores, dtype, init):
    (store,) = stores(1)
    refused(ArrayError, lambda: store.sparse("new", 2, dtype, init=init), f"fits {dtype}")

    assert not store.tables()


@pytest.mark.parametrize(
    "options",
    [
        {"width": 3},
        {"dtype": "float64"},
        {"init": 1.0},
        {"init": Uniform(), "seed": 1},
        {"admit": 2},
        {"expire_after": 9},
        {"wire": "float16"},
        {"update": "max"},
        {"staleness": 1},
    ],
    ids=str,
)
def test_ranks_that_disagree(stores, options):
    """The second is told both declarations; the first goes on."""
    first, second = stores(2, staleness=None)
    table = first.sparse("e", 2)
    refused(
        MismatchError,
        lambda: second.sparse("e", **{"width": 2, **options}),
        "rank 0 declared sparse (2,)",
        "rank 1 sparse",
    )
    refused(MismatchError, lambda: second.dense("e", (2,)), "rank 0 declared sparse", "dense (2,)")
    second.sparse("e", 2, cache_keys=True, reject_nan=True)  # one's own business

    table.push([1], np.ones((1, 2), "float32"))
    assert table.pull([1]).tolist() == [[1, 1]]


# ---- the end ----


@pytest.mark.parametrize("verb", [*VERBS, "count", "top", "items", "set", "info"])
@pytest.mark.parametrize("end", ["left", "closed"])
def test_after_the_end(stores, verb, end):
    workers = stores(2)
    a, _ = workers.rows("e", 3, update=SGD(lr=1.0))
    if end == "left":
        workers[0].leave()
    else:
        workers.groups[0].close()
    others = {"top": lambda: a.top(3), "items": lambda: list(a.items()), "set": lambda: a.set(lr=2)}
    others |= {"count": a.count, "info": a.info}

    refused(ClosedError, others.get(verb, lambda: call(a, verb, [1, 2])))


# ---- what no correct client sends ----


class Machines:
    """One worker's client and a shard, with hands on every message between them."""

    def __init__(self, staleness: int, *, wire: int = 10, width: int = 1) -> None:
        self.replay = _core.Replay()
        self.shard = _core.ShardMachine(2, 0, 1, 16, 0, self.replay)
        self.clients = [_core.ClientMachine(worker, 1, 1, 0, 16) for worker in range(2)]
        spec = _core.TableSpec(10, width, _core.Update(0), staleness).with_rows(
            wire, 0, 0.0, 0.0, 0, 1, 0, 16
        )
        for client in self.clients:
            client.declare_table("s/e", spec, "e")
            self.move()
            client.declare("s/e", spec, 0, 0)
            self.move()
        self.table = self.clients[0].table_of("s/e")

    def move(self, change: Callable[[bytes], bytes] = lambda message: message) -> None:
        """Delivers everything, messages of worker 0 as changed; until nobody says more."""
        moved = True
        while moved:
            moved = False
            for worker, client in enumerate(self.clients):
                while (message := client.next(0)) is not None:
                    client.sent(0)
                    self.shard.on_message(worker, change(message) if worker == 0 else message)
                    moved = True
                while (answer := self.shard.next(worker)) is not None:
                    self.shard.sent(worker)
                    client.on_message(0, answer)
                    moved = True

    def push(self, worker: int, keys: list[int]) -> int:
        rows = np.ones(len(keys), "float32").tobytes()
        return self.clients[worker].push_rows(
            self.table, np.array(keys, np.uint64).tobytes(), rows, 0, False, False
        )


HEADER = 72  # bytes, core/store/message.h; then KeysHead: count, form, digest
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "no head": lambda m: m[:HEADER],
    "half a head": lambda m: m[: HEADER + 10],
    "more keys than there are": lambda m: (
        m[:HEADER] + struct.pack("<I", 2**32 - 1) + m[HEADER + 4 :]
    ),
    "fewer keys": lambda m: m[:HEADER] + struct.pack("<I", 1) + m[HEADER + 4 :],
    "an unknown form": lambda m: m[: HEADER + 4] + struct.pack("<I", 9) + m[HEADER + 8 :],
    "out of order": lambda m: (
        (m[: HEADER + 24] + m[HEADER + 32 : HEADER + 40] + m[HEADER + 24 : HEADER + 32])
        + m[HEADER + 40 :]
    ),
    "a key twice": lambda m: m[: HEADER + 32] + m[HEADER + 24 : HEADER + 32] + m[HEADER + 40 :],
    "a row missing": lambda m: m[:-4],
    "half a number": lambda m: m[:-1],
    "rows too many": lambda m: m + bytes(4),
}


@pytest.mark.parametrize("staleness", [0, 1, -1])
@pytest.mark.parametrize("how", BROKEN)
def test_a_push_that_is_refused_does_not_stop_what_follows(how, staleness):
    """It is an error of that call, counts as an empty one, and changes no row."""
    machines = Machines(staleness)
    change = BROKEN[how]
    bad = machines.push(0, [1, 2])
    later = machines.push(0, [3])
    pushed = [bad]

    def once(message: bytes) -> bytes:
        return change(message) if pushed and not pushed.clear() else message

    machines.move(once)
    machines.push(1, [1])
    machines.push(1, [3])
    machines.move()
    client = machines.clients[0]

    assert client.done(bad) and client.refused(bad)
    assert client.done(later) and not client.refused(later)
    assert client.flushed() and client.clock(machines.table) == 2
    keys, rows = machines.shard.rows(machines.table)
    found = dict(
        zip(np.frombuffer(keys, np.uint64).tolist(), np.frombuffer(rows, "float32"), strict=True)
    )
    assert found == {1: 1.0, 3: 2.0}
    machines.shard.compare(machines.replay)
    assert machines.replay.report().endswith("equal")


def test_half_a_number_on_a_narrow_wire():
    machines = Machines(-1, wire=8)
    bad = machines.push(0, [1, 2])
    machines.move(lambda message: message[:-1])

    assert machines.clients[0].refused(bad) and machines.shard.rows(machines.table) == (b"", b"")


def test_nan_is_a_value_where_it_is_not_rejected(stores):
    """Without reject_nan it is a value like others."""
    (e,) = stores(1).rows("e", 1)

    assert np.isnan(e.push_pull([1, 1], np.array([np.inf, -np.inf], "float32"))).all()
