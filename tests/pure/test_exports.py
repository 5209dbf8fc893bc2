# SPDX-License-Identifier: Apache-2.0
"""The public names are promises; importing them is quick and has no side effects."""

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import commute

PUBLIC = {
    # the job
    *("init", "Group", "Handle"),
    # the store
    *("connect", "Connection"),
    *("Store", "DenseTable", "SparseTable", "TableInfo"),
    *("SGD", "Momentum", "Adagrad", "Adam", "FTRL", "Semiring"),
    *("Uniform", "Normal"),
    # errors
    *("AbandonedError", "AuthenticationError", "ClosedError", "CommuteError", "ForkedError"),
    *("JoinError", "MismatchError", "OperationTimeoutError", "PeerLostError"),
    *("ArrayError", "CheckpointError", "DataError", "SettingError", "SlotLostError"),
    "UnknownTableError",
    "__version__",
}

# Runs in a fresh interpreter. NumPy starts threads of its own, so it is imported before the count.
REPORT = """
import os, json, sys

def state():
    own = f"/proc/{os.getpid()}"
    files = [os.readlink(f"{own}/fd/{fd}") for fd in os.listdir(f"{own}/fd")
             if os.path.exists(f"{own}/fd/{fd}") or os.path.islink(f"{own}/fd/{fd}")]
    return {
        "threads": len(os.listdir(f"{own}/task")),
        "children": open(f"{own}/task/{os.getpid()}/children").read().split(),
        "sockets": sum(name.startswith(("socket:", "anon_inode:")) for name in files),
    }

import numpy
before = state()
from commute import *
print(json.dumps({
    "before": before, "after": state(), "modules": sorted(sys.modules),
}))
"""


def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, timeout=30
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    return report()


def test_public_names_are_pinned() -> None:
    """`commute.__all__` is the list above; adding a name is a decision made here."""
    assert set(commute.__all__) == PUBLIC
    assert len(PUBLIC) <= 33


def test_nothing_public_is_left_out_of_all() -> None:
    """A name without an underscore that is no module is either in __all__ or not there."""
    stray = {
        name
        for name, value in vars(commute).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in PUBLIC
    }

    assert not stray


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_each_public_name_is_documented_and_at_home(name: str) -> None:
    """Each has a docstring and says that it lives in `commute`, not in a private module."""
    value = getattr(commute, name)

    assert inspect.getdoc(value)
    assert not name.endswith("Error") or issubclass(value, commute.CommuteError)


def test_import_brings_no_heavy_modules(imported: dict[str, Any]) -> None:
    """What only some callers need is imported by those who need it."""
    heavy = {"torch", "jax", "ml_dtypes", "matplotlib", "rich", "mpi4py", "asyncio", "argparse"}

    assert heavy.isdisjoint(imported["modules"])


def test_import_has_no_side_effects(imported: dict[str, Any]) -> None:
    """`import commute` starts no thread and no process, and opens no socket."""
    assert imported["after"] == imported["before"]


def test_import_brings_few_modules(imported: dict[str, Any]) -> None:
    """Beyond NumPy's own, few modules are loaded; `benchmarks.import_time` has the milliseconds."""
    numpy_alone = subprocess.run(
        [sys.executable, "-c", "import sys, numpy; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    added = set(imported["modules"]) - set(numpy_alone.stdout.split())

    assert len(added) < 70, sorted(added)


@pytest.mark.parametrize("words", [[], ["--help"], ["learn", "--help"], ["run", "--help"]])
def test_the_command_needs_no_numpy_to_tell_what_it_does(words: list[str]) -> None:
    """Names are imported at their first use; so it answers at once, and has no threads to fork."""
    code = (
        "import sys, contextlib, commute.cli\n"
        "with contextlib.suppress(SystemExit):\n"
        "    commute.cli.main(sys.argv[1:])\n"
        "sys.exit('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, timeout=30)

    assert done.returncode == 0


def test_names_are_listed_before_they_are_used() -> None:
    """As `dir` and completion show them."""
    done = subprocess.run(
        [sys.executable, "-c", "import commute; print(*dir(commute))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert set(done.stdout.split()) >= PUBLIC


def test_learn_is_imported_by_whoever_uses_it(imported: dict[str, Any]) -> None:
    """`import commute` is enough for `commute.learn.fit`, and does not bring it."""
    used = "import commute; print(commute.learn.fit.__name__, commute.learn.Model.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", used], capture_output=True, text=True, check=True, timeout=30
    )

    assert not [name for name in imported["modules"] if name.startswith("commute.learn")]
    assert done.stdout == "fit Model\n"
    with pytest.raises(AttributeError, match="module 'commute' has no attribute 'lern'"):
        _ = commute.lern  # type: ignore[attr-defined]
