# SPDX-License-Identifier: Apache-2.0
"""commute.init: from a process of a job to a Group.

    environment  which launcher started me, my rank, how many there are
    rendezvous   where the coordinator is (rank 0 starts it where no launcher of ours did)
    join         become a member, learn who the others are
    _member      engine + health thread + wiring = Group

Settings come from arguments first, then from COMMUTE_*; nothing else reads the environment.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING

from commute import _core
from commute._errors import JoinError
from commute._runner import Peer, Runner
from commute._settings import Settings
from commute._wiring import ReadyWiring
from commute.group import Group

if TYPE_CHECKING:
    from commute.cluster.environment import Place
    from commute.store.links import StoreLinks

_log = logging.getLogger("commute")


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
    token: str | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    name: str = "world",
    timeout: float | None = None,
    peer_timeout: float | None = None,
    join_timeout: float | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    records: str | None = None,
    shared_memory: bool | None = None,
) -> Group:
    """Join the job this process belongs to; returns when all its ranks have joined.

    Without arguments the place comes from `commute run`, torchrun, Open MPI, MPICH or Intel MPI,
    PMIx, or a Slurm step; with none of them the process is a world of its own.

    >>> import commute
    >>> with commute.init() as world:
    ...     world.rank, world.size
    (0, 1)

    Args:
        rank, size, coordinator, token: the place, given by hand; rank 0 starts the coordinator at
            "host:port" and all ranks pass the same token.
        local_rank, local_size: the place among the ranks of this host.
        name: of the world; a process may be in several.
        timeout: seconds after which an operation is given up (1800; COMMUTE_TIMEOUT).
        peer_timeout: seconds of silence after which a rank is lost (5; COMMUTE_PEER_TIMEOUT).
        join_timeout: seconds to wait for all ranks (300; COMMUTE_JOIN_TIMEOUT).
        bind, advertise: an address or interface; where links listen, what others are told.
        shared_memory: use it between ranks of one host where it can be had (True;
            COMMUTE_SHARED_MEMORY=0 turns it off).
        records: the folder of the recorder's dumps (COMMUTE_RECORDS; the temporary folder).

    Raises:
        JoinError: the environment is incomplete, or not all ranks came; says what is missing.
        AuthenticationError: the token is wrong.
    """
    from commute.cluster.environment import detect  # here, so that `import commute` is quick

    place = detect(
        os.environ,
        rank=rank,
        size=size,
        coordinator=coordinator,
        token=token or _token_of_file(),
        local_rank=local_rank,
        local_size=local_size,
    )
    settings = Settings(
        timeout, peer_timeout, join_timeout, bind, advertise, records, shared_memory
    )
    _log.info("%s", place.describe())
    group = _alone(place, name, settings) if place.size == 1 else _member(place, name, settings)
    atexit.register(group._close_at_exit)
    return group


def _token_of_file() -> str | None:
    if not os.environ.get("COMMUTE_TOKEN_FILE"):
        return None
    from commute.cluster.auth import read_token

    return read_token(os.environ)


def _member(place: Place, name: str, settings: Settings) -> Group:
    from commute._member import member_group

    return member_group(place, name, settings)


def _alone(place: Place, name: str, settings: Settings) -> Group:
    engine = _core.Engine(0, 1, 0, 1)
    host = os.uname().nodename
    runner = Runner(
        lambda: engine,
        0,
        [Peer(0, host, os.getpid())],
        records=(settings.records, f"commute-alone-rank0-{os.getpid()}"),
    )

    def stores(group: Group) -> StoreLinks:
        # Alone, a store needs no server: its shard is run by whoever calls.
        if not settings.servers and not settings.remote_servers:
            from commute.store.links import Embedded

            return Embedded(settings.replays)
        from commute.store.gather import Invitation, gather

        if place.coordinator is None or place.token is None:
            raise JoinError("servers were asked for; start this program with `commute run -n 1`")
        return gather(group, Invitation(place.coordinator, place.token, place.run, name, settings))

    wiring = ReadyWiring(
        "loopback", stores, lambda identity, rank: _core.Engine(rank, 1, identity.tag, 1)
    )
    return Group(runner, wiring, rank=0, size=1, host=host, timeout=settings.timeout)
