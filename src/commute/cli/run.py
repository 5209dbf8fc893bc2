# SPDX-License-Identifier: Apache-2.0
"""`commute run`: reads the command line into a Job; cluster.launch does the rest.

The flags are those of torchrun and horovodrun where these have one, in both spellings (dashes and
underscores), so that a line that works with them works here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from commute.cluster.addresses import format_address, is_wildcard, parse_address
from commute.cluster.auth import check_run, read_token
from commute.cluster.launch import Job, launch

_PORT = 29500  # torchrun's for a static rendezvous

_DESCRIPTION = """\
Start a job: run the same script as several processes (ranks) that find each other.

  commute run -n 4 train.py --epochs 3        four ranks on this machine
  commute run -n auto -m package.train        one rank per core; a module instead of a script
  commute run -n 2 --no-python ./program      anything else than Python

On several machines, run one line on each; only --node-rank differs:

  export COMMUTE_TOKEN=...      the same on all: 64 hexadecimal digits, made once by
                                python -c "import secrets; print(secrets.token_hex(32))"
  commute run --nnodes 2 --node-rank 0 --rdzv-endpoint hosta:29500 -n 4 train.py      on hosta
  commute run --nnodes 2 --node-rank 1 --rdzv-endpoint hosta:29500 -n 4 train.py      on hostb

In the script, commute.init() finds its place by itself. Whatever follows the script is the
script's own."""

_EPILOG = """\
Each line of output begins with its rank. When a rank fails, the others are ended within seconds,
the traceback of the rank that failed first is printed last, and its exit code becomes that of this
command (128 + the number of the signal if it was killed by one). Ctrl-C ends all ranks; a second
one kills them. The ranks get no input: their stdin is empty."""


class UsageError(Exception):
    """The command line asks for something that cannot be; the message says what to write."""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute run`."""
    made = argparse.ArgumentParser(
        prog="commute run",
        usage="commute run [-n N] [flags] script.py [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_here(made.add_argument_group("how many, and what"))
    _add_nodes(made.add_argument_group("several machines"))
    # One positional for all: a second would take the first "--" of the script's for its own.
    made.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="the script (with -m a module) and its arguments, passed on untouched",
    )
    return made


def _add_here(group: argparse._ArgumentGroup) -> None:
    _flag(
        group,
        "-n",
        "-np",
        "--nproc-per-node",
        metavar="N",
        dest="ranks",
        help="ranks on this machine: a number, or auto (or cpu) for one per usable core "
        "(default 1)",
    )
    _flag(
        group,
        "-H",
        "--hosts",
        metavar="localhost:N",
        help="horovodrun's way to say -n N; this host only",
    )
    _flag(
        group,
        "--servers",
        metavar="K",
        help="server processes on this machine for the stores of the job (default 1, started with "
        "the first store; for one rank none, its tables are in its process)",
    )
    _flag(
        group,
        "--shards",
        metavar="K",
        help="threads of each server, which share its slots (default: cores that ranks leave)",
    )
    _flag(
        group,
        "--keep-going",
        action="store_true",
        help="when a rank fails the others go on, for stores that continue without it; the exit "
        "code is still the first failure's",
    )
    _flag(group, "-m", "--module", action="store_true", help="run a module, as python -m does")
    _flag(group, "--no-python", action="store_true", help="run the program itself, not by Python")


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--nnodes", metavar="N", default="1", help="number of machines (default 1)")
    _flag(group, "--node-rank", metavar="K", type=int, help="which one this is, from 0")
    _flag(
        group,
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where the coordinator listens: an address of node 0, as the others reach it",
    )
    _flag(group, "--master-addr", metavar="HOST", help="the host alone of --rdzv-endpoint")
    _flag(group, "--master-port", metavar="PORT", type=int, help=f"its port (default {_PORT})")
    _flag(group, "--rdzv-id", metavar="ID", help="a name of the job, the same on all machines")
    _flag(
        group,
        "--rdzv-backend",
        choices=("static", "c10d"),
        help="accepted for torchrun's sake; both mean the coordinator of commute",
    )
    _flag(group, "--standalone", action="store_true", help="this machine alone (the default)")
    _flag(
        group,
        "--token-file",
        metavar="PATH",
        help="file (mode 600) with the token that COMMUTE_TOKEN would hold",
    )
    _flag(
        group,
        "--start-timeout",
        metavar="S",
        type=float,
        help="seconds to wait until all ranks of all machines are there (default 300)",
    )
    _flag(
        group,
        "--network-interface",
        metavar="NAME",
        help="interface (or address) for the traffic between ranks; by default the one by which "
        "the coordinator is reached",
    )


def _flag(group: argparse._ArgumentGroup, *names: str, **settings: Any) -> None:
    """Adds a flag, and its twins with underscores, which --help does not show."""
    action = group.add_argument(*names, **settings)
    twins = [name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:]]
    if twins:
        hidden = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        group.add_argument(*twins, **{**hidden, "dest": action.dest})


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    try:
        job = job_from(options, env)
        for flag, least in (("servers", 0), ("shards", 1)):
            if getattr(options, flag) is not None:
                _whole(getattr(options, flag), f"--{flag}", least=least)
        _check_program(options)
    except UsageError as error:
        print(f"commute run: {error}", file=sys.stderr)
        return 2
    if options.start_timeout is not None:
        env = {**env, "COMMUTE_JOIN_TIMEOUT": str(options.start_timeout)}
    return launch(job, {**env, **_store_settings(options)})


def _store_settings(options: argparse.Namespace) -> dict[str, str]:
    given = {"COMMUTE_SERVERS": options.servers, "COMMUTE_SHARDS": options.shards}
    return {variable: value for variable, value in given.items() if value is not None}


def job_from(options: argparse.Namespace, env: Mapping[str, str]) -> Job:
    """What the flags ask for; touches nothing but the token file.

    Raises:
        UsageError: they contradict each other, or something is missing.
        AuthenticationError: the token cannot be used.
    """
    nodes = _nodes(options.nnodes)
    node = _node(options.node_rank, nodes)
    if options.standalone and nodes > 1:
        raise UsageError("--standalone is for one machine, but --nnodes says more; leave one out")
    timeout_s = 300.0 if options.start_timeout is None else options.start_timeout
    if not timeout_s > 0:
        raise UsageError(f"--start-timeout should be above 0 seconds, got {timeout_s:g}")
    return Job(
        command=_command(options),
        ranks=_ranks(options.ranks, options.hosts),
        nodes=nodes,
        node=node,
        endpoint=_endpoint(options, nodes),
        token=_token(options.token_file, env, nodes, met=_endpoint(options, nodes) is not None),
        run=_run_id(options.rdzv_id, nodes),
        interface=options.network_interface,
        start_timeout_s=timeout_s,
        keep_going=options.keep_going,
    )


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    if not options.command:
        raise UsageError("there is nothing to run; name a script, as in: commute run -n 4 train.py")
    if options.no_python:
        if options.module:
            raise UsageError("-m runs a Python module and --no-python no Python; choose one")
        return tuple(options.command)
    module = ("-m",) if options.module else ()
    return (sys.executable, "-u", *module, *options.command)


def _ranks(text: str | None, hosts: str | None) -> int:
    slots = _slots(hosts) if hosts is not None else None
    if text is None:
        return slots or 1
    if text in ("auto", "cpu"):
        count = len(os.sched_getaffinity(0))
    else:
        count = _whole(text, "-n", least=1)
    if slots is not None and count > slots:
        raise UsageError(f"-n asks for {count} ranks, -H has room for {slots}; raise the latter")
    return count


def _slots(hosts: str) -> int:
    name, colon, slots = hosts.partition(":")
    if name not in ("localhost", "127.0.0.1", "::1", os.uname().nodename) or "," in slots:
        raise UsageError(
            f"-H {hosts} names another host, and commute run starts ranks on its own host only; on "
            "each host run: commute run --nnodes N --node-rank K --rdzv-endpoint HOST:PORT ..."
        )
    return _whole(slots, "-H", least=1) if colon else 1


def _nodes(text: str) -> int:
    if ":" in text:
        raise UsageError(
            f"--nnodes {text} asks for a job that grows and shrinks, which is not supported; give "
            "one number"
        )
    return _whole(text, "--nnodes", least=1)


def _node(rank: int | None, nodes: int) -> int:
    if rank is None:
        if nodes > 1:
            raise UsageError(
                f"--node-rank is missing; the machines of --nnodes {nodes} are numbered from 0 to "
                f"{nodes - 1}, 0 being the one of --rdzv-endpoint"
            )
        return 0
    if not 0 <= rank < nodes:
        raise UsageError(
            f"--node-rank should be from 0 to {nodes - 1} as --nnodes is {nodes}, got {rank}"
        )
    return rank


def _endpoint(options: argparse.Namespace, nodes: int) -> tuple[str, int] | None:
    given = options.rdzv_endpoint
    if given is not None and options.master_addr is not None:
        raise UsageError("--rdzv-endpoint and --master-addr say the same; give one of them")
    host = given if given is not None else options.master_addr
    if host is None:
        if nodes > 1:
            raise UsageError(
                f"--nnodes {nodes} needs an address to meet at; add --rdzv-endpoint HOST:{_PORT}, "
                "HOST being node 0 as the other nodes reach it"
            )
        return None
    port = options.master_port if options.master_port is not None else _PORT
    # A bare host, with or without the brackets of IPv6, gets the port added.
    if options.master_addr is not None or ":" not in host or host.endswith("]"):
        host = format_address(host.removeprefix("[").removesuffix("]"), port)
    try:
        address = parse_address(host)
    except ValueError as error:
        raise UsageError(f"the address to meet at is unusable: {error}") from None
    if is_wildcard(address[0]):
        raise UsageError(f"{host} is no address that others can dial; give the one of node 0")
    return address


def _token(path: str | None, env: Mapping[str, str], nodes: int, *, met: bool) -> str | None:
    if path is not None:
        return read_token({"COMMUTE_TOKEN_FILE": path})
    if nodes == 1 and not met:
        return None  # the launcher makes one, fresh for each job
    token = read_token(env)
    if token is None and nodes > 1:
        raise UsageError(
            "several machines need a token that all of them share; make one with\n"
            '  python -c "import secrets; print(secrets.token_hex(32))"\n'
            "and give it to each in COMMUTE_TOKEN or in a file (mode 600) by --token-file"
        )
    return token


def _run_id(given: str | None, nodes: int) -> str | None:
    if given is None:
        # Alone the launcher makes one up; together they must all say the same.
        return None if nodes == 1 else "job"
    try:
        check_run(given)
    except ValueError:
        return hashlib.sha256(given.encode()).hexdigest()[:32]
    return given


def _whole(text: str, flag: str, *, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UsageError(f"{flag} should be a whole number from {least} up, got '{text}'")
    return int(text)


def _check_program(options: argparse.Namespace) -> None:
    """Says what is wrong once, before every rank says it."""
    name = options.command[0]
    if options.no_python:
        if shutil.which(name) is None:
            raise UsageError(f"there is no program '{name}'; give its path, or drop --no-python")
    elif not options.module and not os.path.exists(name):
        hint = "; to run a module, add -m" if not name.endswith(".py") and "/" not in name else ""
        raise UsageError(f"there is no script '{name}' in {os.getcwd()}{hint}")
