# SPDX-License-Identifier: Apache-2.0
"""How each MPI is started, and in which of its waiting modes it is fastest here.

An MPI rank that waits may spin, yield or sleep, and which is best depends on ranks and cores. A
peer must not be beaten by its own defaults, so each mode is tried in a short pre-run and the
fastest (geometric mean over four sizes) is measured.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.jobs import Job, Program, scratch_folder, worker
from benchmarks.rounds import Cell, Entry
from benchmarks.setup_peers import program_of, python_of

MPIS = ("openmpi", "mpich", "impi")
VARIANTS = ("in place", "out of place")
TRIAL_BYTES = (8, 64 << 10, 1 << 20, 16 << 20)
TRIAL_SAMPLES = 5
TRIAL_PASSES = 3


@dataclass(frozen=True)
class Mode:
    name: str
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


INSTALLED = Mode("as installed")
MODES: dict[str, tuple[Mode, ...]] = {
    "openmpi": (
        INSTALLED,
        Mode("yield", options=("--mca", "mpi_yield_when_idle", "1")),
        Mode("spin", options=("--mca", "mpi_yield_when_idle", "0")),
    ),
    "mpich": (
        INSTALLED,
        Mode("yield", env=(("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),)),
        Mode("spin", env=(("MPIR_CVAR_POLLS_BEFORE_YIELD", "0"),)),
    ),
    "impi": (
        INSTALLED,
        Mode("yield", env=(("I_MPI_THREAD_YIELD", "2"),)),
        Mode("wait mode", env=(("I_MPI_WAIT_MODE", "1"),)),
        Mode("unpinned", env=(("I_MPI_PIN", "0"),)),
    ),
}
# Open MPI refuses to start as root, and more ranks than cores, unless told.
_OPENMPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OPENMPI_OPTIONS = ("--oversubscribe",)


def mpi_job(mpi: str, *, ranks: int, mode: Mode) -> Job:
    scratch = scratch_folder()
    own_options = _OPENMPI_OPTIONS if mpi == "openmpi" else ()
    argv = (
        str(program_of(mpi, "mpiexec")),
        *own_options,
        *mode.options,
        "-n",
        str(ranks),
        str(python_of(mpi)),
        worker("mpi_rank.py"),
        Job.socket_in(scratch),
    )
    env = {**(_OPENMPI_ENV if mpi == "openmpi" else {}), **dict(mode.env)}
    return Job(mpi, ranks=ranks, programs=[Program(argv, env)], scratch=scratch)


def best_mode(mpi: str, *, ranks: int, say: Callable[[str], None]) -> Mode:
    say(f"choosing the waiting mode of {mpi} with {ranks} ranks")
    with contextlib.ExitStack() as stack:
        jobs = {
            mode: stack.enter_context(mpi_job(mpi, ranks=ranks, mode=mode)) for mode in MODES[mpi]
        }
        best = {(mode, size): math.inf for mode in jobs for size in TRIAL_BYTES}
        # Passes alternate between the modes and the best of them counts: noise only adds time.
        for size in TRIAL_BYTES:
            for _ in range(TRIAL_PASSES):
                for mode, job in jobs.items():
                    seconds = Entry(job).seconds(Cell(ranks, size), TRIAL_SAMPLES)
                    best[mode, size] = min(best[mode, size], seconds)
        return min(jobs, key=lambda mode: sum(math.log(best[mode, s]) for s in TRIAL_BYTES))
