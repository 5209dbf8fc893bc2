# SPDX-License-Identifier: Apache-2.0
"""How commute's store and its peers are started: so many servers, so many workers.

The ranks of a job are its workers. Servers are programs of their own where the library lets us
start them, and the library's affair where it starts them itself (commute on one host, Ray).
"""

import os
import secrets
import sys

from benchmarks.figures import OURS
from benchmarks.jobs import Job, Program, scratch_folder, worker
from benchmarks.network import Hosts
from benchmarks.session import commute_command
from benchmarks.setup_peers import program_of, python_of

RENDEZVOUS_PORT = 29410
# Before a server that would not notice the end of a bench killed with -9.
TIED = ("setpriv", "--pdeathsig", "KILL")
_LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
# No report to Ray's makers; no token, which Ray would leave in the user's home.
_RAY_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
# Redis, and redis-py, allocate each answer anew: without this the memory goes back to the system
# every time, and 16 MB take 20 ms instead of 14. It made no difference to torch or Ray.
_KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


def commute_job(
    workers: int,
    servers: int,
    *,
    name: str = OURS,
    file: str = "store_rank.py",
    shares_memory: bool = True,
    shards: int | None = None,
) -> Job:
    scratch = scratch_folder()
    counts = ["-n", str(workers), "--servers", str(servers)]
    counts += ["--shards", str(shards)] if shards else []
    argv = (commute_command(), "run", *counts, worker(file), Job.socket_in(scratch))
    program = Program(argv, {} if shares_memory else {"COMMUTE_SHARED_MEMORY": "0"})
    return Job(name, ranks=workers, programs=[program], scratch=scratch)


def ray_job(workers: int, servers: int) -> Job:
    scratch = scratch_folder()
    argv = (str(python_of("ray")), worker("ray_rank.py"), Job.socket_in(scratch))
    programs = [
        Program((*argv, str(rank), str(workers), str(scratch), str(servers)), _RAY_ENV)
        for rank in range(workers)
    ]
    return Job("ray", ranks=workers, programs=programs, scratch=scratch)


def rpc_job(workers: int, servers: int) -> Job:
    scratch = scratch_folder()
    argv = (*TIED, str(python_of("gloo")), worker("rpc_rank.py"), Job.socket_in(scratch))
    places = [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]
    programs = [
        Program((*argv, role, str(i), str(workers), str(scratch), str(servers)), _LOOPBACK)
        for role, i in places
    ]
    # Its threads look for messages all the time: two of these processes keep both cores busy.
    return Job("rpc", ranks=workers, programs=programs, scratch=scratch, polls=True)


def redis_job(workers: int, servers: int, *, file: str = "redis_rank.py") -> Job:
    scratch = scratch_folder()
    server = str(program_of("redis", "redis-server"))
    in_memory_only = ("--port", "0", "--save", "", "--appendonly", "no", "--dir", str(scratch))
    argv = (str(python_of("redis")), worker(file), Job.socket_in(scratch))
    programs = [
        *(
            Program(
                (*TIED, server, *in_memory_only, "--unixsocket", f"{scratch}/server{i}"),
                _KEEP_MEMORY,
            )
            for i in range(servers)
        ),
        *(
            Program((*argv, str(rank), str(workers), str(scratch), str(servers)), _KEEP_MEMORY)
            for rank in range(workers)
        ),
    ]
    return Job("redis", ranks=workers, programs=programs, scratch=scratch)


def copy_job(workers: int, *, name: str = "copy", file: str = "copy_back_rank.py") -> Job:
    scratch = scratch_folder()
    argv = (sys.executable, worker(file), Job.socket_in(scratch))
    programs = [Program((*argv, str(rank), str(workers)), {}) for rank in range(workers)]
    return Job(name, ranks=workers, programs=programs, scratch=scratch)


def hosts_job(hosts: Hosts, workers: int, servers: int) -> Job:
    """Every worker and every server on a host of its own: workers first, then servers."""
    scratch = scratch_folder()
    run, token = f"store{servers}", secrets.token_hex(32)
    # A port for each: the jobs with other numbers of servers live on the same hosts.
    endpoint = f"{hosts.address(0)}:{RENDEZVOUS_PORT + servers}"
    nodes = ("--nnodes", str(workers), "--rdzv-endpoint", endpoint, "--rdzv-id", run, "-n", "1")
    command = (worker("store_rank.py"), Job.socket_in(scratch))
    remote = {"COMMUTE_SERVERS": "0", "COMMUTE_REMOTE_SERVERS": str(servers), "COMMUTE_SHARDS": "1"}
    ranks = [
        Program(
            (
                *hosts.inside(host),
                *(commute_command(), "run", "--node-rank", str(host), *nodes, *command),
            ),
            {"COMMUTE_TOKEN": token, **remote},
        )
        for host in range(workers)
    ]
    serving = (
        *(*TIED, sys.executable, "-m", "commute.store.server", "--coordinator", endpoint),
        *("--run", run, "--world", "world", "--size", str(workers + servers)),
        *("--workers", str(workers), "--shards", "1"),
    )
    others = [
        Program(
            (*hosts.inside(host), *serving, "--rank", str(host)),
            # As this interpreter finds commute, so do its servers.
            {"COMMUTE_TOKEN": token, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        for host in range(workers, workers + servers)
    ]
    return Job(f"{OURS} x{servers}", ranks=workers, programs=[*ranks, *others], scratch=scratch)
