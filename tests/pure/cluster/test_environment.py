# SPDX-License-Identifier: Apache-2.0
"""Where a process stands in its job, from environments recorded under the real launchers.

torchrun 2.13, Open MPI 5.0.11, prterun and MPICH 5.0.2 were run to record theirs; those of Slurm
are what its documentation and public reports show.
"""

from __future__ import annotations

import itertools

import pytest

from commute._errors import JoinError
from commute.cluster.environment import Place, detect, expand_nodes

TOKEN = "ab" * 32

COMMUTE = {
    "COMMUTE_RANK": "3",
    "COMMUTE_SIZE": "4",
    "COMMUTE_LOCAL_RANK": "1",
    "COMMUTE_LOCAL_SIZE": "2",
    "COMMUTE_COORDINATOR": "10.0.0.4:29500",
    "COMMUTE_TOKEN": TOKEN,
    "COMMUTE_RUN": "c3ef5ecc13527ab1",
}
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "38401",
    "RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "d40032a8-0500-49b3-ba43-31a05672f213",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "hosta",
    "PMIX_NAMESPACE": "prterun-hosta-5238@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-hosta-5238@0.0;tcp4://127.0.0.1:57485",
}
PRTERUN = {
    "PMIX_HOSTNAME": "hosta",
    "PMIX_NAMESPACE": "prterun-hosta-6668@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-hosta-6668@0.0;tcp4://127.0.0.1:36093",
    "PRTE_LAUNCHED": "1",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "hosta",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLURM = {
    "SLURMD_NODENAME": "n01",
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "n01",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n01",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
SLURM_HOSTS = {
    **SLURM,
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[01-02,07]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
SLURM_PMIX = {
    **SLURM,
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "slurm.pmix.901593.0",
    "SLURM_PMIXP_ABORT_AGENT_PORT": "42831",
}
SLURM_PMI2 = {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "13", "PMI_JOBID": "901593.0"}


def where(place: Place) -> tuple[int, int, int, int]:
    return place.rank, place.size, place.local_rank, place.local_size


@pytest.mark.parametrize(
    ("env", "source", "expected", "meeting"),
    [
        (COMMUTE, "commute run", (3, 4, 1, 2), "given"),
        (TORCHRUN, "torchrun", (1, 2, 1, 2), "store"),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2), "file"),
        ({**PRTERUN, "COMMUTE_SIZE": "3"}, "PMIx", (1, 3, 1, 3), "file"),
        (SLURM_PMIX, "PMIx", (1, 4, 1, 4), "file"),
        (MPICH, "MPICH/PMI", (1, 2, 1, 2), "file"),
        (SLURM_PMI2, "MPICH/PMI", (1, 4, 1, 4), "file"),
        (SLURM, "a Slurm step", (1, 4, 1, 4), "file"),
        ({}, "alone", (0, 1, 0, 1), "none"),
    ],
)
def test_recorded_environments(env, source, expected, meeting):
    """Each launcher's own variables give the place."""
    place = detect(env)

    assert (place.source, where(place), place.meeting) == (source, expected, meeting)


def test_order_of_launchers():
    """Where several launchers are nested, the innermost in the documented order wins."""
    layers = [COMMUTE, TORCHRUN, OPEN_MPI, MPICH, SLURM]
    names = ["commute run", "torchrun", "Open MPI", "MPICH/PMI", "a Slurm step"]
    for index, name in enumerate(names):
        merged = {k: v for layer in reversed(layers[index:]) for k, v in layer.items()}
        assert detect(merged).source == name
    assert detect({**COMMUTE, **TORCHRUN}, rank=0, size=2).source == "arguments"


def test_describe_names_the_variables():
    assert detect(TORCHRUN).describe() == "rank 1 of 2 from torchrun (RANK, WORLD_SIZE)"
    assert detect(COMMUTE).describe() == (
        "rank 3 of 4 from commute run (COMMUTE_RANK, COMMUTE_SIZE); coordinator 10.0.0.4:29500"
    )
    assert "alone" in detect({}).describe()


def test_the_token_is_not_shown():
    assert TOKEN not in repr(detect(COMMUTE)) + detect(COMMUTE).describe()


REQUIRED = {
    "commute run": (COMMUTE, list(COMMUTE)),
    "torchrun": (
        TORCHRUN,
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
    ),
    "Open MPI": (
        {k: v for k, v in OPEN_MPI.items() if not k.startswith("PMIX")},
        [f"OMPI_COMM_WORLD_{w}" for w in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    ),
    "MPICH/PMI": (MPICH, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    "a Slurm step": (SLURM, ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]),
}


@pytest.mark.parametrize(
    ("source", "missing"),
    [(source, name) for source, (_, names) in REQUIRED.items() for name in names],
)
def test_half_set_environment(source, missing):
    """An incomplete set of variables is an error that names the launcher and what is missing."""
    env = {k: v for k, v in REQUIRED[source][0].items() if k != missing}

    with pytest.raises(JoinError, match=missing) as error:
        detect(env)

    assert source in str(error.value)


def test_an_empty_variable_is_missing():
    with pytest.raises(JoinError, match="WORLD_SIZE is not set"):
        detect({**TORCHRUN, "WORLD_SIZE": ""})


@pytest.mark.parametrize(
    ("env", "change", "said"),
    [
        (TORCHRUN, {"RANK": "2"}, "RANK should be from 0 to 1 as WORLD_SIZE is 2, got 2"),
        (TORCHRUN, {"RANK": "-1"}, "RANK should be a whole number"),
        (TORCHRUN, {"RANK": "1.5"}, "RANK should be a whole number"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE should be at least 1"),
        (TORCHRUN, {"MASTER_PORT": "x"}, "MASTER_PORT should be"),
        (MPICH, {"PMI_SIZE": "two"}, "PMI_SIZE should be a whole number"),
        (MPICH, {"MPI_LOCALRANKID": "5"}, "local rank 5 of 2 does not fit"),
        (COMMUTE, {"COMMUTE_COORDINATOR": "nowhere"}, "host:port"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "no count"),
        (SLURM, {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3"),
    ],
)
def test_senseless_values(env, change, said):
    """A value that cannot be is named together with its variable."""
    with pytest.raises(JoinError) as error:
        detect({**env, **change})

    assert said in str(error.value)


# ---- explicit arguments ----


def test_arguments():
    """Ranks on loopback are all local; elsewhere each is taken to be alone on its host."""
    here = detect({}, rank=1, size=3, coordinator="127.0.0.1:7000", token=TOKEN)
    there = detect({}, rank=0, size=3, coordinator="[fd00::1]:7000", token=TOKEN)
    told = detect({}, rank=2, size=3, coordinator="a:7000", token=TOKEN, local_rank=1, local_size=2)

    assert (where(here), here.starts_coordinator) == ((1, 3, 1, 3), False)
    assert (where(there), there.starts_coordinator) == ((0, 3, 0, 1), True)
    assert where(told) == (2, 3, 1, 2)
    assert here.run == there.run == told.run


def test_incomplete_arguments():
    with pytest.raises(JoinError, match="size= is missing"):
        detect({}, rank=0)
    with pytest.raises(JoinError, match="rank= is missing"):
        detect({}, size=2)
    with pytest.raises(JoinError, match="COMMUTE_COORDINATOR and COMMUTE_TOKEN"):
        detect({}, rank=0, size=2)
    with pytest.raises(JoinError, match="COMMUTE_TOKEN"):
        detect({}, rank=0, size=2, coordinator="a:7000")
    with pytest.raises(JoinError, match="rank="):
        detect({}, rank=2, size=2, coordinator="a:7000", token=TOKEN)


def test_a_world_of_one_needs_nothing():
    place = detect({}, rank=0, size=1)

    assert (place.meeting, place.starts_coordinator) == ("none", False)


# ---- how they meet ----


def test_commute_run_has_started_the_coordinator():
    assert not detect({**COMMUTE, "COMMUTE_RANK": "0"}).starts_coordinator


def test_rank_0_starts_the_coordinator():
    for env, name in ((TORCHRUN, "RANK"), (MPICH, "PMI_RANK"), (SLURM, "SLURM_PROCID")):
        assert detect({**env, name: "0"}).starts_coordinator
        assert not detect(env).starts_coordinator


def test_an_address_by_hand_goes_before_the_launchers_way():
    by_hand = {"COMMUTE_COORDINATOR": "hosta:7000", "COMMUTE_TOKEN": TOKEN}
    for env in (TORCHRUN, OPEN_MPI, MPICH, SLURM_HOSTS):
        place = detect({**env, **by_hand})
        assert (place.meeting, place.coordinator, place.token) == ("given", "hosta:7000", TOKEN)


def test_restarts_under_torchrun_do_not_meet():
    first, second = detect(TORCHRUN), detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})

    assert first.run != second.run
    assert first.job != second.job
    assert len(first.run) <= 32


def test_torchrun_meets_at_the_store():
    assert detect(TORCHRUN).store == "localhost:38401"
    assert detect({**TORCHRUN, "MASTER_ADDR": "fd00::1"}).store == "[fd00::1]:38401"


def test_mpi_on_several_hosts_says_what_to_export():
    env = {**MPICH, "PMI_SIZE": "4"}

    with pytest.raises(JoinError, match=r"export COMMUTE_COORDINATOR=.* and COMMUTE_TOKEN="):
        detect(env)


def test_slurm_on_several_hosts_needs_only_a_token():
    """The address is the first node's, with a port that only this step has."""
    with pytest.raises(JoinError, match="export COMMUTE_TOKEN="):
        detect(SLURM_HOSTS)
    place = detect({**SLURM_HOSTS, "COMMUTE_TOKEN": TOKEN})
    other = detect({**SLURM_HOSTS, "COMMUTE_TOKEN": TOKEN, "SLURM_STEP_ID": "1"})

    assert where(place) == (4, 5, 0, 1)
    assert place.coordinator is not None
    host, _, port = place.coordinator.rpartition(":")
    assert (host, 15000 <= int(port) < 30000) == ("n01", True)
    assert other.coordinator != place.coordinator


def test_pmix_without_a_size():
    with pytest.raises(JoinError, match="export COMMUTE_SIZE="):
        detect(PRTERUN)


# ---- Slurm ----


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_of_slurm_is_no_step(name):
    assert detect({**SLURM, "SLURM_JOB_NAME": name}).source == "alone"


def test_a_batch_script_is_alone_and_says_why():
    """Forgetting srun is a frequent mistake: the script runs once, with variables of the job."""
    env = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP")}
    place = detect(env)

    assert place.source == "alone"
    assert "srun" in place.describe()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n01", "n01"),
        ("n[01-03,7]", "n01 n02 n03 n7"),
        ("a,b[1-2],c", "a b1 b2 c"),
        ("r[1-2]n[08-10]-x", "r1n08-x r1n09-x r1n10-x r2n08-x r2n09-x r2n10-x"),
        ("gpu-[099-101]", "gpu-099 gpu-100 gpu-101"),
        ("", ""),
    ],
)
def test_node_lists(text, nodes):
    assert list(expand_nodes(text)) == nodes.split()


def test_a_huge_node_list_is_not_expanded():
    """Only the first node is needed, however many there are."""
    assert list(itertools.islice(expand_nodes("n[1-999999999999]"), 2)) == ["n1", "n2"]


def test_a_broken_node_list():
    with pytest.raises(JoinError, match="number range"):
        list(expand_nodes("n[a-b]"))
