# SPDX-License-Identifier: Apache-2.0
"""What a server tells of itself: from what shards know to data, and to text."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from commute._errors import JoinError
from commute.cluster.observers import Observer, Place
from commute.store.status import Status, as_text, decode, grid, human, made, span


def part(slots: int, bytes: int, **more: Any) -> SimpleNamespace:
    plain = {"state_bytes": 0, "updates": 0, "dtype": "float32", "update": "sum", "staleness": -1}
    return SimpleNamespace(**{"slots": slots, "bytes": bytes, "clocks": {}, **plain, **more})


def entry(table: int, name: str, declaration: str, bytes: int) -> SimpleNamespace:
    return SimpleNamespace(table=table, name=name, declaration=declaration, bytes=bytes)


def example() -> Status:
    channel = SimpleNamespace(worker=3, messages=5, bytes=2000)
    shards: list[Any] = [
        SimpleNamespace(
            tables={0: part(2, 800, updates=4, update="Adam(lr=0.1)", state_bytes=1600)},
            directory=[
                entry(1, "b/w", "dense () float32 with sum, staleness 2", 4),
                entry(0, "a/x/y", "dense (100, 4) float32 with Adam(lr=0.1)", 1600),
                entry(2, "a/late", "dense (9,) int64 with sum", 72),
            ],
            clients=[channel, SimpleNamespace(worker=4, messages=1, bytes=1)],
            pushes=7,
        ),
        SimpleNamespace(
            tables={
                0: part(2, 800, updates=3, clocks={0: 3, 1: 5}),
                1: part(1, 4, staleness=2, clocks={0: 4}),
            },
            directory=[],
            clients=[channel],
            pushes=3,
        ),
    ]
    return made(
        shards,
        [Observer(3, 1, "laptop\x1b[2J", 42, since=90.0, heard=99.0)],
        Place(7, "w", 2, "hosta", 1),
        now=100.0,
        began=10.0,
        address="127.0.0.1:7077",
        version="0.1.0",
        refused=2,
    )


def test_tables_are_put_together() -> None:
    """Of all shards, by store; a name may have a slash behind the store's."""
    first, second = example().stores
    late, x = sorted(first.tables, key=lambda row: row.name)

    assert (first.name, second.name) == ("a", "b")
    assert (x.name, x.shape, x.bytes, x.state_bytes) == ("x/y", "(100, 4)", 1600, 1600)
    assert (x.updates, x.slots, x.clocks, x.whole) == (4, {"0": 2, "1": 2}, {"0": 3, "1": 5}, True)
    assert x.staleness is None and second.tables[0].staleness == 2
    assert second.tables[0].shape == "()"
    assert (late.bytes, late.whole, late.slots) == (0, False, {})


def test_clients_and_counts() -> None:
    """A client's channels together; those of others not."""
    status = example()
    (client,) = status.clients

    assert (status.pushes, status.uptime_s, status.refused) == (10, 90.0, 2)
    assert (client.number, client.messages, client.bytes, client.connected_s) == (3, 10, 4000, 10.0)


def test_the_wire() -> None:
    """What arrives is what was told; anything else is one sentence."""
    status = example()

    assert decode(msgspec.msgpack.encode(status), "h:1") == status
    with pytest.raises(JoinError, match="another form"):
        decode(b"\xc0", "h:1")


def test_text() -> None:
    """One line per table and client, and no escape sequence of a client's."""
    text = as_text(example())
    lines = text.splitlines()

    assert lines[0].startswith("commute 0.1.0 at 127.0.0.1:7077: pid 1 on hosta, up 1 m 30 s, 2")
    assert "10 pushes" in lines[0]
    assert any("x/y" in line and "1.6 KB + 1.6 KB" in line and "0:2 1:2" in line for line in lines)
    assert any("late" in line and "being made" in line for line in lines)
    assert any(line.startswith("3       laptop?[2J") for line in lines)
    assert "\x1b" not in text


def test_an_empty_server() -> None:
    """Says so."""
    nobody = msgspec.structs.replace(example(), stores=(), clients=())

    assert as_text(nobody).splitlines()[1:] == ["", "no tables yet", "", "no clients"]


def test_words() -> None:
    """Numbers as people read them."""
    assert grid(("a", "b"), [("1", "22"), ("333", "4")]) == ["a    b", "1    22", "333  4"]
    assert [human(n) for n in (0, 999, 1000, 1 << 20, 15 << 30)] == [
        *("0 B", "999 B", "1.0 KB", "1.0 MB", "15 GB")
    ]
    assert [span(s) for s in (0.4, 61, 3700, 90_000)] == ["0 s", "1 m 1 s", "1 h 1 m", "1 d 1 h"]
