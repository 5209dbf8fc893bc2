# SPDX-License-Identifier: Apache-2.0
"""Where this process stands in its job: rank, size, and the way to the coordinator.

`detect` is pure: it reads a mapping (usually `os.environ`) and explicit arguments, and returns a
`Place` or raises. It opens no socket and no file. The first whose variables are set wins:

    1. explicit arguments            rank=, size=  (coordinator=, token=, local_*= may add to any)
    2. commute run                   COMMUTE_RANK, COMMUTE_SIZE, ...
    3. torchrun                      RANK, WORLD_SIZE, ...
    4. Open MPI                      OMPI_COMM_WORLD_RANK, ...
    5. PMIx                          PMIX_RANK (the size comes from Slurm or COMMUTE_SIZE)
    6. MPICH, Intel MPI (PMI)        PMI_RANK, PMI_SIZE, ...
    7. a Slurm step                  SLURM_PROCID, ... only with SLURM_STEP_ID, never in a shell
    8. alone                         a world of one, which needs no coordinator

A launcher whose set of variables is incomplete is an error that names what is missing: a rank that
falls through to "alone" would train on its own and look healthy.

How the ranks then meet (`Place.meeting`; `rendezvous.find_coordinator` does it):

    none    size 1, nobody to meet
    given   `coordinator` is an address; rank 0 starts it there when `starts_coordinator`
    store   through torch's TCPStore at `store`, which torchrun's agent keeps
    file    through a file that only this user can read, all ranks being on one host
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from commute._errors import JoinError
from commute.cluster.addresses import format_address, is_loopback, parse_address

TOKEN_RECIPE = 'python -c "import secrets; print(secrets.token_hex(32))"'

# Below the ports that Linux hands out by itself (32768 and up), above those of system services.
_SLURM_PORT_FIRST = 15000
_SLURM_PORT_COUNT = 15000


@dataclass(frozen=True)
class Place:
    """The place of one process in its job, and how it finds the coordinator."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: str
    coordinator: str | None = None
    token: str | None = field(default=None, repr=False)
    run: str = "alone"
    starts_coordinator: bool = False
    meeting: str = "none"
    store: str | None = None  # host:port of torch's TCPStore, for the meeting "store"
    job: str | None = None  # what tells this job from others on the host, if the launcher says so
    variables: tuple[str, ...] = ()  # where rank and size were read
    note: str = ""

    @property
    def several_hosts(self) -> bool:
        return self.local_size < self.size

    def describe(self) -> str:
        """The line that tells a user where rank and size came from."""
        if self.source == "alone":
            text = "rank 0 of 1, alone: no launcher's variables are set"
        else:
            text = f"rank {self.rank} of {self.size} from {self.source}"
            if self.variables:
                text += f" ({', '.join(self.variables)})"
        if self.coordinator is not None:
            text += f"; coordinator {self.coordinator}"
        return text + (f"; {self.note}" if self.note else "")


def detect(
    env: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
    token: str | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> Place:
    """The place that the arguments and `env` give this process.

    Raises:
        JoinError: a launcher's variables are incomplete or contradict each other.
    """
    if rank is not None or size is not None:
        place = _explicit(env, rank=rank, size=size)
    else:
        place = next((found for read in _READERS if (found := read(env)) is not None), _alone(env))
    if local_rank is not None or local_size is not None:
        place = replace(
            place,
            local_rank=place.local_rank if local_rank is None else local_rank,
            local_size=place.local_size if local_size is None else local_size,
        )
    place = _settle_meeting(place, env, coordinator=coordinator, token=token)
    _check_local(place)
    return place


# ---- one reader per launcher: None when its variables are not there ----


def _explicit(env: Mapping[str, str], *, rank: int | None, size: int | None) -> Place:
    if rank is None or size is None:
        missing = "rank" if rank is None else "size"
        raise JoinError(f"rank and size go together, but {missing}= is missing; pass both")
    _check_range(rank, size, "rank=", "size=")
    return Place(rank, size, 0, 1, "arguments", run=_run(env, "arguments"), meeting="given")


def _commute_run(env: Mapping[str, str]) -> Place | None:
    # COMMUTE_SIZE alone is how a user tells the size under PMIx, which does not.
    if "COMMUTE_RANK" not in env and ("COMMUTE_SIZE" not in env or "PMIX_RANK" in env):
        return None
    names = ("COMMUTE_RANK", "COMMUTE_SIZE", "COMMUTE_LOCAL_RANK", "COMMUTE_LOCAL_SIZE")
    _require(env, "commute run", *names)
    rank, size = _rank_and_size(env, "COMMUTE_RANK", "COMMUTE_SIZE")
    if size > 1:
        _require(env, "commute run", "COMMUTE_COORDINATOR", "COMMUTE_TOKEN", "COMMUTE_RUN")
    return Place(
        rank,
        size,
        _number(env, "COMMUTE_LOCAL_RANK"),
        _number(env, "COMMUTE_LOCAL_SIZE"),
        "commute run",
        run=_run(env, "commute run"),
        meeting="launched",
        variables=names[:2],
    )


def _torchrun(env: Mapping[str, str]) -> Place | None:
    if not ({"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & env.keys()):
        return None
    _require(env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    # A restarted job is another one: its ranks must not meet those of the attempt before.
    restart = _number(env, "TORCHELASTIC_RESTART_COUNT") if _has_restarts(env) else 0
    job = f"{env.get('TORCHELASTIC_RUN_ID', 'none')}/{restart}"
    place = Place(
        rank,
        size,
        _number(env, "LOCAL_RANK"),
        _number(env, "LOCAL_WORLD_SIZE"),
        "torchrun",
        run=_run(env, f"torchrun/{job}"),
        meeting="store",
        job=job,
        variables=("RANK", "WORLD_SIZE"),
    )
    if size == 1 or "COMMUTE_COORDINATOR" in env:
        return place
    _require(env, "torchrun", "MASTER_ADDR", "MASTER_PORT")
    port = _number(env, "MASTER_PORT")
    return replace(place, store=format_address(env["MASTER_ADDR"], port))


def _has_restarts(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RESTART_COUNT" in env


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    prefix = "OMPI_COMM_WORLD_"
    names = tuple(prefix + what for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if not any(name in env for name in names):
        return None
    _require(env, "Open MPI", *names)
    rank, size = _rank_and_size(env, names[0], names[1])
    # Version 4 has no PMIX_NAMESPACE in every build, but always OMPI_MCA_ess_base_jobid.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    return Place(
        rank,
        size,
        _number(env, names[2]),
        _number(env, names[3]),
        "Open MPI",
        run=_run(env, f"ompi/{job}"),
        meeting="file",
        job=job,
        variables=names[:2],
    )


def _pmix(env: Mapping[str, str]) -> Place | None:
    if "PMIX_RANK" not in env:
        return None
    size_name = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in env), None)
    if size_name is None:
        if "COMMUTE_SIZE" not in env:
            raise JoinError(
                "PMIx tells a process its rank (PMIX_RANK) but not the number of ranks, and "
                "COMMUTE_SIZE is not set; export COMMUTE_SIZE=<number of ranks> before the launch"
            )
        size_name = "COMMUTE_SIZE"
    rank, size = _rank_and_size(env, "PMIX_RANK", size_name)
    if size_name == "COMMUTE_SIZE":
        # Nothing says who is local: one host, unless an address for the coordinator was given.
        local = (0, 1) if "COMMUTE_COORDINATOR" in env else (rank, size)
    else:
        local = _slurm_local(env, "PMIx under Slurm")
    job = env.get("PMIX_NAMESPACE")
    return Place(
        rank,
        size,
        *local,
        "PMIx",
        run=_run(env, f"pmix/{job}"),
        meeting="file",
        job=job,
        variables=("PMIX_RANK", size_name),
    )


def _pmi(env: Mapping[str, str]) -> Place | None:
    if not ({"PMI_RANK", "PMI_SIZE"} & env.keys()):
        return None
    source = "MPICH/PMI"
    _require(env, source, "PMI_RANK", "PMI_SIZE")
    rank, size = _rank_and_size(env, "PMI_RANK", "PMI_SIZE")
    if "MPI_LOCALRANKID" in env or "MPI_LOCALNRANKS" in env:
        _require(env, source, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        local = (_number(env, "MPI_LOCALRANKID"), _number(env, "MPI_LOCALNRANKS"))
    elif "PMI_LOCAL_RANK" in env or "PMI_LOCAL_SIZE" in env:
        _require(env, source, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
        local = (_number(env, "PMI_LOCAL_RANK"), _number(env, "PMI_LOCAL_SIZE"))
    elif "SLURM_STEP_ID" in env:  # srun --mpi=pmi2 sets the PMI variables without the local ones
        local = _slurm_local(env, f"{source} under Slurm")
    else:
        _require(env, source, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        raise AssertionError("unreachable")
    job = _slurm_job(env) if "SLURM_STEP_ID" in env else None
    return Place(
        rank,
        size,
        *local,
        source,
        run=_run(env, f"pmi/{job}"),
        meeting="file",
        job=job,
        variables=("PMI_RANK", "PMI_SIZE"),
    )


def _slurm_step(env: Mapping[str, str]) -> Place | None:
    if "SLURM_STEP_ID" not in env or _slurm_shell(env):
        return None
    _require(env, "a Slurm step", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
    # SLURM_NTASKS is the job's when srun was asked for fewer; the step's own number is exact.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, size = _rank_and_size(env, "SLURM_PROCID", size_name)
    job = _slurm_job(env)
    return Place(
        rank,
        size,
        *_slurm_local(env, "a Slurm step"),
        "a Slurm step",
        run=_run(env, f"slurm/{job}"),
        meeting="file",
        job=job,
        variables=("SLURM_PROCID", size_name),
    )


def _alone(env: Mapping[str, str]) -> Place:
    note = ""
    if "SLURM_JOB_ID" in env and not _slurm_shell(env):
        note = (
            f"Slurm job {env['SLURM_JOB_ID']} is no launcher by itself; start the ranks with srun"
        )
    return Place(0, 1, 0, 1, "alone", note=note)


_READERS = (_commute_run, _torchrun, _open_mpi, _pmix, _pmi, _slurm_step)


# ---- how the ranks meet ----


def _settle_meeting(
    place: Place, env: Mapping[str, str], *, coordinator: str | None, token: str | None
) -> Place:
    """Completes the place with the address and token that the launcher or the user gave."""
    address = coordinator if coordinator is not None else env.get("COMMUTE_COORDINATOR")
    token = token if token is not None else env.get("COMMUTE_TOKEN")
    if place.size == 1:
        # Nobody to meet, but a store's servers may be asked for.
        return replace(place, meeting="none", coordinator=address, token=token)
    if address is None:
        return _meet_without_address(place, env, token)
    host = _host(address)
    if token is None:
        raise JoinError(
            f"a coordinator is given ({address}) but no token; export the same COMMUTE_TOKEN for "
            f"every rank, made once by {TOKEN_RECIPE}"
        )
    place = replace(place, coordinator=address, token=token)
    if place.meeting == "launched":
        return replace(place, meeting="given")
    if place.source == "arguments" and is_loopback(host):
        place = replace(place, local_rank=place.rank, local_size=place.size)
    return replace(place, meeting="given", starts_coordinator=place.rank == 0)


def _meet_without_address(place: Place, env: Mapping[str, str], token: str | None) -> Place:
    starts = place.rank == 0
    if place.source == "arguments":
        raise JoinError(
            f"rank {place.rank} of {place.size} has no coordinator to meet the others at; pass "
            "coordinator='host:port' and token=, or export COMMUTE_COORDINATOR and COMMUTE_TOKEN"
        )
    if place.meeting == "store" or not place.several_hosts:
        return replace(place, token=token, starts_coordinator=starts)
    if "SLURM_STEP_NODELIST" in env and "SLURM_JOB_ID" in env:
        if token is None:
            raise JoinError(
                f"a Slurm step on several hosts needs a token; before srun, "
                f"export COMMUTE_TOKEN=$({TOKEN_RECIPE})"
            )
        address = _slurm_address(env)
        return replace(
            place, meeting="given", coordinator=address, token=token, starts_coordinator=starts
        )
    raise JoinError(
        f"{place.source} started {place.size} ranks on several hosts, which need an address to "
        "meet at and a token; before the launch, export COMMUTE_COORDINATOR=<host of rank 0>:<free "
        f"port> and COMMUTE_TOKEN=$({TOKEN_RECIPE}), and have the launcher pass both on"
    )


def _slurm_address(env: Mapping[str, str]) -> str:
    first = next(expand_nodes(env["SLURM_STEP_NODELIST"]), None)
    if first is None:
        raise JoinError("SLURM_STEP_NODELIST is empty; export COMMUTE_COORDINATOR=<host>:<port>")
    # Steps of one job may run side by side, so the step has its part in the port.
    spread = _number(env, "SLURM_JOB_ID") * 16 + int(env.get("SLURM_STEP_ID", "0"))
    return format_address(first, _SLURM_PORT_FIRST + spread % _SLURM_PORT_COUNT)


def _host(address: str) -> str:
    try:
        return parse_address(address)[0]
    except ValueError as error:
        raise JoinError(f"the coordinator's address is unusable: {error}") from None


# ---- Slurm's notations ----


def expand_nodes(text: str) -> Iterator[str]:
    """The host names of a Slurm node list, such as `n[01-03,7],login`."""
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        yield from _expand_brackets(part.strip())


def _expand_brackets(part: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", part)
    if found is None:
        if part:
            yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for item in found.group(1).split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise JoinError(f"the Slurm node list has a part that is no number range: '{part}'")
        for number in range(int(first), int(last if dash else first) + 1):
            yield from _expand_brackets(f"{before}{number:0{len(first)}d}{after}")


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is three nodes with two tasks each and one with one."""
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if found is None:
            raise JoinError(f"SLURM_STEP_TASKS_PER_NODE has a part that is no count: '{item}'")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def _slurm_local(env: Mapping[str, str], source: str) -> tuple[int, int]:
    _require(env, source, "SLURM_LOCALID")
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    if tasks is None:
        _require(env, source, "SLURM_STEP_TASKS_PER_NODE")
    counts = _tasks_per_node(tasks or "")
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    if node >= len(counts):
        raise JoinError(
            f"SLURM_NODEID is {node}, but the tasks per node name {len(counts)} nodes ({tasks}); "
            "pass local_rank= and local_size="
        )
    return _number(env, "SLURM_LOCALID"), counts[node]


def _slurm_job(env: Mapping[str, str]) -> str:
    restart = env.get("SLURM_RESTART_COUNT", "0")
    return f"slurm.{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}.{restart}"


def _slurm_shell(env: Mapping[str, str]) -> bool:
    """Whether this is a shell that Slurm opened: there the user starts what he likes by hand."""
    return env.get("SLURM_JOB_NAME", "") in ("bash", "sh", "zsh", "interactive")


# ---- reading with errors that name the variable ----


def _require(env: Mapping[str, str], source: str, *names: str) -> None:
    missing = [name for name in names if env.get(name, "") == ""]
    if missing:
        found = [name for name in names if name not in missing]
        seen = f" although {found[0]} is set" if found else ""
        verb = "is" if len(missing) == 1 else "are"
        raise JoinError(
            f"the environment of {source} is incomplete: {' and '.join(missing)} {verb} not set"
            f"{seen}; set what is missing, or unset the rest to run alone"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise JoinError(f"{name} should be a whole number from 0 up, got '{env[name]}'")
    return int(text)


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(env, rank_name), _number(env, size_name)
    _check_range(rank, size, rank_name, size_name)
    return rank, size


def _check_range(rank: int, size: int, rank_name: str, size_name: str) -> None:
    if size < 1:
        raise JoinError(f"{size_name} should be at least 1, got {size}")
    if not 0 <= rank < size:
        raise JoinError(
            f"{rank_name} should be from 0 to {size - 1} as {size_name} is {size}, got {rank}"
        )


def _check_local(place: Place) -> None:
    if not 0 <= place.local_rank < place.local_size <= place.size:
        raise JoinError(
            f"local rank {place.local_rank} of {place.local_size} does not fit rank {place.rank} "
            f"of {place.size} from {place.source}; local_rank < local_size <= size must hold"
        )


def _run(env: Mapping[str, str], identity: str) -> str:
    """The id of the job, the same on all ranks; short, whatever the launcher's own looks like."""
    given = env.get("COMMUTE_RUN")
    return given if given else hashlib.sha256(identity.encode()).hexdigest()[:16]
