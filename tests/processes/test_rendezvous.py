# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher has started find the coordinator of rank 0.

torchrun and the MPIs are run for real; each rank meets twice under one name, as a script does that
opens a world again after closing it.
"""

from __future__ import annotations

import secrets
import socket
import sys

import pytest

SCRIPT = """
import os, sys, time
from commute.cluster.control import Frame, Kind, Leave, encode
from commute.cluster.environment import detect
from commute.cluster.join import join
from commute.cluster.rendezvous import find_coordinator
place = detect(os.environ)
for _ in range(2):
    address, token = find_coordinator(place, "world", time.monotonic() + 30)
    membership, connector = join(
        place.rank, place.size, place.local_rank, place.local_size, address, token, place.run,
        name="world", join_timeout=30,
    )
    os.write(1, f"rank {place.rank} met {len(membership.members)} by {place.source}\\n".encode())
    leave = Frame(Kind.LEAVE, Leave.FINISHED, rank=place.rank, by=place.rank)
    os.write(membership.coordinator_fd, encode(leave))
    os.close(membership.coordinator_fd)
    connector.close()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def check(ended, source):
    assert ended.code == 0, ended.err
    for rank in range(3):
        assert ended.out.count(f"rank {rank} met 3 by {source}") == 2


def test_torchrun(job, script):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    check(job([*torchrun, script], timeout=55.0).wait(), "torchrun")


def test_torchrun_without_its_store(job, script):
    """Nobody waits where nobody will come: the error says what to export."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = job([sys.executable, script], env={**env, **address}).wait()

    assert ended.code == 1
    assert "export COMMUTE_COORDINATOR=" in ended.err
    assert "TORCHELASTIC_USE_AGENT_STORE is not True" in ended.err


def test_open_mpi(job, script, mpiexec, tmp_path):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec("openmpi"), "--oversubscribe", "-n", "3", sys.executable, script]
    check(job(command, env={**root, "XDG_RUNTIME_DIR": str(tmp_path)}).wait(), "Open MPI")
    assert list((tmp_path / f"commute-{tmp_path.stat().st_uid}").iterdir()) == []


def test_mpich(job, script, mpiexec, tmp_path):
    """A shell between launcher and rank does no harm."""
    command = [mpiexec("mpich"), "-n", "3", "sh", "-c", f"{sys.executable} {script}; exit $?"]
    check(job(command, env={"XDG_RUNTIME_DIR": str(tmp_path)}).wait(), "MPICH/PMI")
    assert list((tmp_path / f"commute-{tmp_path.stat().st_uid}").iterdir()) == []


def test_a_slurm_step_as_recorded(job, script, tmp_path):
    """Three processes with the variables of one step, as srun would start them."""
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_STEP_NODELIST": "n01",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    ranks = [
        job(
            [sys.executable, script],
            env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(3)
    ]

    for rank, started in enumerate(ranks):
        assert started.wait().out == f"rank {rank} met 3 by a Slurm step\n" * 2


def test_a_given_address(job, script):
    """Rank 0 starts the coordinator where COMMUTE_COORDINATOR says, also for the second meeting."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"COMMUTE_COORDINATOR": address, "COMMUTE_TOKEN": secrets.token_hex(32)}
    env |= {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    ranks = [
        job([sys.executable, script], env={**env, "PMI_RANK": str(r), "MPI_LOCALRANKID": str(r)})
        for r in range(3)
    ]

    for rank, started in enumerate(ranks):
        assert started.wait().out == f"rank {rank} met 3 by MPICH/PMI\n" * 2
