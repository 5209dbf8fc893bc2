# SPDX-License-Identifier: Apache-2.0
"""How fast are collectives between the processes of one host, beside gloo and three MPIs?

    python -m benchmarks.one_host [--runs 3]

Float32 sum, in place, through each library's Python interface. The MPIs run as they are fastest:
each in its best waiting mode, in or out of place. "copy" is the physical limit: every rank copies
its array once, all at the same time. With more ranks than that (a "crowd") there are no peers: an
allreduce is held against our own with fewer ranks, a rank that waits against a share of a core.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import mpi_modes, setup_peers
from benchmarks.figures import NO_SLOWER, OURS, Requirement, Run, compare, entries_of
from benchmarks.jobs import Job, Program, scratch_folder, worker
from benchmarks.rounds import Cell, CellResult, Entry, measure, size_text, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse
from benchmarks.workers.calls import WAIT

KB, MB = 1 << 10, 1 << 20
# The turns of a round share this time; the noise guard needs over a second.
ROUND_SECONDS = 1.35

# Ranks -> size -> how many times faster than the fastest MPI, and than gloo, an allreduce must be.
ALLREDUCE: dict[int, dict[int, tuple[float, float]]] = {
    2: {
        8: (1.5, 50),
        1 * KB: (1.5, 50),
        64 * KB: (1.5, NO_SLOWER),
        1 * MB: (1.2, NO_SLOWER),
        16 * MB: (1.5, 4),
        64 * MB: (1.5, 4),
        256 * MB: (1.5, 4),
    },
    4: {
        8: (1.5, NO_SLOWER),
        1 * KB: (1.5, NO_SLOWER),
        64 * KB: (1.5, NO_SLOWER),
        1 * MB: (1.1, NO_SLOWER),
        16 * MB: (1.2, NO_SLOWER),
        64 * MB: (1.2, NO_SLOWER),
    },
}
# Commute has no allgather or reduce_scatter in place, so the MPIs do the same work: out of place.
VARIANT_OF = {
    "broadcast": "in place",
    "allgather": "out of place",
    "reduce_scatter": "out of place",
    "barrier": "in place",
}
OTHER_CELLS = [
    *(Cell(n, 16 * MB, call) for call in VARIANT_OF if call != "barrier" for n in ALLREDUCE),
    Cell(4, 0, "barrier"),
]
CROWD, CROWD_BESIDE = 8, 4
CROWDED_ALLREDUCE = Cell(CROWD, 1 * KB)
CROWDED_WAIT = Cell(CROWD, 0, WAIT)
CROWDED_TIMES_MAX = 5.0  # the time of the crowd, over that of the ranks beside it
WAIT_CPU_SECONDS_MAX = 0.05  # of the second that a rank waits


def _at_least(peer: str, cell: Cell, ratio: float) -> Requirement:
    name = "MPI" if peer == "mpi" else peer
    words = f"no slower than {name}" if ratio == NO_SLOWER else f"{ratio:g} times {name}"
    return Requirement(peer, cell.ranks, cell.bytes, ratio, words, cell.call)


def _within_limit(cell: Cell, words: str) -> Requirement:
    return Requirement("limit", cell.ranks, cell.bytes, 1.0, words, cell.call)


REQUIREMENTS = [
    *(
        _at_least(peer, Cell(ranks, size), ratio)
        for ranks, sizes in ALLREDUCE.items()
        for size, ratios in sizes.items()
        for peer, ratio in zip(("mpi", "gloo"), ratios, strict=True)
    ),
    *(_at_least("mpi", cell, NO_SLOWER) for cell in OTHER_CELLS),
    _within_limit(CROWDED_ALLREDUCE, f"under {CROWDED_TIMES_MAX:g} times {CROWD_BESIDE} ranks"),
    _within_limit(CROWDED_WAIT, f"under {WAIT_CPU_SECONDS_MAX:.0%} of a core"),
]


def commute_job(ranks: int, name: str = OURS) -> Job:
    scratch = scratch_folder()
    argv = (commute_command(), "run", "-n", str(ranks), worker("commute_rank.py"))
    program = Program((*argv, Job.socket_in(scratch)), {})
    return Job(name, ranks=ranks, programs=[program], scratch=scratch)


def gloo_job(ranks: int) -> Job:
    scratch = scratch_folder()
    python = str(setup_peers.python_of("gloo"))
    argv = (python, worker("gloo_rank.py"), Job.socket_in(scratch))
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    programs = [
        Program((*argv, str(rank), str(ranks), str(scratch / "store")), env)
        for rank in range(ranks)
    ]
    return Job("gloo", ranks=ranks, programs=programs, scratch=scratch)


def copy_job(ranks: int) -> Job:
    scratch = scratch_folder()
    argv = (sys.executable, worker("copy_rank.py"), Job.socket_in(scratch))
    programs = [Program((*argv, str(rank), str(ranks)), {}) for rank in range(ranks)]
    return Job("copy", ranks=ranks, programs=programs, scratch=scratch)


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    found: dict[Cell, CellResult] = {}
    for ranks in ALLREDUCE:
        found |= _measure_beside_peers(ranks, options, facts, say)
    return found | _measure_crowd(options, say)


def _measure_beside_peers(
    ranks: int, options: Options, facts: dict[str, Any], say: Say
) -> dict[Cell, CellResult]:
    modes = modes_of(ranks, facts, say)
    cells = [Cell(ranks, size) for size in ALLREDUCE[ranks]]
    cells += [cell for cell in OTHER_CELLS if cell.ranks == ranks]
    with contextlib.ExitStack() as stack:
        say(f"starting the libraries with {ranks} ranks")
        ours, gloo, copy = (
            stack.enter_context(job(ranks)) for job in (commute_job, gloo_job, copy_job)
        )
        mpis = [
            stack.enter_context(mpi_modes.mpi_job(mpi, ranks=ranks, mode=mode))
            for mpi, mode in modes.items()
        ]
        versions = {job.name: job.version for job in (ours, gloo, copy, *mpis)}
        facts.setdefault("versions", {}).update(versions)
        allreduces = [
            *(Entry(ours), Entry(gloo), Entry(copy, "out of place")),
            *(Entry(mpi, variant) for mpi in mpis for variant in mpi_modes.VARIANTS),
        ]
        entries = {"allreduce": allreduces} | {
            call: [Entry(job, variant) for job in (ours, *mpis)]
            for call, variant in VARIANT_OF.items()
        }
        return {cell: measure_cell(cell, entries[cell.call], options, say) for cell in cells}


def measure_cell(cell: Cell, entries: Sequence[Entry], options: Options, say: Say) -> CellResult:
    return measure(
        cell,
        entries,
        turn_seconds=ROUND_SECONDS / len(entries),
        rounds=options.rounds,
        keep_noisy=options.keep_noisy,
        say=say,
    )


def _measure_crowd(options: Options, say: Say) -> dict[Cell, CellResult]:
    """Ours alone; what a figure is held against becomes the entry "limit"."""
    beside_name = f"{OURS} x{CROWD_BESIDE}"

    def allreduce_limit(seconds: Mapping[str, float]) -> float:
        return CROWDED_TIMES_MAX * seconds[beside_name]

    with contextlib.ExitStack() as stack:
        say(f"starting {OURS} with {CROWD} ranks")
        crowd = Entry(stack.enter_context(commute_job(CROWD)))
        beside = Entry(stack.enter_context(commute_job(CROWD_BESIDE, beside_name)))
        allreduce = measure_cell(CROWDED_ALLREDUCE, [crowd, beside], options, say)
        wait = measure_cell(CROWDED_WAIT, [crowd], options, say)
    return {
        CROWDED_ALLREDUCE: allreduce.with_entry("limit", allreduce_limit),
        CROWDED_WAIT: wait.with_entry("limit", lambda _: WAIT_CPU_SECONDS_MAX),
    }


def modes_of(ranks: int, facts: dict[str, Any], say: Say) -> dict[str, mpi_modes.Mode]:
    """The best mode of each MPI, found once for all runs."""
    chosen: dict[str, str] = facts.setdefault("mpi_modes", {})
    for mpi in mpi_modes.MPIS:
        if f"{mpi} x{ranks}" not in chosen:
            chosen[f"{mpi} x{ranks}"] = mpi_modes.best_mode(mpi, ranks=ranks, say=say).name
    return {
        mpi: next(m for m in mpi_modes.MODES[mpi] if m.name == chosen[f"{mpi} x{ranks}"])
        for mpi in mpi_modes.MPIS
    }


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    modes = ", ".join(f"{where} {mode}" for where, mode in facts["mpi_modes"].items())
    lines += [f"waiting modes: {modes}", ""]
    told = "median time, then how many times faster commute is [range]"
    for ranks, sizes in ALLREDUCE.items():
        rows = {size_text(size): run[Cell(ranks, size)] for size in sizes}
        libraries = (OURS, "gloo", *mpi_modes.MPIS, "copy")
        lines += [f"allreduce, {ranks} ranks: {told}"]
        lines += [*rows_of("size", rows, libraries, ("gloo", "mpi")), ""]
    others = {title_of(cell): run[cell] for cell in OTHER_CELLS}
    lines += [f"other calls: {told}"]
    lines += [*rows_of("call", others, (OURS, *mpi_modes.MPIS), ("mpi",)), ""]
    crowded = {
        title_of(CROWDED_ALLREDUCE): run[CROWDED_ALLREDUCE],
        "CPU time of a rank that waits for a second": run[CROWDED_WAIT],
    }
    lines += [f"{CROWD} ranks on {len(os.sched_getaffinity(0))} cores: {told}"]
    return [*lines, *rows_of("what", crowded, (OURS, "limit"), ("limit",)), ""]


def title_of(cell: Cell) -> str:
    array = f" of {size_text(cell.bytes)}" if cell.bytes else ""
    return f"{cell.call}{array}, {cell.ranks} ranks"


def rows_of(
    heading: str,
    results: Mapping[str, CellResult],
    libraries: Sequence[str],
    peers: Sequence[str],
    ours: str = OURS,
) -> list[str]:
    """A table: a row per result, a time per library, a ratio per peer."""
    ratio_headings = ("/fastest MPI" if peer == "mpi" else f"/{peer}" for peer in peers)
    rows = [(heading, *libraries, *ratio_headings, "dropped")]
    for title, result in results.items():
        if result.has_result:
            medians = (result.median(result.fastest(entries_of(x, result))) for x in libraries)
            times = [time_text(seconds) for seconds in medians]
            ratios = [str(compare(result, peer, ours)) for peer in peers]
        else:
            times, ratios = ["noise"] * len(libraries), ["-"] * len(peers)
        rows.append((title, *times, *ratios, str(result.dropped)))
    return columns(rows)


def prepare() -> None:
    setup_peers.set_up(("gloo", *mpi_modes.MPIS, "plot"))
    commute_command()


QUESTION = Question(
    name="one_host",
    title="one host: collectives of float32 between processes",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
