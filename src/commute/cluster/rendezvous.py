# SPDX-License-Identifier: Apache-2.0
"""How ranks that another launcher started find the coordinator, which rank 0 starts.

Rank 0 starts `python -m commute.cluster.serve` as a process of its own session and leaves its
address and token at the meeting point that `environment.detect` chose; the others wait for them
there until the deadline, in slices so that Ctrl-C works:

    given   nothing to leave: all ranks know the address
    store   torch's TCPStore, which torchrun's agent keeps at MASTER_ADDR:MASTER_PORT. We are a
            client like any other and never bind that port. Key "commute/<job>/<name>/<count>".
            Whoever can reach that port can read it; with COMMUTE_TOKEN the token is not left there.
    file    one host only. A file of mode 600 in a directory of mode 700 that belongs to this user,
            named after the job, the name and the count; it appears whole, by rename.

What is left is JSON: {"address": "host:port", "token": "...", "pid": ..., "started": ...}. pid and
start time are rank 0's; a file whose rank 0 is no longer alive is left over from a crash and counts
as not there. Files are removed when rank 0 ends, and left-over ones by the next rank 0.

Count: a process may meet the same others under the same name again, after it closed that world.
Each meeting has a coordinator of its own, and a fast rank must not read the address of the one
before; so all ranks count their meetings per job and name, which is the only state in here.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from commute._errors import JoinError
from commute.cluster.addresses import format_address, is_loopback, parse_address
from commute.cluster.auth import mint_token
from commute.cluster.environment import TOKEN_RECIPE, Place

__all__ = ["find_coordinator"]

_SLICE_S = 0.05  # how soon Ctrl-C is noticed, and how long after rank 0 the others go on
_STORE_S = 10.0  # for one exchange with a store that answers
_BY_HAND = (
    "export COMMUTE_COORDINATOR=<host of rank 0>:<free port> and "
    f"COMMUTE_TOKEN=$({TOKEN_RECIPE}) before the launch"
)

_meetings: Counter[tuple[int, str, str]] = Counter()
# The coordinators this process has started. Each reads a pipe whose writing end is in here, so that
# it learns when this process is gone.
_started: list[subprocess.Popen[bytes]] = []


def find_coordinator(place: Place, name: str, deadline: float) -> tuple[str, str]:
    """The address and token of the coordinator for the world `name`; rank 0 starts it if needed.

    Args:
        deadline: on the clock of time.monotonic.

    Raises:
        JoinError: there is none by the deadline, or no way to find it.
    """
    if place.size == 1:
        raise JoinError("a world of one has no coordinator")
    # A forked child begins to count anew, as the other ranks' children do.
    key = (os.getpid(), place.run, name)
    count = _meetings[key]
    _meetings[key] += 1
    if place.coordinator is not None:
        return _meet_at_address(place, deadline)
    if place.meeting == "store":
        return _meet_at_store(place, f"{name}/{count}", deadline)
    return _meet_at_file(place, f"{name}/{count}", deadline)


# ---- a given address ----


def _meet_at_address(place: Place, deadline: float) -> tuple[str, str]:
    assert place.coordinator is not None
    if place.token is None:
        raise JoinError(f"the coordinator at {place.coordinator} needs a token; set COMMUTE_TOKEN")
    if place.starts_coordinator and not _still_serving():
        host, port = parse_address(place.coordinator)
        _start_coordinator(place, host, port, place.token, deadline)
    return place.coordinator, place.token


def _still_serving() -> bool:
    """Whether the coordinator of an earlier meeting at this address is there for good.

    Without members it ends within a second. If it does not, other worlds, or ranks that were
    faster than this one, are using it, and so can we.
    """
    until = time.monotonic() + 1.0
    while any(server.poll() is None for server in _started):
        if time.monotonic() > until:
            return True
        time.sleep(_SLICE_S)
    return False


# ---- torch's store ----


def _meet_at_store(place: Place, name: str, deadline: float) -> tuple[str, str]:
    store = _open_store(place, deadline)
    key = f"commute/{place.job}/{name}"
    if place.rank == 0:
        host = _route_to_store(place)
        token = place.token or mint_token()
        address = _start_coordinator(place, host, 0, token, deadline)
        left = {"address": address, "token": None if place.token else token}
        store.set(key, json.dumps(left))
        return address, token
    # `get` would wait inside torch, where Ctrl-C does not reach it.
    while not store.check([key]):
        _pause(place, deadline, f"torch's store at {place.store}")
    address, left_token = _read_left(store.get(key))
    return address, place.token or left_token or _no_token(address)


def _open_store(place: Place, deadline: float) -> Any:
    if place.store is None:
        raise JoinError(f"torchrun has not said where its store is; {_BY_HAND}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise JoinError(
            "torch's store at MASTER_ADDR:MASTER_PORT is not kept by torchrun's agent here "
            "(TORCHELASTIC_USE_AGENT_STORE is not True), so the ranks cannot meet there; "
            f"{_BY_HAND}"
        )
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise JoinError(
            "the ranks that torchrun started meet through torch, which cannot be imported "
            f"({error}); {_BY_HAND}"
        ) from None
    host, port = parse_address(place.store)
    # First by hand, as torch's constructor can neither be interrupted nor says what went wrong.
    _await_port(place, host, port, deadline)
    return TCPStore(
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=_STORE_S),
        wait_for_workers=False,
    )


def _await_port(place: Place, host: str, port: int, deadline: float) -> None:
    while True:
        try:
            with socket.create_connection((host, port), timeout=1.0):
                return
        except OSError as error:
            _pause(place, deadline, f"torch's store at {place.store} ({error})")


def _route_to_store(place: Place) -> str:
    """An address of this host that the other hosts reach: the one on the way to MASTER_ADDR."""
    if not place.several_hosts:
        return "127.0.0.1"
    assert place.store is not None
    host, port = parse_address(place.store)
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.connect(address)  # a datagram socket: nothing is sent
            local = str(probe.getsockname()[0])
            if not is_loopback(local):
                return local
    raise JoinError(
        f"MASTER_ADDR ({host}) leads to loopback on the host of rank 0, where other hosts cannot "
        f"reach it; {_BY_HAND}"
    )


# ---- a file ----


def _meet_at_file(place: Place, name: str, deadline: float) -> tuple[str, str]:
    folder = _own_folder()
    job = place.job or _launcher_identity(place)
    digest = hashlib.sha256(f"{job}\n{place.size}\n{name}".encode()).hexdigest()[:32]
    path = folder / f"{digest}.json"
    if place.rank == 0:
        _remove_stale(folder)
        token = place.token or mint_token()
        address = _start_coordinator(place, "127.0.0.1", 0, token, deadline)
        _leave_file(path, {"address": address, "token": token, **_me()})
        return address, token
    while (left := _read_file(path)) is None:
        _pause(place, deadline, str(path))
    address, token = left
    return address, place.token or token


def _own_folder() -> Path:
    """A directory that only this user can enter, the same for all processes of the user."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    # Slurm passes the variable on from the login host, whose directory is not here.
    if not os.access(base, os.W_OK | os.X_OK):
        base = tempfile.gettempdir()
    folder = Path(base) / f"commute-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # The temporary directory is everybody's: somebody else may have made it before us.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise JoinError(
            f"{folder} should be a directory of mode 700 of this user, and is not; remove it"
        )
    return folder


def _leave_file(path: Path, left: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        json.dump(left, file)
    os.replace(temporary, path)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in forked children
            path.unlink(missing_ok=True)

    atexit.register(remove)


def _read_file(path: Path) -> tuple[str, str] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if not _alive(json.loads(content)):
        return None
    address, token = _read_left(content)
    return address, token or _no_token(address)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            if not _alive(json.loads(path.read_bytes())):
                path.unlink()


def _me() -> dict[str, int]:
    return {"pid": os.getpid(), "started": _start_time(os.getpid()) or 0}


def _alive(left: dict[str, Any]) -> bool:
    return _start_time(int(left.get("pid", 0))) == left.get("started")


def _start_time(pid: int) -> int | None:
    """When the process started, in ticks since boot: with its pid this names it uniquely."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third (the state) on; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the second, the name, may contain anything


def _launcher_identity(place: Place) -> str:
    """The process that started all ranks of this host: the first above us without our variables.

    The parent alone would not do: `mpiexec -n 2 sh -c 'python train.py'` has a shell in between.
    """
    variable = f"{place.variables[0]}=".encode() if place.variables else b"\0"
    pid = os.getppid()
    while pid > 1:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break
        if not any(entry.startswith(variable) for entry in environment.split(b"\0")):
            break
        pid = int(_stat_fields(pid)[1])
    return f"{place.source}/{pid}/{_start_time(pid)}"


# ---- starting the coordinator ----


def _start_coordinator(place: Place, host: str, port: int, token: str, deadline: float) -> str:
    """Starts the coordinator's process and returns its address, once it listens."""
    patience_s = max(1.0, deadline - time.monotonic())
    command = [sys.executable, "-m", "commute.cluster.serve", "--size", str(place.size)]
    command += ["--bind", host, "--port", str(port), "--join-timeout", f"{patience_s:.0f}"]
    # stderr stays ours: there the coordinator says whom it waits for.
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    if not _started:
        atexit.register(_let_go)
    _started.append(server)
    try:
        server.stdin.write(json.dumps({"token": token, "run": place.run}).encode() + b"\n")
        server.stdin.flush()
        line = _read_line(server, deadline)
    except BaseException:
        server.kill()
        server.wait()
        raise
    finally:
        server.stdout.close()
    if not line:
        raise JoinError(
            f"the coordinator did not start at {format_address(host, port)} (exit code "
            f"{server.wait()}); its own message is above"
        )
    answer = json.loads(line)
    return format_address(str(answer["host"]), int(answer["port"]))


def _let_go() -> None:
    """Leaves the coordinators to themselves: each ends when the last member has gone."""
    for server in _started:
        if server.poll() is None:
            server.returncode = 0  # else Popen complains that nobody waits for it


def _read_line(server: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert server.stdout is not None
    os.set_blocking(server.stdout.fileno(), False)
    line = b""
    while not line.endswith(b"\n"):
        part = server.stdout.read(4096)
        if part == b"":
            return b""
        if part is None:
            if time.monotonic() > deadline:
                raise JoinError("the coordinator's process did not start in time")
            time.sleep(0.005)
            continue
        line += part
    return line


def _read_left(content: bytes) -> tuple[str, str | None]:
    try:
        left = json.loads(content)
        return str(left["address"]), left["token"]
    except (ValueError, KeyError, TypeError) as error:
        raise JoinError(f"rank 0 left no usable address at the meeting point: {error!r}") from None


def _no_token(address: str) -> str:
    raise JoinError(
        f"rank 0 has a token for the coordinator at {address} and this rank has none; export "
        "COMMUTE_TOKEN for every rank"
    )


def _pause(place: Place, deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise JoinError(
            f"rank {place.rank} of {place.size} did not find rank 0's coordinator in time; it "
            f"waited for {what}; did rank 0 call init, and under the same name?"
        )
    time.sleep(_SLICE_S)
