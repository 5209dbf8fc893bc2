# SPDX-License-Identifier: Apache-2.0
"""The command line of `commute run`: torchrun's and horovodrun's spellings mean the same."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

from commute._errors import AuthenticationError
from commute.cli import main
from commute.cli.run import UsageError, job_from, parser
from commute.cluster.launch import Job, rank_environment

TOKEN = "cd" * 32
HOSTS = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "hosta:7000"]


def options(*flags: str) -> argparse.Namespace:
    return parser().parse_args(list(flags))


def job(*flags: str, env: dict[str, str] | None = None) -> Job:
    return job_from(options(*flags), env or {})


def test_the_plain_line():
    made = job("-n", "4", "train.py", "--epochs", "3")

    assert made == Job((sys.executable, "-u", "train.py", "--epochs", "3"), ranks=4)
    assert made.size == 4


@pytest.mark.parametrize("flag", ["-n", "-np", "--nproc-per-node", "--nproc_per_node"])
def test_ways_to_say_how_many(flag):
    assert job(flag, "3", "x.py").ranks == 3


def test_one_per_core():
    cores = len(os.sched_getaffinity(0))

    assert job("-n", "auto", "x.py").ranks == job("-n", "cpu", "x.py").ranks == cores
    assert job("x.py").ranks == 1


@pytest.mark.parametrize(
    "rest",
    [
        ["-n", "8", "--nnodes", "3"],
        ["--", "-x"],
        ["-m", "--help", "--version"],
        ["a b", "", "--nproc_per_node=9"],
    ],
)
def test_what_follows_the_script_is_the_scripts(rest):
    made = job("-n", "2", "x.py", *rest)

    assert made.command == (sys.executable, "-u", "x.py", *rest)
    assert (made.ranks, made.nodes) == (2, 1)


def test_module_and_program():
    assert job("-m", "a.b", "-m").command == (sys.executable, "-u", "-m", "a.b", "-m")
    assert job("--no-python", "echo", "-n").command == ("echo", "-n")
    assert job("--no_python", "echo").command == ("echo",)
    with pytest.raises(UsageError, match="choose one"):
        job("-m", "--no-python", "x")


@pytest.mark.parametrize(
    "flags",
    [
        HOSTS,
        ["--nnodes=2", "--node_rank=1", "--rdzv_endpoint=hosta:7000", "--rdzv_backend=c10d"],
        ["--nnodes=2", "--node-rank=1", "--master-addr=hosta", "--master-port=7000"],
        ["--nnodes=2", "--node_rank=1", "--master_addr=hosta", "--master_port=7000"],
    ],
)
def test_several_machines(flags):
    """The four ways to write it give one job."""
    made = job(*flags, "-n", "2", "x.py", env={"COMMUTE_TOKEN": TOKEN})

    assert (made.nodes, made.node, made.size) == (2, 1, 4)
    assert (made.endpoint, made.token) == (("hosta", 7000), TOKEN)
    assert made.run == "job"


def test_addresses_to_meet_at():
    def endpoint(*flags: str) -> tuple[str, int] | None:
        return job(*flags, "x.py").endpoint

    assert endpoint("--rdzv-endpoint", "hosta") == ("hosta", 29500)
    assert endpoint("--rdzv-endpoint", "[fd00::1]:7000") == ("fd00::1", 7000)
    assert endpoint("--rdzv-endpoint", "[fd00::1]") == ("fd00::1", 29500)
    assert endpoint("--master-addr", "fd00::1") == ("fd00::1", 29500)
    assert endpoint() is None


def test_run_ids():
    """A short name is kept; a long or odd one is made short, the same on all machines."""
    assert job("--rdzv-id", "night-7", "x.py").run == "night-7"
    odd = job("--rdzv_id", "ü" * 50, "x.py").run
    assert odd is not None
    assert odd.isascii()
    assert len(odd) == 32
    assert job("x.py").run is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-n", "0"], "-n should be a whole number from 1 up, got '0'"),
        (["-n", "four"], "got 'four'"),
        (["--nnodes", "1:4"], "give one number"),
        (["--nnodes", "2"], "--node-rank is missing"),
        (["--nnodes", "2", "--node-rank", "2"], "from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0"], "--rdzv-endpoint"),
        (["--nnodes", "2", "--node-rank", "0", "--standalone"], "--standalone"),
        ([*HOSTS, "--master-addr", "b"], "give one of them"),
        ([*HOSTS[:-1], "a:b:c"], "IPv6"),
        ([*HOSTS[:-1], "0.0.0.0:7000"], "others can dial"),
        ([*HOSTS], "secrets.token_hex(32)"),
        (["-H", "hosta:2,hostb:2"], "on each host run"),
        (["-H", "localhost:2", "-n", "3"], "room for 2"),
        (["--start-timeout", "0"], "above 0"),
    ],
)
def test_lines_that_cannot_be(flags, said):
    """Each says what to write instead."""
    with pytest.raises(UsageError) as error:
        job(*flags, "x.py")

    assert said in str(error.value)


@pytest.mark.parametrize("flags", [["--rdzv-backend", "etcd", "x.py"], ["--nproc", "2", "x.py"]])
def test_lines_that_argparse_refuses(flags, capsys):
    """Unknown flags are refused, also those that abbreviate one."""
    with pytest.raises(SystemExit) as stopped:
        options(*flags)

    assert stopped.value.code == 2
    assert "commute run" in capsys.readouterr().err


def test_horovods_hosts():
    assert job("-H", "localhost:4", "x.py").ranks == 4
    assert job("-np", "2", "-H", "localhost:4", "x.py").ranks == 2


def test_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert job(*HOSTS, "--token-file", str(path), "x.py").token == TOKEN
    path.chmod(0o644)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        job(*HOSTS, "--token-file", str(path), "x.py")


def test_environment_of_a_rank():
    made = job(*HOSTS, "-n", "3", "x.py", env={"COMMUTE_TOKEN": TOKEN})
    env = rank_environment(
        {"PATH": "/bin", "COMMUTE_RANK": "stale"},
        made,
        local_rank=2,
        coordinator="10.0.0.4:7000",
        token=TOKEN,
        run="job",
    )

    assert env == {
        "PATH": "/bin",
        "COMMUTE_RANK": "5",
        "COMMUTE_SIZE": "6",
        "COMMUTE_LOCAL_RANK": "2",
        "COMMUTE_LOCAL_SIZE": "3",
        "COMMUTE_COORDINATOR": "10.0.0.4:7000",
        "COMMUTE_TOKEN": TOKEN,
        "COMMUTE_RUN": "job",
        "PYTHONUNBUFFERED": "1",
    }


def test_help_teaches():
    text = parser().format_help()

    assert "commute run -n 4 train.py" in text
    assert "--node-rank 1" in text
    assert "_per_node" not in text


def test_nothing_to_run():
    with pytest.raises(UsageError, match="name a script"):
        job("-n", "4")


def test_verbs(capsys):
    """Without a verb, or with one that is not there, the verbs are listed."""
    assert main(["--help"]) == 0
    assert "commute VERB" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["walk"]) == 2
    assert "there is no verb 'walk'" in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_show_plan(capsys):
    assert main(["show", "plan", "ring", "--ranks", "3", "--rank", "1"]) == 0
    assert "rank 1" in capsys.readouterr().out
    assert main(["show", "plan", "no-such", "--ranks", "3"]) == 2
    assert "known are" in capsys.readouterr().err
