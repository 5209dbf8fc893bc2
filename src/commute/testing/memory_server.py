# SPDX-License-Identifier: Apache-2.0
"""A store's server in the process of its workers, for groups whose ranks are threads."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

from commute import _core
from commute.store.links import SLOTS, StoreLinks, replay_of

if TYPE_CHECKING:
    from commute.group import Group

__all__ = ["MemoryServer"]


class MemoryServer:
    """Made when the first rank opens a store, gone when all have left it."""

    def __init__(self, workers: int, shards: int = 2) -> None:
        self._workers = workers
        self._shards = shards
        self._lock = threading.Lock()
        self._server: _core.StoreServer | None = None
        self._gone_count = 0

    def links(self, group: Group) -> StoreLinks:
        """The links of one rank."""
        rank = group.rank  # the links must not keep the group
        endpoint = _core.StoreEndpoint(rank, self._shards)
        with self._lock:
            if self._server is None:
                replay, self._report = replay_of(os.environ.get("COMMUTE_REPLAYS"))
                self._server = _core.StoreServer(
                    self._workers, 0, self._shards, self._shards, SLOTS, False, replay
                )
            server = self._server

        def connect(shard: int) -> bool:
            ours, theirs = socket.socketpair()
            segment = _core.channel_segment()
            server.add_channel(shard, theirs.detach(), os.dup(segment))
            endpoint.add_channel(shard, ours.detach(), segment)
            return True

        for shard in range(self._shards):
            connect(shard)
        return StoreLinks(
            endpoint,
            rank,
            mend=connect,
            where=lambda shard: f"shard {shard}",
            on_close=lambda well, lost: self._gone(rank, well),
        )

    def _gone(self, rank: int, well: bool) -> None:
        with self._lock:
            assert self._server is not None
            (self._server.on_left if well else self._server.on_lost)(rank)
            self._gone_count += 1
            if self._gone_count < self._workers:
                return
            server, self._server = self._server, None
        server.close()
        self._report(f"memory{id(self)}")
