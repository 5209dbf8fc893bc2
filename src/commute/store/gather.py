# SPDX-License-Identifier: Apache-2.0
"""Gathering a store's processes: servers are started, all join a world of their own, workers dial.

The first store of a group does this, on all its ranks:

    agree     how many servers each host starts, how many shards each has, which are started
              elsewhere (by an allgather)
    start     local rank 0 of every host starts its servers, each a session of its own
    join      workers and servers form the world "<name>/store": workers keep their ranks, servers
              follow. The coordinator watches them, and tells who leaves and who is lost
    dial      every worker opens a channel to every shard, through shared memory where that works

Servers end by themselves: when every worker has left or is lost, or when the coordinator and all
channels are gone. Whoever started one waits for its end when it closes its group.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from commute import _core
from commute._cores import usable_cores
from commute._errors import CommuteError, JoinError, MismatchError
from commute._runner import GOODBYE_SECONDS
from commute._settings import Settings
from commute.cluster.connector import Connector
from commute.cluster.join import Membership, join
from commute.store.links import StoreLinks
from commute.store.start import ServerProcess, start_server

if TYPE_CHECKING:
    from commute.group import Group

__all__ = ["Invitation", "gather", "store_world"]

CHANNEL_SECONDS: Final = 30.0
MEND_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Invitation:
    """How a rank of a group, and the servers it starts, find the coordinator."""

    coordinator: str
    token: str
    run: str
    world: str
    settings: Settings


@dataclass(frozen=True)
class _Layout:
    """Who is where in the store's world; the same on all ranks."""

    workers: int
    servers_per_host: int
    leaders: tuple[int, ...]  # ranks that start servers
    remote: int
    shards: int  # of each server

    @property
    def servers(self) -> int:
        return self.servers_per_host * len(self.leaders) + self.remote

    @property
    def size(self) -> int:
        return self.workers + self.servers

    def started_by(self, rank: int) -> range:
        """The ranks of the servers that this worker starts."""
        if rank not in self.leaders:
            return range(0)
        first = self.workers + self.leaders.index(rank) * self.servers_per_host
        return range(first, first + self.servers_per_host)

    def server_of(self, shard: int) -> int:
        return self.workers + shard // self.shards


def store_world(world: str) -> str:
    """The name of the world in which the stores of a group meet their servers."""
    return f"{world}/store"


def gather(group: Group, invitation: Invitation) -> StoreLinks:
    """Start, join, dial; all ranks of the group call this."""
    layout = _agree(group, invitation.settings)
    hot = group.local_size + layout.servers_per_host * layout.shards
    may_spin = usable_cores() >= hot
    children = [
        _start(rank, layout, invitation, may_spin=may_spin)
        for rank in layout.started_by(group.rank)
    ]
    try:
        membership, connector = _join(group, layout, invitation, children)
    except BaseException:
        for child in children:
            child.kill()
            child.wait()
        raise
    links = _Gathered(layout, membership, connector, children, invitation).links
    links.endpoint.may_spin(may_spin)
    return links


def _agree(group: Group, settings: Settings) -> _Layout:
    servers = 1 if settings.servers is None else settings.servers
    spare = 1 if settings.remote_servers else usable_cores() - group.local_size
    shards = settings.shards or max(1, spare)
    mine = [group.local_rank == 0, servers, settings.remote_servers, shards]
    everyone = group.allgather(np.array(mine, dtype=np.int64))
    for what, column in (("COMMUTE_SERVERS", 1), ("COMMUTE_REMOTE_SERVERS", 2)):
        if len(set(everyone[:, column].tolist())) > 1:
            raise MismatchError(f"the ranks have different {what}: {everyone[:, column].tolist()}")
    leaders = tuple(np.flatnonzero(everyone[:, 0]).tolist())
    layout = _Layout(group.size, servers, leaders, settings.remote_servers, int(everyone[0, 3]))
    if layout.servers == 0:
        raise JoinError("a store needs a server: start with --servers 1 or more")
    return layout


def _start(rank: int, layout: _Layout, invitation: Invitation, *, may_spin: bool) -> ServerProcess:
    settings = invitation.settings
    given = ["--coordinator", invitation.coordinator, "--run", invitation.run]
    given += ["--world", invitation.world, "--rank", str(rank), "--size", str(layout.size)]
    given += ["--workers", str(layout.workers), "--shards", str(layout.shards)]
    given += ["--peer-timeout", str(settings.peer_timeout)]
    given += ["--join-timeout", str(settings.join_timeout)]
    given += ["--may-spin"] if may_spin else []
    for flag, value in (("--bind", settings.bind), ("--advertise", settings.advertise)):
        given += [flag, value] if value else []
    return start_server(given, invitation.token)


def _join(
    group: Group,
    layout: _Layout,
    invitation: Invitation,
    children: list[ServerProcess],
) -> tuple[Membership, Connector]:
    def check() -> None:
        group._runner.check()
        for child in children:
            if child.poll() is not None:
                raise JoinError(
                    f"a server of the store ended (exit code {child.returncode}) before it had"
                    " joined; what it printed is above"
                )

    settings = invitation.settings
    return join(
        group.rank,
        layout.size,
        group.local_rank,
        group.local_size,
        invitation.coordinator,
        invitation.token,
        invitation.run,
        name=store_world(invitation.world),
        join_timeout=settings.join_timeout,
        peer_timeout=settings.peer_timeout,
        bind=settings.bind,
        advertise=settings.advertise,
        check=check,
    )


class _Gathered:
    """The processes of a store as one worker sees them."""

    def __init__(
        self,
        layout: _Layout,
        membership: Membership,
        connector: Connector,
        children: list[ServerProcess],
        invitation: Invitation,
    ) -> None:
        self._layout = layout
        self._members = {member.rank: member for member in membership.members}
        self._connector = connector
        self._children = children
        self._shared = invitation.settings.shared_memory
        shards = layout.servers * layout.shards
        self._endpoint = _core.StoreEndpoint(membership.rank, shards)
        self._health = _core.watch_endpoint(
            self._endpoint, membership.rank, layout.workers, invitation.settings.peer_timeout
        )
        self._health.add(membership.coordinator_fd, -1)
        self.links = StoreLinks(
            self._endpoint,
            membership.rank,
            mend=self._mend,
            where=self._where,
            on_close=self._close,
        )
        try:
            for shard in range(shards):
                self._dial(shard, CHANNEL_SECONDS)
        except BaseException:
            self.links.close(well=False)
            raise

    def _dial(self, shard: int, seconds: float) -> None:
        server = self._layout.server_of(shard)
        found = self._connector.open_channel(
            server,
            shard,
            time.monotonic() + seconds,
            _core.channel_segment if self._shared else None,
        )
        self._endpoint.add_channel(shard, found.socket, found.segment)

    def _mend(self, shard: int) -> bool:
        try:
            self._dial(shard, MEND_SECONDS)
        except (CommuteError, OSError):
            return False  # it will be tried again, until the coordinator says that the server died
        return True

    def _where(self, shard: int) -> str:
        """A shard in words; a server by -1 - its rank."""
        rank = self._layout.server_of(shard) if shard >= 0 else -1 - shard
        member = self._members[rank]
        server = f"server {rank - self._layout.workers} (pid {member.pid} on {member.host})"
        if shard < 0 or self._layout.shards == 1:
            return server
        return f"shard {shard % self._layout.shards} of {server}"

    def _close(self, well: bool, lost: bool) -> None:
        self._health.close(not well, "" if well else "it failed", GOODBYE_SECONDS)
        self._connector.close()
        if lost:
            # A store without some of its slots is of no use, and a server that is stopped, or
            # hangs, would never end.
            for child in self._children:
                child.kill()
        elif not well:
            return
        # They serve until the last worker has left; a process that holds slots stays that long.
        for child in self._children:
            with contextlib.suppress(KeyboardInterrupt):
                child.wait()
