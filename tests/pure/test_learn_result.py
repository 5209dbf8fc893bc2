# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run leave behind, and the error it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from commute import CommuteError, DataError, PeerLostError, SlotLostError
from commute.learn.report import Report
from commute.learn.result import Result, error_of, leave_error, leave_report, read_result

pytestmark = pytest.mark.timeout(30)

KILLED = """\
[0] rank 1 was lost; tables that continue go on without it
commute: rank 1 failed first (killed by SIGKILL, on host here, pid 12); it wrote nothing to stderr
"""


def test_the_first_error_counts(tmp_path: Path) -> None:
    """Others are about its consequences."""
    folder = str(tmp_path)
    assert read_result(folder) is None
    leave_error(folder, DataError("line 3 is bad"))
    leave_error(folder, PeerLostError(rank=1))
    error = error_of(read_result(folder), "")

    assert type(error) is DataError and str(error) == "line 3 is bad"


def test_a_report(tmp_path: Path) -> None:
    """Comes back as it was."""
    leave_report(str(tmp_path), Result(report=Report(examples=7), interrupted=True))
    result = read_result(str(tmp_path))

    assert result is not None and result.report is not None
    assert result.interrupted and result.report.examples == 7


@pytest.mark.parametrize("lost", [PeerLostError(rank=1), SlotLostError("a server is gone")])
def test_errors_that_are_more_than_a_message(tmp_path: Path, lost: CommuteError) -> None:
    """Are told as what they say."""
    leave_error(str(tmp_path), lost)
    error = error_of(read_result(str(tmp_path)), "commute: rank 0 failed first (exit code 1)")

    assert type(error) is CommuteError and str(error) == str(lost)


def test_a_worker_that_was_killed(tmp_path: Path) -> None:
    """Is what went wrong, also where another worker says that it is gone."""
    leave_error(str(tmp_path), PeerLostError(rank=1))
    says = "worker 1 has failed, and the training with it: killed by SIGKILL, on host here, pid 12"

    assert str(error_of(read_result(str(tmp_path)), KILLED)).startswith(says)
    assert str(error_of(None, KILLED)).startswith(says)


def test_bad_data_is_told_also_if_a_worker_is_killed_then(tmp_path: Path) -> None:
    """By the launcher, which ends the others."""
    leave_error(str(tmp_path), DataError("line 3 is bad"))

    assert str(error_of(read_result(str(tmp_path)), KILLED)) == "line 3 is bad"


def test_no_result_at_all(tmp_path: Path) -> None:
    """A fault of this program: what the workers printed is the best there is, its end first."""
    (tmp_path / "result.json").write_text("{ half")
    error = error_of(read_result(str(tmp_path)), "x" * 5000 + "\nZeroDivisionError")

    assert str(error).startswith(
        "the workers ended without a result, or what has started them was killed; they said\nxxx"
    )
    assert str(error).endswith("ZeroDivisionError") and len(str(error)) < 2100
