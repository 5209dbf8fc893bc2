# SPDX-License-Identifier: Apache-2.0
"""What do arrays of `world.empty` gain, and how do the collectives of blocks fare, beside MPI?

    python -m benchmarks.every_collective [--runs 3]

Processes of one host, float32, through each library's Python interface. "commute empty" reduces
arrays that all ranks reach; the MPIs reduce arrays of their own, in or out of place, whichever is
quicker. alltoall, gather and scatter are out of place, of ordinary arrays; "commute from empty"
takes blocks out of arrays that all ranks reach. "commute persistent" starts an operation that is
bound already and waits for it. What is marked "aim" is shown, not required.
"""

import contextlib
import sys
from typing import Any

from benchmarks import mpi_modes, setup_peers
from benchmarks.figures import NO_SLOWER, OURS, Requirement, Run, compare
from benchmarks.one_host import commute_job, measure_cell, modes_of, rows_of, title_of
from benchmarks.rounds import Cell, CellResult, Entry, size_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse
from benchmarks.workers.turns import EMPTY, FROM_EMPTY, PERSISTENT

MB = 1 << 20
OURS_EMPTY, OURS_PERSISTENT = f"{OURS} {EMPTY}", f"{OURS} {PERSISTENT}"
OURS_FROM_EMPTY = f"{OURS} {FROM_EMPTY}"

# Ranks -> size -> how many times faster than the fastest MPI an allreduce of empty() must be.
DIRECT: dict[int, dict[int, float]] = {
    2: {1 * MB: 2.0, 16 * MB: 3.0, 64 * MB: 3.0, 256 * MB: 3.0},
    4: {16 * MB: 2.5, 64 * MB: 2.5},
}
BLOCKS = [Cell(n, 16 * MB, call) for n in DIRECT for call in ("alltoall", "gather", "scatter")]
FETCHED = ("alltoall", "scatter")  # out of arrays of empty() too
AIMS = [Cell(2, 0, "barrier"), Cell(2, 8, "broadcast"), Cell(2, 8)]
PERSISTENT_SECONDS_AIM = 1e-6

REQUIREMENTS = [
    *(
        Requirement("mpi", ranks, size, ratio, f"empty(): {ratio:g} times MPI", ours=OURS_EMPTY)
        for ranks, sizes in DIRECT.items()
        for size, ratio in sizes.items()
    ),
    *(
        Requirement("mpi", cell.ranks, cell.bytes, NO_SLOWER, "no slower than MPI", cell.call)
        for cell in BLOCKS
    ),
]


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    found: dict[Cell, CellResult] = {}
    for ranks in DIRECT:
        modes = modes_of(ranks, facts, say)
        with contextlib.ExitStack() as stack:
            say(f"starting the libraries with {ranks} ranks")
            ours = stack.enter_context(commute_job(ranks))
            mpis = [
                stack.enter_context(mpi_modes.mpi_job(mpi, ranks=ranks, mode=mode))
                for mpi, mode in modes.items()
            ]
            versions = {job.name: job.version for job in (ours, *mpis)}
            facts.setdefault("versions", {}).update(versions)
            both = [Entry(mpi, variant) for mpi in mpis for variant in mpi_modes.VARIANTS]
            for size in DIRECT[ranks]:
                entries = [Entry(ours), Entry(ours, EMPTY), *both]
                found[Cell(ranks, size)] = measure_cell(Cell(ranks, size), entries, options, say)
            for cell in (cell for cell in (*BLOCKS, *AIMS) if cell.ranks == ranks):
                variant = "out of place" if cell in BLOCKS else "in place"
                entries = [Entry(job, variant) for job in (ours, *mpis)]
                if cell.call in FETCHED:
                    entries.append(Entry(ours, FROM_EMPTY))
                if cell.call == "allreduce":
                    entries.append(Entry(ours, PERSISTENT))
                found[cell] = measure_cell(cell, entries, options, say)
    return found


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    modes = ", ".join(f"{where} {mode}" for where, mode in facts["mpi_modes"].items())
    lines += [f"waiting modes: {modes}", ""]
    told = "median time, then how many times faster commute is [range]"
    for ranks, sizes in DIRECT.items():
        rows = {size_text(size): run[Cell(ranks, size)] for size in sizes}
        lines += [f"allreduce, {ranks} ranks, in arrays of empty(): {told}"]
        libraries = (OURS, OURS_EMPTY, *mpi_modes.MPIS)
        lines += [*rows_of("size", rows, libraries, ("mpi",), OURS_EMPTY), ""]
    blocks = {title_of(cell): run[cell] for cell in BLOCKS}
    lines += [f"blocks: {told}"]
    lines += [*rows_of("call", blocks, (OURS, *mpi_modes.MPIS), ("mpi",)), ""]
    fetched = {title_of(cell): run[cell] for cell in BLOCKS if cell.call in FETCHED}
    lines += [f"the same out of arrays of empty(): {told}"]
    out_of_empty = (OURS_FROM_EMPTY, *mpi_modes.MPIS)
    lines += [*rows_of("call", fetched, out_of_empty, ("mpi",), OURS_FROM_EMPTY), ""]
    aims = {title_of(cell): run[cell] for cell in AIMS}
    lines += [f"aims, no slower than MPI: {told}"]
    lines += [*rows_of("call", aims, (OURS, *mpi_modes.MPIS), ("mpi",)), ""]
    return [*lines, *_persistent(run[Cell(2, 8)]), ""]


def _persistent(result: CellResult) -> list[str]:
    if not result.has_result:
        return ["allreduce_init of 8 B: noise"]
    seconds = result.median(OURS_PERSISTENT)
    aim = f"{PERSISTENT_SECONDS_AIM * 1e6:g} us"
    rows = [
        ("allreduce_init of 8 B, 2 ranks", "aim", "/plain call"),
        (f"{seconds * 1e6:.2f} us", aim, str(compare(result, OURS, OURS_PERSISTENT))),
    ]
    return columns(rows)


def prepare() -> None:
    setup_peers.set_up((*mpi_modes.MPIS, "plot"))
    commute_command()


QUESTION = Question(
    name="every_collective",
    title="one host: arrays of empty(), collectives of blocks, persistent operations",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
