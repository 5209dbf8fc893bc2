# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run leave behind for whoever started them: a report, or an error.

The first error counts: others are often about its consequences. So a worker writes it down before
it leaves the world, for the others notice when it does.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from commute import _errors
from commute._errors import CommuteError
from commute.learn.documents import decoded, encoded
from commute.learn.report import Report

__all__ = ["OUTPUT", "Result", "error_of", "leave_error", "leave_report", "read_result"]

RESULT = "result.json"
OUTPUT = "output.txt"  # what the workers printed
TAIL = 2000  # characters of what the workers printed
# Errors that need no more than a message; others are told as CommuteError.
_PLAIN = ("ArrayError", "CheckpointError", "DataError", "MismatchError", "SettingError")
_KILLED = re.compile(r"^commute: rank (\d+) failed first \((killed by .*?)\)", re.M)


class Result(msgspec.Struct, kw_only=True):
    """What came out."""

    report: Report | None = None
    error: str | None = None
    kind: str = "CommuteError"  # of the error
    interrupted: bool = False


def leave_report(folder: str, result: Result) -> None:
    """By rank 0, when all is done."""
    (Path(folder) / RESULT).write_bytes(encoded(result))


def leave_error(folder: str, error: CommuteError) -> None:
    """By any rank; if another one was first, nothing is written."""
    told = encoded(Result(error=str(error), kind=type(error).__name__))
    try:
        with (Path(folder) / RESULT).open("xb") as file:
            file.write(told)
    except FileExistsError:
        pass


def read_result(folder: str) -> Result | None:
    """None: there is none."""
    try:
        return decoded((Path(folder) / RESULT).read_bytes(), Result)
    except (OSError, msgspec.MsgspecError):
        return None


def error_of(result: Result | None, output: str) -> CommuteError:
    """What went wrong; `output` is what the workers printed."""
    if result is not None and result.error is not None and result.kind in _PLAIN:
        made: CommuteError = getattr(_errors, result.kind)(result.error)
        return made
    killed = _KILLED.search(output)
    if killed is not None:  # errors of the others are about that
        return CommuteError(
            f"worker {killed[1]} has failed, and the training with it: {killed[2]};"
            " what was saved before is still there"
        )
    if result is not None and result.error is not None:
        return CommuteError(result.error)
    said = f"they said\n{output[-TAIL:]}" if output.strip() else "they said nothing"
    return CommuteError(
        f"the workers ended without a result, or what has started them was killed; {said}"
    )
