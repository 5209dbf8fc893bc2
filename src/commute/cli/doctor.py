# SPDX-License-Identifier: Apache-2.0
"""`commute doctor`: what this machine is, which links commute would use, and whether they work.

The report is plain text, made to be pasted into an issue. It holds no secret: of the token only
whether there is one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from commute._cores import quota, usable_cores
from commute._errors import CommuteError
from commute._version import __version__
from commute.cluster.addresses import interface_address

_PACKAGES = ("numpy", "msgspec", "torch", "ml_dtypes", "mpi4py", "rich", "matplotlib")
_SELF_TEST_SECONDS = 2.0
_SELF_TEST_LIMIT = 60.0


def parser() -> argparse.ArgumentParser:
    """The command line of `commute doctor`."""
    made = argparse.ArgumentParser(
        prog="commute doctor",
        description="Print the environment, the links commute would use, and a self-test of about "
        "two seconds: two ranks on this host say what they chose and why (link, way of waiting, "
        "kernels, algorithms) and measure it beside a memory copy.",
        allow_abbrev=False,
    )
    made.add_argument("--no-test", action="store_true", help="leave the self-test out")
    return made


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    for title, lines in (
        ("machine", _machine()),
        ("software", _software()),
        ("job", _job(env)),
        ("links", _links()),
    ):
        _print(title, lines)
    if options.no_test:
        return 0
    print("self-test", flush=True)
    return _self_test()


def _print(title: str, lines: Iterator[tuple[str, str]]) -> None:
    print(title)
    for name, value in lines:
        print(f"  {name:<16}{value}")
    sys.stdout.flush()


def _machine() -> Iterator[tuple[str, str]]:
    yield "host", f"{socket.gethostname()}, {platform.system()} {platform.release()}"
    yield "processor", f"{_processor()} ({platform.machine()})"
    yield "usable cores", _cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield "memory", f"{memory:.1f} GiB"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def _cores() -> str:
    allowed = len(os.sched_getaffinity(0))
    text = f"{allowed} of {os.cpu_count()}"
    limit = quota()
    return text if math.isinf(limit) else f"{text}, limited to {limit:.3g} by the control group"


def _software() -> Iterator[tuple[str, str]]:
    from commute import _core

    yield "commute", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    sets = ", ".join(_core.kernel_sets())
    yield "kernels", f"{_core.kernel_set()} (this processor can run {sets})"
    for tool in ("ip", "iperf3"):
        yield tool, shutil.which(tool) or "not found; only benchmarks and some tests need it"


def _job(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from commute.cluster.environment import detect

    try:
        yield "place", detect(env).describe()
    except CommuteError as error:
        yield "place", f"unusable: {error}"
    given = [name for name in sorted(env) if name.startswith("COMMUTE_")]
    yield "settings", ", ".join(_setting(name, env[name]) for name in given) or "none"


def _setting(name: str, value: str) -> str:
    return f"{name} (set)" if "TOKEN" in name else f"{name}={value}"


def _links() -> Iterator[tuple[str, str]]:
    yield "on this host", "shared memory where the handshake finds it, else TCP over loopback"
    yield "between hosts", "TCP, from the interface by which the coordinator is reached"
    yield "interfaces", ", ".join(_addresses()) or "none"
    cores = int(usable_cores())
    yield "waiting", f"spins 1 us with up to {cores} ranks here, gives way for 200 us, sleeps"


def _addresses() -> Iterator[str]:
    for _, name in socket.if_nameindex():
        try:
            yield f"{name} {interface_address(name)}"
        except ValueError:
            continue  # it has no address


def _self_test() -> int:
    command = [sys.executable, "-m", "commute", "run", "-n", "2", "-m", "commute.cli.selftest"]
    try:
        done = subprocess.run(
            [*command, str(_SELF_TEST_SECONDS)],
            env=_clean(os.environ),
            timeout=_SELF_TEST_LIMIT,
            text=True,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        print(f"  failed: two ranks on this host did not finish in {_SELF_TEST_LIMIT:.0f} s")
        return 1
    for line in done.stdout.splitlines():
        print(f"  {line.removeprefix('[0] ')}")
    for line in done.stderr.splitlines() if done.returncode == 0 else ():
        print(f"  {line}")  # warnings of the ranks
    if done.returncode != 0:
        print(f"  failed with exit code {done.returncode}:\n{done.stderr}")
        return 1
    return 0


def _clean(env: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of a job this command may have been called from."""
    kept = "COMMUTE_SHARED_MEMORY"  # a setting of the user's, which the report is about
    return {n: value for n, value in env.items() if n == kept or not n.startswith("COMMUTE_")}
