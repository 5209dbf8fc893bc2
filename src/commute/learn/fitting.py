# SPDX-License-Identifier: Apache-2.0
"""`fit`: looks at the data, starts the workers, follows their progress, returns the model.

files ──> recipe (what a line means) ──> plan.json ──> job ──> workers
                                              result.json, progress.jsonl <──┘
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from commute._cores import usable_cores
from commute._errors import CommuteError, SettingError
from commute.learn.documents import decoded, encoded
from commute.learn.model import Model, read_card
from commute.learn.progress import POINTS, Line
from commute.learn.recipe import Recipe, guess
from commute.learn.report import Point, Report
from commute.learn.result import OUTPUT, error_of, read_result
from commute.learn.settings import Plan, Training, checked
from commute.learn.sources import (
    STANDARD_INPUT,
    Source,
    find,
    first_lines,
    format_of,
    remove_spooled,
)
from commute.learn.start import JobProcess, waiting_job

__all__ = ["Watcher", "fit", "prepare", "run"]

POLL_S = 0.05


class Watcher(Protocol):
    """Who wants to know how a run goes on."""

    def update(self, point: Point, fraction: float | None) -> None: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came; what was asked for is saved, and the report is there."""

    def __init__(self, report: Report | None) -> None:
        super().__init__()
        self.report = report


def fit(
    data: str | Sequence[str],
    *,
    test: str | Sequence[str] = (),
    save: str | os.PathLike[str] | None = None,
    start_from: str | os.PathLike[str] | None = None,
    columns: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Model:
    """Train a linear model on text files, with workers and servers on this machine.

    >>> from commute.learn import fit
    >>> model = fit("train.svm", test="test.svm", model="lr", save="model/")    # doctest: +SKIP
    >>> model.report.test.auc                                                 # doctest: +SKIP
    0.92

    Args:
        data: files, or patterns of their names: LIBSVM, Vowpal Wabbit text, CSV or TSV; may be
            gzipped.
        test: files to be scored at the end.
        save: a folder for the model; by default it is kept as long as the result.
        start_from: a saved model to go on from.
        columns: what lines mean, as `guess` of commute.learn.recipe takes it: format, names, label,
            weight, kinds, logs, bins, crosses, positive.
        watcher: its `update` is called with a point of the history, twice a second.
        settings: of `Training`: model, optimizer, lr, l1, l2, epochs, batch, staleness,
            workers (1), servers (0)...

    Raises:
        SettingError: something that cannot be, or a file that is not there.
        DataError: too many lines cannot be read.
        CheckpointError: the model cannot be written, or the one to start from cannot be read.
    """
    with contextlib.ExitStack() as stack:
        if save is None:
            save = stack.enter_context(tempfile.TemporaryDirectory(prefix="commute-model-"))
        plan_of = prepare(
            _listed(data), _listed(test), save, start_from, columns or {}, Training(**settings)
        )
        with waiting_job() as job, plan_of as plan:
            run(plan, job, watcher)
        return Model.load(save)


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


@contextlib.contextmanager
def prepare(
    data: Sequence[str],
    test: Sequence[str],
    save: str | os.PathLike[str] | None,
    start_from: str | os.PathLike[str] | None,
    columns: dict[str, Any],
    training: Training,
    title: str = "training",
) -> Iterator[Plan]:
    """A plan, with a folder that is gone after the block."""
    training = checked(training)
    if STANDARD_INPUT in data and training.cache:
        raise SettingError("a cache lies beside its file; standard input (-) has none")
    if STANDARD_INPUT in test:
        raise SettingError("the test needs a file; standard input (-) is for the data")
    sources = find(data)
    try:
        tested = find(test) if test else []
        recipe, notes = _recipe(sources, dict(columns), start_from, training)
        if save is not None:
            _make_folder(save)
        with tempfile.TemporaryDirectory(prefix="commute-learn-") as folder:
            yield Plan(
                training=training,
                recipe=recipe,
                data=tuple(sources),
                test=tuple(tested),
                save=None if save is None else os.path.abspath(save),
                start_from=None if start_from is None else os.path.abspath(start_from),
                title=title,
                folder=folder,
                notes=tuple(notes),
            )
    finally:
        remove_spooled(sources)


def _make_folder(save: str | os.PathLike[str]) -> None:
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{save} cannot be made: {error.strerror}") from error


def _recipe(
    sources: Sequence[Source],
    columns: dict[str, Any],
    start_from: str | os.PathLike[str] | None,
    training: Training,
) -> tuple[Recipe, list[str]]:
    if start_from is not None:
        if columns:
            raise SettingError("the model to start from says what the columns are; leave them out")
        card = read_card(start_from)
        if card.training.optimizer != training.optimizer or card.training.model != training.model:
            raise SettingError(
                f"the model to start from is {card.training.model} with"
                f" {card.training.optimizer}, not {training.model} with {training.optimizer}"
            )
        return card.recipe, [f"goes on from {start_from}"]
    format = columns.pop("format", None) or format_of(sources[0].path)
    if format is None:
        format = _format_by_content(first_lines(sources[0], 1))
    lines = first_lines(sources[0])
    return guess(lines, format=format, binary=training.binary, **columns)


def _format_by_content(lines: Sequence[str]) -> str:
    """Where the name of a file says nothing: a bar is Vowpal Wabbit's, a tab TSV's."""
    line = lines[0] if lines else ""
    words = line.split()
    if "|" in line:
        return "vw"
    if len(words) > 1 and all(":" in word for word in words[1:3]):
        return "svm"
    return "tsv" if "\t" in line else "csv"


def run(plan: Plan, job: JobProcess, watcher: Watcher | None = None) -> Report:
    """Runs the workers to their end. Ctrl-C is passed on once; a second one kills them."""
    folder = Path(plan.folder)
    path = folder / "plan.json"
    path.write_bytes(encoded(plan))
    job.tell(str(path))
    pidfd = os.pidfd_open(job.pid)  # readable once it has ended
    try:
        interrupts = _follow(job, pidfd, folder, watcher)
    finally:
        os.close(pidfd)
    return _outcome(plan.folder, interrupts)


def _follow(job: JobProcess, pidfd: int, folder: Path, watcher: Watcher | None) -> int:
    """Until the job has ended; returns how often Ctrl-C came."""
    interrupts, read = 0, 0
    while True:
        try:
            ended = job.poll() is not None
            read += _show(folder / POINTS, read, watcher)
            if ended:
                return interrupts
            select.select([pidfd], [], [], POLL_S)
        except KeyboardInterrupt:
            interrupts += 1
            job.send_signal(signal.SIGINT)


def _show(path: Path, read: int, watcher: Watcher | None) -> int:
    """Shows the points after the first `read` bytes; returns how many bytes they are."""
    if watcher is None or not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(read)
        whole = file.read()
    whole = whole[: whole.rfind(b"\n") + 1]
    for line in whole.splitlines():
        told = decoded(line, Line)
        watcher.update(told.point, told.fraction)
    return len(whole)


def _outcome(folder: str, interrupts: int) -> Report:
    result = read_result(folder)
    if result is not None and result.report is not None:
        if interrupts:
            raise Interrupted(result.report)
        return result.report
    output = Path(folder) / OUTPUT
    error = error_of(result, output.read_text(errors="replace") if output.exists() else "")
    if interrupts and type(error) is CommuteError:
        raise Interrupted(None)  # workers that are ended before they are ready lose each other
    raise error


def default_workers() -> int:
    """One for each core that this process may use."""
    return max(1, int(usable_cores()))
