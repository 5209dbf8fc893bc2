# SPDX-License-Identifier: Apache-2.0
"""How near to the wire is an allreduce between four hosts at 1 Gbit/s, and how does gloo fare?

    python -m benchmarks.four_hosts [--runs 3]          as root: it makes network namespaces

Float32 sum, in place. An allreduce cannot be faster than "wire", 2(n-1)/n * bytes / goodput, where
goodput is what iperf3 carries over the same links in the same run: the highest of a pair in either
direction and a ring of simultaneous flows, measured before the first size and after each. The
highest makes the strictest ideal.
"""

import contextlib
import secrets
import statistics
import sys
from typing import Any

from benchmarks import network, setup_peers
from benchmarks.figures import NO_SLOWER, OURS, Requirement, Run, compare
from benchmarks.jobs import Job, Program, scratch_folder, worker
from benchmarks.network import Hosts, wire_goodput
from benchmarks.rounds import Cell, CellResult, Entry, measure, size_text, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse

HOSTS = 4
MB = 1 << 20
SIZES = (1 * MB, 16 * MB, 64 * MB)
TURN_SECONDS = 0.5
RENDEZVOUS_PORT = 29400

REQUIREMENTS = [
    Requirement("wire", HOSTS, 1 * MB, 1 / 1.08, "within 8% of the wire"),
    Requirement("wire", HOSTS, 16 * MB, 1 / 1.05, "within 5% of the wire"),
    Requirement("wire", HOSTS, 64 * MB, 1 / 1.05, "within 5% of the wire"),
    Requirement("gloo", HOSTS, 16 * MB, NO_SLOWER, "no slower than gloo"),
    Requirement("gloo", HOSTS, 64 * MB, NO_SLOWER, "no slower than gloo"),
]


def commute_job(hosts: Hosts) -> Job:
    scratch = scratch_folder()
    endpoint = f"{hosts.address(0)}:{RENDEZVOUS_PORT}"
    token = secrets.token_hex(32)
    options = ("--nnodes", str(hosts.count), "--rdzv-endpoint", endpoint, "--nproc-per-node", "1")
    command = (worker("commute_rank.py"), Job.socket_in(scratch))
    programs = [
        Program(
            (
                *hosts.inside(host),
                *(commute_command(), "run", "--node-rank", str(host), *options),
                *command,
            ),
            {"COMMUTE_TOKEN": token},
        )
        for host in range(hosts.count)
    ]
    return Job(OURS, ranks=hosts.count, programs=programs, scratch=scratch)


def gloo_job(hosts: Hosts) -> Job:
    scratch = scratch_folder()
    argv = (
        str(setup_peers.python_of("gloo")),
        worker("gloo_rank.py"),
        Job.socket_in(scratch),
    )
    programs = [
        Program(
            (*hosts.inside(host), *argv, str(host), str(hosts.count), str(scratch / "store")),
            {"GLOO_SOCKET_IFNAME": "eth0"},
        )
        for host in range(hosts.count)
    ]
    return Job("gloo", ranks=hosts.count, programs=programs, scratch=scratch)


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    found: dict[Cell, CellResult] = {}
    with contextlib.ExitStack() as stack:
        say("building the hosts")
        hosts = stack.enter_context(Hosts(HOSTS))
        entries = [
            Entry(stack.enter_context(commute_job(hosts))),
            Entry(stack.enter_context(gloo_job(hosts))),
        ]
        facts["versions"] = {e.job.name: e.job.version for e in entries}
        goodputs = [wire_goodput(hosts)]
        for size in SIZES:
            cell = Cell(HOSTS, size)
            found[cell] = measure(
                cell,
                entries,
                turn_seconds=TURN_SECONDS,
                rounds=options.rounds,
                keep_noisy=options.keep_noisy,
                say=say,
            )
            say("measuring the links")
            goodputs.append(wire_goodput(hosts))
    goodput = max(statistics.median(g[way] for g in goodputs) for way in goodputs[0])
    facts.setdefault("goodput", []).append({"bytes_per_second": goodput, "measured": goodputs})
    return {cell: _with_wire(result, goodput) for cell, result in found.items()}


def _with_wire(result: CellResult, goodput: float) -> CellResult:
    """Adds the ideal time as one more entry, so that it is compared like any peer."""
    hosts, bytes = result.cell.ranks, result.cell.bytes
    ideal = 2 * (hosts - 1) / hosts * bytes / goodput
    return result.with_entry("wire", lambda _: ideal)


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    measured = facts["goodput"][-1]
    ways = "; ".join(
        f"{way} " + " ".join(f"{g[way] * 8 / 1e6:.0f}" for g in measured["measured"])
        for way in measured["measured"][0]
    )
    lines += [
        f"links: {network.Link()}",
        f"goodput by iperf3, Mbit/s: {measured['bytes_per_second'] * 8 / 1e6:.1f} ({ways})",
        "",
        "median time, then how many times faster commute is [range]",
    ]
    header = ("size", OURS, "gloo", "wire", "/gloo", "/wire", "dropped")
    return [*lines, *columns([header, *(_row(result) for result in run.values())]), ""]


def _row(result: CellResult) -> tuple[str, ...]:
    size = size_text(result.cell.bytes)
    if not result.has_result:
        return (size, "noise", "noise", "noise", "-", "-", str(result.dropped))
    times = (time_text(result.median(name)) for name in (OURS, "gloo", "wire"))
    ratios = (str(compare(result, peer)) for peer in ("gloo", "wire"))
    return (size, *times, *ratios, str(result.dropped))


def prepare() -> None:
    network.require_tools()
    setup_peers.set_up(("gloo", "plot"))
    commute_command()


QUESTION = Question(
    name="four_hosts",
    title="four hosts at 1 Gbit/s: allreduce of float32, in place",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
