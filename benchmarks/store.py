# SPDX-License-Identifier: Apache-2.0
"""How fast is a dense push_pull, beside a Ray actor, torch RPC, Redis and a memory copy?

    python -m benchmarks.store [--runs 3]               as root: it makes network namespaces

A worker gives a float32 array, the server adds it to its own, the worker gets the sum: bytes both
ways. Then three more: 4 KB after 10 ms idle; 8 workers against 1, 2 and 4 servers, each on a host
of its own at 200 Mbit/s; and workers beside a neighbour that floods the server or never reads.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import network, setup_peers, store_jobs
from benchmarks.figures import OURS, STORE_PEERS, Requirement, Run, compare
from benchmarks.jobs import Job
from benchmarks.network import Hosts, Link
from benchmarks.rounds import Cell, CellResult, Entry, measure, size_text, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse
from benchmarks.workers.calls import AFTER_IDLE, BESIDE, PUSH_PULL

KB, MB = 1 << 10, 1 << 20
# The turns of a round share this time; the noise guard needs over a second.
ROUND_SECONDS = 1.35

SIZES = (4 * KB, 64 * KB, 1 * MB, 16 * MB, 64 * MB)
PAIRS = (1, 2)  # so many servers and as many workers
IDLE = Cell(1, 4 * KB, AFTER_IDLE)
# What ours alone must stay under, in seconds.
LIMITS = {Cell(1, 4 * KB, PUSH_PULL): 10e-6, IDLE: 150e-6, Cell(2, 4 * KB, PUSH_PULL): 40e-6}

SCALED = Cell(8, 4 * MB, PUSH_PULL)
SCALED_SERVERS = (1, 2, 4)
# The queue is that of 1 Gbit/s in bytes.
SCALED_LINK = Link(rate="200mbit", queue="100ms")
SCALED_WITHIN = 0.15

NEIGHBOURS = Cell(3, 64 * KB, BESIDE)
TRANSPORTS = {OURS: "shared memory", "tcp": "TCP"}
# The variants of beside_rank.py, each held against another: a flood against a neighbour that uses a
# core as it does, but not the server (there are 2 cores for 4 busy processes), one that is stopped
# against one that does nothing.
HELD_AGAINST = {"flood": "computing", "stopped": "alone"}
VARIANTS = ("alone", "ordinary", "computing", "flood", "stopped")
KEPT_SHARE = 0.8


def _limit(cell: Cell, words: str) -> Requirement:
    return Requirement("limit", cell.ranks, cell.bytes, 1.0, words, cell.call)


def _scaling(servers: int) -> Requirement:
    """With 4 servers an exchange is 4 / servers times as fast."""
    most = SCALED_SERVERS[-1]
    times = most / servers
    return Requirement(
        f"{OURS} x{servers}",
        SCALED.ranks,
        SCALED.bytes,
        times * (1 - SCALED_WITHIN),
        f"{most} servers: {times:g} times {servers}",
        SCALED.call,
        ours=f"{OURS} x{most}",
        ratio_max=times * (1 + SCALED_WITHIN),
    )


def _kept(transport: str, variant: str) -> Requirement:
    doing = {"flood": "beside a flood", "stopped": "beside one stopped"}[variant]
    how = "" if transport == OURS else f", {TRANSPORTS[transport]}"
    return Requirement(
        f"{transport} {HELD_AGAINST[variant]}",
        NEIGHBOURS.ranks,
        NEIGHBOURS.bytes,
        KEPT_SHARE,
        f"{KEPT_SHARE:.0%} {doing}{how}",
        NEIGHBOURS.call,
        ours=f"{transport} {variant}",
    )


REQUIREMENTS = [
    Requirement("best peer", 1, 16 * MB, 3.0, "3 times the best peer", PUSH_PULL),
    Requirement("copy", 1, 16 * MB, 0.4, "0.4 of a copy (aim 0.55)", PUSH_PULL),
    _limit(Cell(1, 4 * KB, PUSH_PULL), "within 10 us (aim 6)"),
    _limit(IDLE, "within 150 us"),
    _limit(Cell(2, 4 * KB, PUSH_PULL), "within 40 us"),
    *(_scaling(servers) for servers in SCALED_SERVERS[:-1]),
    *(_kept(transport, variant) for transport in TRANSPORTS for variant in HELD_AGAINST),
]


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    found: dict[Cell, CellResult] = {}
    for pairs in PAIRS:
        found |= _measure_pairs(pairs, options, facts, say)
    return found | _measure_scaling(options, say) | _measure_neighbours(options, say)


def _measure_pairs(
    pairs: int, options: Options, facts: dict[str, Any], say: Say
) -> dict[Cell, CellResult]:
    cells = [Cell(pairs, size, PUSH_PULL) for size in SIZES]
    cells += [IDLE] if IDLE.ranks == pairs else []
    with contextlib.ExitStack() as stack:
        say(f"starting {pairs} servers and {pairs} workers of each")
        ours = stack.enter_context(store_jobs.commute_job(pairs, pairs))
        copy = stack.enter_context(store_jobs.copy_job(pairs))
        peers = [
            stack.enter_context(job(pairs, pairs))
            for job in (store_jobs.ray_job, store_jobs.rpc_job, store_jobs.redis_job)
        ]
        jobs = (ours, *peers, copy)
        facts.setdefault("versions", {}).update({job.name: job.version for job in jobs})
        found = {cell: _measure(cell, [Entry(job) for job in jobs], options, say) for cell in cells}
    return {cell: _with_limit(result) for cell, result in found.items()}


def _with_limit(result: CellResult) -> CellResult:
    limit = LIMITS.get(result.cell)
    return result if limit is None else result.with_entry("limit", lambda _: limit)


def _measure(cell: Cell, entries: Sequence[Entry], options: Options, say: Say) -> CellResult:
    return measure(
        cell,
        entries,
        turn_seconds=ROUND_SECONDS / len(entries),
        rounds=options.rounds,
        keep_noisy=options.keep_noisy,
        say=say,
    )


def _measure_scaling(options: Options, say: Say) -> dict[Cell, CellResult]:
    with contextlib.ExitStack() as stack:
        say("building the hosts")
        count = SCALED.ranks + SCALED_SERVERS[-1]
        hosts = stack.enter_context(Hosts(count, SCALED_LINK))
        jobs = [
            stack.enter_context(store_jobs.hosts_job(hosts, SCALED.ranks, servers))
            for servers in SCALED_SERVERS
        ]
        return {SCALED: _measure(SCALED, [Entry(job) for job in jobs], options, say)}


def _measure_neighbours(options: Options, say: Say) -> dict[Cell, CellResult]:
    def job(transport: str) -> Job:
        return store_jobs.commute_job(
            *(NEIGHBOURS.ranks, 1),
            name=transport,
            file="beside_rank.py",
            shares_memory=transport == OURS,
        )

    with contextlib.ExitStack() as stack:
        say("starting the neighbours")
        jobs = [stack.enter_context(job(transport)) for transport in TRANSPORTS]
        entries = [Entry(job, variant) for job in jobs for variant in VARIANTS]
        return {NEIGHBOURS: _measure(NEIGHBOURS, entries, options, say)}


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    for pairs in PAIRS:
        lines += ["", _pairs_title(pairs)]
        lines += _rates({size: run[Cell(pairs, size, PUSH_PULL)] for size in SIZES})
    lines += ["", f"{size_text(IDLE.bytes)} after 10 ms idle, 1 server, 1 worker: median time"]
    lines += _times([run[IDLE]], (OURS, *STORE_PEERS))
    lines += ["", *_scaling_lines(run[SCALED]), "", *_neighbour_lines(run[NEIGHBOURS])]
    return [*lines, ""]


def _pairs_title(pairs: int) -> str:
    many = "s" if pairs > 1 else ""
    return (
        f"push_pull, {pairs} server{many} and {pairs} worker{many}: median time of ours, "
        "GB/s both ways per worker, then how many times faster commute is [range]"
    )


def _rates(results: Mapping[int, CellResult]) -> list[str]:
    libraries = (OURS, *STORE_PEERS, "copy")
    rows: list[tuple[str, ...]] = [("size", "time", *libraries, "/best peer", "/copy", "dropped")]
    for size, result in results.items():
        if result.has_result:
            rates = [f"{2 * size / result.median(name) / 1e9:.3f}" for name in libraries]
            ratios = [str(compare(result, peer)) for peer in ("best peer", "copy")]
            cells = [time_text(result.median(OURS)), *rates, *ratios]
        else:
            cells = ["noise", *["noise"] * len(libraries), "-", "-"]
        rows.append((size_text(size), *cells, str(result.dropped)))
    return columns(rows)


def _times(results: Sequence[CellResult], libraries: Sequence[str]) -> list[str]:
    rows = [("size", *libraries, "dropped")]
    for result in results:
        times = (_time(result, name) for name in libraries)
        rows.append((size_text(result.cell.bytes), *times, str(result.dropped)))
    return columns(rows)


def _time(result: CellResult, name: str) -> str:
    return time_text(result.median(name)) if result.has_result else "noise"


def _scaling_lines(result: CellResult) -> list[str]:
    cell, most = result.cell, SCALED_SERVERS[-1]
    rows = [("servers", "time", "Mbit/s per server", f"/{most} servers", "dropped")]
    for servers in SCALED_SERVERS:
        name = f"{OURS} x{servers}"
        rate, ratio = "noise", "-"
        if result.has_result:
            bytes_per_server = cell.ranks * cell.bytes / servers
            rate = f"{bytes_per_server / result.median(name) * 8 / 1e6:.0f}"
            ratio = str(compare(result, name, f"{OURS} x{most}"))
        rows.append((str(servers), _time(result, name), rate, ratio, str(result.dropped)))
    title = (
        f"{cell.ranks} workers, {size_text(cell.bytes)}, hosts with links of {SCALED_LINK}: "
        "time of an exchange"
    )
    return [title, *columns(rows)]


def _neighbour_lines(result: CellResult) -> list[str]:
    pairs = [*HELD_AGAINST.items(), ("flood", "ordinary"), ("flood", "alone")]
    rows = [("transport", *VARIANTS, *(f"{ours}/{other}" for ours, other in pairs), "dropped")]
    for transport, title in TRANSPORTS.items():
        times = [_time(result, f"{transport} {variant}") for variant in VARIANTS]
        shares = [
            str(compare(result, f"{transport} {other}", f"{transport} {ours}") or "-")
            for ours, other in pairs
        ]
        rows.append((title, *times, *shares, str(result.dropped)))
    title = (
        f"{result.cell.ranks - 1} workers exchange {size_text(result.cell.bytes)} with 1 server, "
        "staleness None: time beside a third that does nothing, exchanges too, computes, floods or "
        "is stopped; then the share of their rate that they keep [range]"
    )
    return [title, *columns(rows)]


def prepare() -> None:
    network.require_tools()
    setup_peers.set_up(("gloo", "ray", "redis", "plot"))
    commute_command()


QUESTION = Question(
    name="store",
    title="the store: dense push_pull of float32, the server adding up",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
