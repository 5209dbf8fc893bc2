# SPDX-License-Identifier: Apache-2.0
"""commute.init: from a process of a job to a Group.

    environment  which launcher started me, my rank, how many there are
    rendezvous   where the coordinator is (rank 0 starts it where no launcher of ours did)
    join         become a member, learn who the others are
    here         engine + health thread + wiring = Group

Settings come from arguments first, then from COMMUTE_*; nothing else reads the environment.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from dataclasses import replace

from commute import _core
from commute._errors import JoinError
from commute._group import Group
from commute._runner import Peer, Runner
from commute._wiring import ReadyWiring, TcpWiring
from commute.cluster.connector import Connector
from commute.cluster.environment import Place, detect
from commute.cluster.join import Membership, join
from commute.cluster.rendezvous import find_coordinator

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
        records: the folder of the recorder's dumps (COMMUTE_RECORDS; the temporary folder).

    Raises:
        JoinError: the environment is incomplete, or not all ranks came; says what is missing.
        AuthenticationError: the token is wrong.
    """
    place = detect(
        os.environ,
        rank=rank,
        size=size,
        coordinator=coordinator,
        token=token,
        local_rank=local_rank,
        local_size=local_size,
    )
    settings = _Settings(timeout, peer_timeout, join_timeout, bind, advertise, records)
    _log.info("%s", place.describe())
    group = _alone(settings) if place.size == 1 else _member(place, name, settings)
    atexit.register(_close_at_exit, weakref.ref(group))
    return group


class _Settings:
    """Arguments first, then COMMUTE_*, then the default."""

    def __init__(
        self,
        timeout: float | None,
        peer_timeout: float | None,
        join_timeout: float | None,
        bind: str | None,
        advertise: str | None,
        records: str | None,
    ) -> None:
        self.timeout = _seconds("timeout", timeout, 1800.0)
        self.peer_timeout = _seconds("peer_timeout", peer_timeout, 5.0)
        self.join_timeout = _seconds("join_timeout", join_timeout, 300.0)
        self.bind = bind or os.environ.get("COMMUTE_BIND")
        self.advertise = advertise or os.environ.get("COMMUTE_ADVERTISE")
        self.records = records or os.environ.get("COMMUTE_RECORDS")


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


def _alone(settings: _Settings) -> Group:
    engine = _core.Engine(0, 1, 0, 1)
    host = os.uname().nodename
    runner = Runner(
        engine,
        0,
        [Peer(0, host, os.getpid())],
        records=(settings.records, f"commute-alone-rank0-{os.getpid()}"),
    )
    return Group(
        runner, ReadyWiring("tcp"), rank=0, size=1, host=host, timeout=settings.timeout
    )


def _member(place: Place, name: str, settings: _Settings) -> Group:
    deadline = time.monotonic() + settings.join_timeout
    address, token = find_coordinator(place, name, deadline)
    place = replace(place, coordinator=address, token=token)
    membership, connector = join(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        address,
        token,
        place.run,
        name=name,
        join_timeout=max(0.1, deadline - time.monotonic()),
        peer_timeout=settings.peer_timeout,
        bind=settings.bind,
        advertise=settings.advertise,
    )
    return assemble(membership, connector, settings.timeout, settings.peer_timeout, settings.records)


def assemble(
    membership: Membership,
    connector: Connector,
    timeout: float,
    peer_timeout: float,
    records: str | None,
) -> Group:
    """The group of a member: engine, health thread, wiring."""
    engine = _core.Engine(membership.rank, membership.size, 0, membership.epoch)
    health = _core.watch(engine, membership.rank, peer_timeout)
    health.add(membership.coordinator_fd, -1)
    name = f"commute-{membership.run}-{membership.name}-rank{membership.rank}-{os.getpid()}"
    runner = Runner(
        engine,
        membership.rank,
        [Peer(member.rank, member.host, member.pid) for member in membership.members],
        health=health,
        records=(records, name.replace("/", "_")),
    )
    return Group(
        runner,
        TcpWiring(engine, health, connector),
        rank=membership.rank,
        size=membership.size,
        local_rank=membership.local_rank,
        local_size=membership.local_size,
        host=membership.host,
        timeout=timeout,
    )


def _close_at_exit(reference: weakref.ref[Group]) -> None:
    """A program that ends without closing still says goodbye, and whether it failed."""
    group = reference()
    if group is None:
        return
    # Set by the interpreter when it has printed an exception that nobody caught.
    error = getattr(sys, "last_value", None)
    group._close(f"it ended with {type(error).__name__}: {error}" if error is not None else "")
