# SPDX-License-Identifier: Apache-2.0
"""The process of `commute serve`: shards of the core, and a reception for their clients.

The shards are threads of the core; this thread runs the reception's event loop, which never
touches a value. It ends by Ctrl-C or SIGTERM: clients are told, and what the tables held is gone.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from commute import _core
from commute._errors import JoinError
from commute._version import __version__
from commute.cluster.addresses import (
    format_address,
    interface_address,
    is_loopback,
    is_wildcard,
)
from commute.cluster.observers import Place
from commute.cluster.reception import Reception
from commute.store import status
from commute.store.links import SLOTS, replay_of

__all__ = ["Serving", "serve"]

# After the last word to the clients, the time it may take to reach them.
FLUSH_SECONDS: Final = 0.3


@dataclass(frozen=True)
class Serving:
    """What `commute serve` was asked for.

    Attributes:
        token_source: where clients find the token, as they would write it in Python.
        bind: an address or interface; advertise: what clients are told to dial.
    """

    token: str
    token_source: str
    port: int
    shards: int
    bind: str = "127.0.0.1"
    advertise: str | None = None


def serve(asked: Serving) -> int:
    """Serve until a signal comes; returns the exit code, 130 after Ctrl-C."""
    _raise_file_limit()
    _core.keep_memory()
    replay, report = replay_of(os.environ.get("COMMUTE_REPLAYS"))
    server = _core.StoreServer(0, 0, asked.shards, asked.shards, SLOTS, False, replay)
    try:
        return asyncio.run(_serve(asked, server))
    finally:
        server.close()
        report("serve")


def _raise_file_limit() -> None:
    # Each client needs a descriptor for itself and some for each of its channels.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(asked: Serving, server: _core.StoreServer) -> int:
    began = time.monotonic()
    place = Place(
        secrets.randbits(32), secrets.token_hex(16), asked.shards, socket.gethostname(), os.getpid()
    )
    told = ""

    def tell_status() -> bytes:
        return msgspec.msgpack.encode(
            status.made(
                _core.status_of_server(server),
                reception.machine.present,
                place,
                now=time.monotonic(),
                began=began,
                address=told,
                version=__version__,
                refused=reception.refused,
            )
        )

    reception = Reception(asked.token, place, server, status=tell_status, log=_log)
    host, port = await _listen(reception, asked)
    told = format_address(_told(asked, host), port)
    ended = _on_signals()
    _say(asked, told)
    number = await ended
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    _log(f"{name}: the server ends")
    await reception.close(f"it was ended by {name}")
    await asyncio.sleep(FLUSH_SECONDS)
    return 130 if number == signal.SIGINT else 0


async def _listen(reception: Reception, asked: Serving) -> tuple[str, int]:
    try:
        return await reception.start(interface_address(asked.bind), asked.port)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        where = format_address(asked.bind, asked.port)
        raise JoinError(
            f"cannot listen on {where}: {why.lower()}; choose another --port or --bind, or ask"
            f" who is there with `commute status {where}`"
        ) from None


def _told(asked: Serving, bound: str) -> str:
    if asked.advertise:
        return interface_address(asked.advertise)
    return socket.gethostname() if is_wildcard(bound) else bound


def _on_signals() -> asyncio.Future[int]:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def take(number: int) -> Callable[[], None]:
        return lambda: None if ended.done() else ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, take(number))
    return ended


def _say(asked: Serving, told: str) -> None:
    shards = f"{asked.shards} shard{'s' * (asked.shards != 1)}"
    print(f"commute serve: listening on {told}, pid {os.getpid()}, {shards}")
    print(f"connect with:  commute.connect({told!r}, {asked.token_source})", flush=True)
    if not is_loopback(told.rpartition(":")[0].strip("[]")):
        _log("other machines can reach it: they need the token, but the data is not encrypted")


def _log(line: str) -> None:
    # Nobody may be reading any more; a line that cannot be shown is no reason to stop.
    try:
        now = time.strftime("%H:%M:%S")
        print(f"{now} {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
