# SPDX-License-Identifier: Apache-2.0
"""The settings of a world: arguments first, then COMMUTE_*, then the default."""

from __future__ import annotations

import os

from commute._errors import JoinError


class Settings:
    """Arguments first, then COMMUTE_*, then the default."""

    def __init__(
        self,
        timeout: float | None,
        peer_timeout: float | None,
        join_timeout: float | None,
        bind: str | None,
        advertise: str | None,
        records: str | None,
        shared_memory: bool | None,
    ) -> None:
        self.timeout = _seconds("timeout", timeout, 1800.0)
        self.peer_timeout = _seconds("peer_timeout", peer_timeout, 5.0)
        self.join_timeout = _seconds("join_timeout", join_timeout, 300.0)
        self.bind = bind or os.environ.get("COMMUTE_BIND")
        self.advertise = advertise or os.environ.get("COMMUTE_ADVERTISE")
        self.records = records or os.environ.get("COMMUTE_RECORDS")
        self.shared_memory = _switch("shared_memory", shared_memory)
        # Of stores: servers per host, by default one; shards per server; servers started by hand.
        self.servers = _whole("COMMUTE_SERVERS")
        self.shards = _whole("COMMUTE_SHARDS")
        self.remote_servers = _whole("COMMUTE_REMOTE_SERVERS") or 0
        self.replays = os.environ.get("COMMUTE_REPLAYS")  # a folder; for tests


def _switch(name: str, given: bool | None) -> bool:
    variable = f"COMMUTE_{name.upper()}"
    text = os.environ.get(variable, "1")
    if given is None and text not in ("0", "1"):
        raise JoinError(f"expected {variable} to be 0 or 1, got {text!r}")
    return text == "1" if given is None else given


def _whole(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal():
        raise JoinError(f"expected {variable} to be a whole number, got {text!r}")
    return int(text)


def _seconds(name: str, given: float | None, default: float) -> float:
    variable = f"COMMUTE_{name.upper()}"
    text = os.environ.get(variable)
    source = f"{name}=" if given is not None else variable
    try:
        value = float(given if given is not None else text or default)
    except (TypeError, ValueError):
        value = -1.0
    if not value > 0:
        raise JoinError(f"expected {source} to be seconds above 0, got {given or text!r}")
    return value
