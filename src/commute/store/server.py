# SPDX-License-Identifier: Apache-2.0
"""A server process of a job's stores: some shards, each a thread of the core.

    python -m commute.store.server --coordinator HOST:PORT --run RUN --rank R --size S --workers W
    COMMUTE_TOKEN   the job's token
    exit            0 when every worker has left or is lost, or the job is gone; 1 when it could not
                    join

Local rank 0 of each host starts its servers this way; by hand it is for servers on hosts without
workers (see docs/parameter-server.md). Members of the world: workers 0 to W - 1, servers W to
S - 1. This thread only waits; the shards' threads serve, and the health thread tells them who
leaves and who is lost.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from commute import _core
from commute._errors import CommuteError
from commute.cluster.auth import read_token
from commute.cluster.join import join
from commute.store.gather import store_world
from commute.store.links import SLOTS, replay_of

_log = logging.getLogger("commute")

LOOK_SECONDS = 0.5
GOODBYE_SECONDS = 0.5


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m commute.store.server", description="A server of a job's stores."
    )
    parser.add_argument("--coordinator", required=True, help="host:port")
    parser.add_argument("--run", required=True, help="the job's run id (COMMUTE_RUN)")
    parser.add_argument("--world", default="world", help="the name given to commute.init")
    parser.add_argument("--rank", type=int, required=True, help="from W to S - 1")
    parser.add_argument("--size", type=int, required=True, help="S: workers and servers together")
    parser.add_argument("--workers", type=int, required=True, help="W: how many ranks the job has")
    parser.add_argument("--shards", type=int, default=1, help="threads that own slots")
    parser.add_argument("--peer-timeout", type=float, default=5.0)
    parser.add_argument("--join-timeout", type=float, default=300.0)
    parser.add_argument("--may-spin", action="store_true", help="this host has idle cores")
    parser.add_argument("--bind", help="address or interface to listen on")
    parser.add_argument("--advertise", help="what the workers are told")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until the job is over; see the top of this file."""
    given = _arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers decide when it is over
    _core.keep_memory()
    try:
        return _serve(given)
    except CommuteError as error:
        print(f"commute: a server of the store cannot start: {error}", file=sys.stderr, flush=True)
        return 1


def _serve(given: argparse.Namespace) -> int:
    membership, connector = join(
        given.rank,
        given.size,
        0,
        1,
        given.coordinator,
        read_token(os.environ) or "",
        given.run,
        name=store_world(given.world),
        join_timeout=given.join_timeout,
        peer_timeout=given.peer_timeout,
        bind=given.bind,
        advertise=given.advertise,
    )
    replay, report = replay_of(os.environ.get("COMMUTE_REPLAYS"))
    server = _core.StoreServer(
        given.workers,
        (given.rank - given.workers) * given.shards,
        given.shards,
        (given.size - given.workers) * given.shards,
        SLOTS,
        given.may_spin,
        replay,
    )
    health = _core.watch_server(server, given.rank, given.peer_timeout)
    health.add(membership.coordinator_fd, -1)
    first = (given.rank - given.workers) * given.shards
    connector.on_channel(server.add_channel, range(first, first + given.shards))
    told: set[int] = set()
    while not server.wait_until_over(LOOK_SECONDS):
        for rank in set(server.lost()) - told:
            told.add(rank)
            _log.warning("rank %d was lost; tables that continue go on without it", rank)
        if not health.watches(-1) and server.counts()[1] == 0:
            break  # the job is gone, and could not say so
    connector.close()
    server.close()
    report(f"server{given.rank - given.workers}")
    health.close(False, "", GOODBYE_SECONDS)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and a worker waits for our end
