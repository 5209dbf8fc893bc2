# SPDX-License-Identifier: Apache-2.0
"""How fast is an allreduce between the processes of one host, beside gloo and three MPIs?

    python -m benchmarks.one_host [--runs 3] [--large]

Float32 sum, in place, through each library's Python interface. The MPIs run as they are fastest:
each in its best waiting mode, in or out of place. "copy" is the physical limit: every rank copies
its array once, all at the same time.
"""

import contextlib
import sys
from typing import Any

from benchmarks import mpi_modes, setup_peers
from benchmarks.figures import NO_SLOWER, OURS, Requirement, Run, compare, entries_of
from benchmarks.jobs import Job, Program, scratch_folder, worker
from benchmarks.rounds import Cell, CellResult, Entry, measure, size_text, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse

RANKS = (2, 4)
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
LARGE = (256 << 20,)
# Nine turns of this length make a round of over a second, which the noise guard needs.
TURN_SECONDS = 0.15

REQUIREMENTS = [
    Requirement("gloo", ranks, size, NO_SLOWER, "no slower than gloo")
    for ranks in RANKS
    for size in SIZES
]


def commute_job(ranks: int) -> Job:
    scratch = scratch_folder()
    argv = (commute_command(), "run", "-n", str(ranks), worker("commute_rank.py"))
    program = Program((*argv, Job.socket_in(scratch)), {})
    return Job(OURS, ranks=ranks, programs=[program], scratch=scratch)


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
    for ranks in RANKS:
        found |= _measure_ranks(ranks, options, facts, say)
    return found


def _measure_ranks(
    ranks: int, options: Options, facts: dict[str, Any], say: Say
) -> dict[Cell, CellResult]:
    modes = _modes(ranks, facts, say)
    with contextlib.ExitStack() as stack:
        say(f"starting the libraries with {ranks} ranks")
        entries = [
            Entry(stack.enter_context(commute_job(ranks))),
            Entry(stack.enter_context(gloo_job(ranks))),
            Entry(stack.enter_context(copy_job(ranks)), "out of place"),
        ]
        for mpi, mode in modes.items():
            job = stack.enter_context(mpi_modes.mpi_job(mpi, ranks=ranks, mode=mode))
            entries += [Entry(job, variant) for variant in mpi_modes.VARIANTS]
        facts.setdefault("versions", {}).update({e.job.name: e.job.version for e in entries})
        sizes = (*SIZES, *LARGE) if options.large else SIZES
        return {
            (cell := Cell(ranks, size)): measure(
                cell,
                entries,
                turn_seconds=TURN_SECONDS,
                rounds=options.rounds,
                keep_noisy=options.keep_noisy,
                say=say,
            )
            for size in sizes
        }


def _modes(ranks: int, facts: dict[str, Any], say: Say) -> dict[str, mpi_modes.Mode]:
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
    header = ("size", OURS, "gloo", *mpi_modes.MPIS, "copy", "/gloo", "/fastest MPI", "dropped")
    for ranks in RANKS:
        cells = [result for cell, result in run.items() if cell.ranks == ranks]
        lines += [f"{ranks} ranks: median time, then how many times faster commute is [range]"]
        lines += [*columns([header, *(_row(result) for result in cells)]), ""]
    return lines


def _row(result: CellResult) -> tuple[str, ...]:
    size = size_text(result.cell.bytes)
    libraries = (OURS, "gloo", *mpi_modes.MPIS, "copy")
    if not result.has_result:
        return (size, *("noise" for _ in libraries), "-", "-", str(result.dropped))
    times = (result.median(result.fastest(entries_of(name, result))) for name in libraries)
    ratios = (str(compare(result, peer)) for peer in ("gloo", "mpi"))
    return (size, *(time_text(seconds) for seconds in times), *ratios, str(result.dropped))


def prepare() -> None:
    setup_peers.set_up()
    commute_command()


QUESTION = Question(
    name="one_host",
    title="one host: allreduce of float32 between processes, in place",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
