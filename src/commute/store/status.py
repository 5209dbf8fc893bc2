# SPDX-License-Identifier: Apache-2.0
"""What a server of `commute serve` tells of itself: as data, and as text for a terminal. Pure.

Status      the server            StoreStatus    a store, by name
TableRow    one table             ClientRow      one client
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from commute import _core
from commute._errors import JoinError
from commute.cluster.observers import Observer, Place
from commute.store.links import SLOTS

__all__ = ["ClientRow", "Status", "StoreStatus", "TableRow", "as_text", "decode", "made"]

_DECLARED: Final = re.compile(r"(\w+) (\([\d, ]*\))")
_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


class TableRow(msgspec.Struct, frozen=True):
    """A table.

    Attributes:
        kind, shape: from its declaration; shape is "" where it has none.
        staleness: None for unbounded; -1 is never told.
        bytes, state_bytes: of the value, and of the update's state; of rows all their memory.
        rows: of a sparse table.
        updates: how many contributions, or rounds, its most changed part holds.
        slots: how many parts each shard holds, by the shard's number.
        clocks: of the members, by rank; observers have none.
        whole: all its parts have been made.
    """

    name: str
    kind: str
    shape: str
    dtype: str
    update: str
    staleness: int | None
    bytes: int
    state_bytes: int
    updates: int
    slots: dict[str, int]
    clocks: dict[str, int]
    whole: bool
    rows: int | None = None


class StoreStatus(msgspec.Struct, frozen=True):
    name: str
    tables: tuple[TableRow, ...]


class ClientRow(msgspec.Struct, frozen=True):
    """A client that is connected; messages and bytes are those it has sent."""

    number: int
    host: str
    pid: int
    connected_s: float
    messages: int
    bytes: int


class Status(msgspec.Struct, frozen=True):
    """A server; pushes are all that were taken, refused are connections that were not let in."""

    address: str
    host: str
    pid: int
    version: str
    uptime_s: float
    shards: int
    slots: int
    pushes: int
    refused: int
    stores: tuple[StoreStatus, ...]
    clients: tuple[ClientRow, ...]


def made(
    shards: Sequence[_core.ShardStatus],
    observers: Sequence[Observer],
    place: Place,
    *,
    now: float,
    began: float,
    address: str,
    version: str,
    refused: int,
) -> Status:
    """The status, from what the shards and the reception know."""
    stores: dict[str, list[TableRow]] = {}
    entries = [entry for shard in shards for entry in shard.directory]
    for entry in sorted(entries, key=lambda entry: entry.table):
        store, _, table = entry.name.partition("/")
        stores.setdefault(store, []).append(_row(table, entry, shards))
    return Status(
        address=address,
        host=place.host,
        pid=place.pid,
        version=version,
        uptime_s=round(now - began, 1),
        shards=place.shards,
        slots=SLOTS,
        pushes=sum(shard.pushes for shard in shards),
        refused=refused,
        stores=tuple(StoreStatus(name, tuple(rows)) for name, rows in sorted(stores.items())),
        clients=tuple(_client(observer, shards, now) for observer in observers),
    )


def _row(name: str, entry: _core.TableEntry, shards: Sequence[_core.ShardStatus]) -> TableRow:
    parts = {
        number: shard.tables[entry.table]
        for number, shard in enumerate(shards)
        if entry.table in shard.tables
    }
    first = next(iter(parts.values()), None)
    declared = _DECLARED.match(entry.declaration)
    kind = entry.declaration.partition(" ")[0]
    clocks: dict[str, int] = {}
    for part in parts.values():
        for rank, clock in part.clocks.items():
            clocks[str(rank)] = min(clock, clocks.get(str(rank), clock))
    return TableRow(
        name=name,
        kind=kind,
        shape=declared[2] if declared else "",
        dtype=first.dtype if first else "",
        update=first.update if first else "",
        staleness=None if first is None or first.staleness < 0 else first.staleness,
        bytes=sum(part.bytes for part in parts.values()),
        state_bytes=sum(part.state_bytes for part in parts.values()),
        updates=max((part.updates for part in parts.values()), default=0),
        slots={str(shard): part.slots for shard, part in parts.items()},
        clocks=clocks,
        whole=sum(part.bytes for part in parts.values()) >= entry.bytes,
        rows=sum(part.rows for part in parts.values()) if kind == "sparse" else None,
    )


def _client(observer: Observer, shards: Sequence[_core.ShardStatus], now: float) -> ClientRow:
    channels = [
        channel
        for shard in shards
        for channel in shard.clients
        if channel.worker == observer.number
    ]
    return ClientRow(
        number=observer.number,
        host=observer.host,
        pid=observer.pid,
        connected_s=round(now - observer.since, 1),
        messages=sum(channel.messages for channel in channels),
        bytes=sum(channel.bytes for channel in channels),
    )


def decode(body: bytes, address: str) -> Status:
    """What a server answered; raises JoinError."""
    try:
        return msgspec.msgpack.decode(body, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JoinError(
            f"the server at {address} tells its status in another form ({error}); it may run"
            " another version of commute"
        ) from None


# ---- as text ----


def as_text(status: Status) -> str:
    """For a terminal: the server, its tables, its clients."""
    lines = [
        f"commute {status.version} at {status.address}: pid {status.pid} on {status.host}, up"
        f" {span(status.uptime_s)}, {_count(status.shards, 'shard')}, {status.slots} slots,"
        f" {_count(status.pushes, 'push', 'pushes')}",
        "",
    ]
    rows = [_table_cells(store.name, row) for store in status.stores for row in store.tables]
    if rows:
        heads = ("store", "table", "kind", "shape", "update", "staleness", "bytes", "updates")
        lines += grid((*heads, "slots", "clocks"), rows)
    else:
        lines.append("no tables yet")
    lines.append("")
    if status.clients:
        lines += grid(("client", "host", "pid", "since", "messages", "bytes"), _clients(status))
    else:
        lines.append("no clients")
    return "\n".join(lines)


def _table_cells(store: str, row: TableRow) -> tuple[str, ...]:
    size = human(row.bytes) + (f" + {human(row.state_bytes)}" if row.state_bytes else "")
    size += "" if row.rows is None else f" in {row.rows} rows"
    slots = " ".join(f"{shard}:{count}" for shard, count in row.slots.items())
    clocks = " ".join(f"{rank}:{clock}" for rank, clock in row.clocks.items())
    return (
        store,
        row.name,
        row.kind,
        f"{row.shape} {row.dtype}".strip(),
        row.update,
        str(row.staleness),
        size if row.whole else "being made",
        str(row.updates),
        slots or "-",
        clocks or "-",
    )


def _clients(status: Status) -> list[tuple[str, ...]]:
    return [
        (
            str(client.number),
            client.host,
            str(client.pid),
            span(client.connected_s),
            str(client.messages),
            human(client.bytes),
        )
        for client in status.clients
    ]


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, two spaces apart; letters of others made visible."""
    cells = [[_visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *cells)
    ]


def _visible(text: str) -> str:
    # Names come from clients: no escape sequence of theirs reaches a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def human(count: int) -> str:
    """A number of bytes in three digits."""
    size = float(count)
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"


def span(seconds: float) -> str:
    """A time in its two largest units."""
    whole = int(seconds)
    for unit, long, next_unit, short in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= long:
            return f"{whole // long} {unit} {whole % long // short} {next_unit}"
    return f"{whole // 60} m {whole % 60} s" if whole >= 60 else f"{whole} s"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
