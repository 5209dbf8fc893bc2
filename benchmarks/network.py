# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces on a bridge, each with a link of its own.

    host 0 ── eth0 ═ port0 ─┐
    host 1 ── eth0 ═ port1 ─┤ bridge (in a namespace of its own)
    ...                     ┘

Every veth pair carries a token bucket filter on both of its ends, so that what a host sends and
what it receives are both limited. The bridge lives in a namespace too: nothing appears in the
network of the machine itself.

Names hold the pid of this run. They are removed when the with-block is left, however that happens;
what a run killed with -9 left behind is removed by the next one, which finds that pid dead.
"""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.failure import BenchError

IPERF_PORT = 5201
IPERF_SECONDS = 2
IPERF_OMIT_SECONDS = 1  # slow start
COMMAND_SECONDS_MAX = 30.0
_PREFIX = "cmb"


@dataclass(frozen=True)
class Link:
    """What a link carries, in each direction."""

    rate: str = "1gbit"
    # Two full GSO packets: the filter never has to split one. At 1 Gbit/s a burst lasts 1 ms.
    burst: str = "128kb"
    # What may queue before packets are dropped, as in a switch with a few MB of buffer.
    queue: str = "20ms"

    def __str__(self) -> str:
        return f"tbf {self.rate}, burst {self.burst}, queue {self.queue}, both ends"


def require_tools() -> None:
    missing = [tool for tool in ("ip", "tc", "iperf3", "setpriv") if shutil.which(tool) is None]
    if missing:
        raise BenchError(
            f"{', '.join(missing)} not found; "
            "install Debian's packages iproute2, iperf3 and util-linux"
        )
    if os.geteuid() != 0:
        raise BenchError("network namespaces need root; run this benchmark as root")


class Hosts:
    """A context manager: `count` hosts with one interface `eth0` each."""

    def __init__(self, count: int, link: Link | None = None) -> None:
        self.count = count
        self.link = link or Link()
        self._switch = f"{_PREFIX}{os.getpid()}-switch"
        self.names = [f"{_PREFIX}{os.getpid()}-host{i}" for i in range(count)]
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        _remove_left_behind()
        try:
            self._build()
            self._start_iperf_servers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> tuple[str, ...]:
        """What to put before a command to run it on a host."""
        return ("ip", "netns", "exec", self.names[host])

    def close(self) -> None:
        for server in self._servers:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
        self._servers = []
        existing = _namespaces()
        for name in (*self.names, self._switch):
            if name in existing:
                _run("ip", "netns", "del", name)

    def goodput(self, flows: Sequence[tuple[int, int]]) -> list[float]:
        """Payload bytes per second of each flow (from, to), all flowing at the same time."""
        clients = [
            subprocess.Popen(
                (
                    *self.inside(source),
                    *("iperf3", "-J", "-c", self.address(target), "-p", str(IPERF_PORT)),
                    *("-t", str(IPERF_SECONDS), "-O", str(IPERF_OMIT_SECONDS)),
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, target in flows
        ]
        try:
            outputs = [client.communicate(timeout=COMMAND_SECONDS_MAX)[0] for client in clients]
        except subprocess.TimeoutExpired as error:
            raise BenchError("iperf3 did not finish between the namespaces") from error
        finally:
            for client in clients:
                client.kill()
        return [_received(output) for output in outputs]

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names):
            self._add_host(index, name)

    def _add_host(self, index: int, name: str) -> None:
        port = f"port{index}"
        _run("ip", "netns", "add", name)
        veth = ("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port)
        _run("ip", *veth, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        for namespace, device in ((name, "eth0"), (self._switch, port)):
            shape = ("tbf", "rate", self.link.rate, "burst", self.link.burst)
            queue = ("latency", self.link.queue)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape, *queue)

    def _start_iperf_servers(self) -> None:
        for host in range(self.count):
            server = subprocess.Popen(
                (
                    # Ends with this process even when that is killed with -9.
                    *("setpriv", "--pdeathsig", "KILL", *self.inside(host)),
                    *("iperf3", "-s", "-p", str(IPERF_PORT), "--forceflush"),
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._servers.append(server)
            assert server.stdout is not None
            heard = ""
            while "listening" not in heard:
                heard = server.stdout.readline()
                if not heard:
                    raise BenchError("the iperf3 server ended while starting")


def wire_goodput(hosts: Hosts) -> dict[str, float]:
    """What a link carries, in bytes/s, measured three ways; the highest makes the strictest ideal.

    A pair in each direction alone, and a ring in which every host sends to the next at the same
    time, which loads all links in both directions as an allreduce does (the mean of its flows).
    """
    ring = [(i, (i + 1) % hosts.count) for i in range(hosts.count)]
    return {
        "pair": hosts.goodput([(0, 1)])[0],
        "pair back": hosts.goodput([(1, 0)])[0],
        "ring": statistics.mean(hosts.goodput(ring)),
    }


def _received(output: str) -> float:
    try:
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8
    except (ValueError, KeyError) as error:
        raise BenchError(f"iperf3 failed: {output.strip()[-300:]}") from error


def _namespaces() -> set[str]:
    return {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()}


def _remove_left_behind() -> None:
    for name in _namespaces():
        match = re.fullmatch(rf"{_PREFIX}(\d+)-(host\d+|switch)", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS_MAX
    )
    if done.returncode != 0:
        raise BenchError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
