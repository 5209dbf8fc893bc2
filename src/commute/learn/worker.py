# SPDX-License-Identifier: Apache-2.0
"""One worker of a training run, in a process that the job has forked.

Rank 0 leaves a report behind, or whoever fails first what went wrong (result.py). Ctrl-C (SIGINT)
ends the training after the batch at hand; what was asked for is saved.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from commute import _core
from commute._errors import CommuteError
from commute._init import init
from commute.cluster.environment import detect
from commute.group import Group
from commute.learn.metrics import Metrics
from commute.learn.model import Card, write_card
from commute.learn.reader import names_of
from commute.learn.report import Figures, Report
from commute.learn.result import Result, leave_error, leave_report
from commute.learn.settings import Plan
from commute.learn.sources import deal
from commute.learn.trainer import Trainer
from commute.store.start import have_ready

__all__ = ["main"]

LARGEST = 50  # weights
NAMES_BYTES = 256 << 20  # of text that is searched for their names
NAMES_BYTES_BETWEEN = 16 << 20  # the same, where the others wait
KEY_BITS = 64


def main(plan: Plan) -> int:
    """Runs this worker of the plan, and returns the exit code."""
    if detect(os.environ).local_rank == 0:
        have_ready(plan.training.servers)
    try:
        with init() as world:
            try:
                done = _run(world, plan)
            except CommuteError as error:
                leave_error(plan.folder, error)
                raise
            if world.rank == 0:
                leave_report(plan.folder, done)
    except CommuteError as error:
        leave_error(plan.folder, error)
        return 1
    return 0


def _run(world: Group, plan: Plan) -> Result:
    gc.disable()  # objects come and go by the batch, none in cycles
    _core.keep_memory()  # and so do arrays
    trainer = Trainer(world, plan)
    trainer.save = lambda: _save(world, plan, trainer, None, NAMES_BYTES_BETWEEN)

    def stop(number: int, frame: object) -> None:
        trainer.stopping = True

    signal.signal(signal.SIGINT, stop)
    trainer.train()
    report = _save(world, plan, trainer, trainer.evaluate(), NAMES_BYTES)
    world.barrier()
    return Result(report=report, interrupted=trainer.stopping)


def _save(
    world: Group, plan: Plan, trainer: Trainer, test: Metrics | None, names_bytes: int
) -> Report:
    """All workers, at equal clocks: the model as it is now, if it is to be saved, and a report."""
    report = _report(trainer, plan, world, test)
    if world.rank == 0:
        report.top_weights = _named(plan, *trainer.table.top(LARGEST), names_bytes)
    if plan.save is not None:
        trainer.save_weights(plan.save)
        if world.rank == 0:
            largest = list(report.top_weights)
            card = Card(training=plan.training, recipe=plan.recipe, largest=largest, report=report)
            write_card(plan.save, card)
    return report


def _report(trainer: Trainer, plan: Plan, world: Group, test: Metrics | None) -> Report:
    total = trainer.progress.total()
    info = trainer.table.info()
    features = trainer.table.count()
    said = Path(plan.folder) / "notes"
    said.with_suffix(f".{world.rank}").write_bytes(msgspec.json.encode(_notes(trainer)))
    bad = int(world.allreduce(np.array([trainer.bad.count]))[0])  # so all have written theirs
    told = [said.with_suffix(f".{rank}").read_bytes() for rank in range(world.size)]
    collisions = features * (features - 1) / 2 / 2**KEY_BITS
    notes = [
        *plan.notes,
        f"expected collisions of {features:,} features in {KEY_BITS} bits: {collisions:.2g}",
        *dict.fromkeys(note for notes in told for note in msgspec.json.decode(notes)),
    ]
    report = Report(
        title=plan.title,
        loss_name=plan.training.loss,
        features=features,
        table_bytes=info.bytes,
        test=None if test is None else Figures.of(test),
        settings=msgspec.to_builtins(plan.training),
        history=trainer.progress.history.points,
        bad_lines=bad,
        model=plan.save,
        notes=notes,
    )
    report.take(total, trainer.seconds)
    return report


def _notes(trainer: Trainer) -> list[str]:
    """What this worker has to say to people."""
    return [*trainer.notes, *(f"skipped {line}" for line in trainer.bad.shown)]


def _named(
    plan: Plan, keys: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], most_bytes: int
) -> list[tuple[str, float]]:
    """The largest weights with their names; a name that is not found soon is the key itself."""
    [pieces] = deal(plan.data, 1)
    names = names_of(plan.recipe, pieces, keys, most_bytes)
    return [
        (names.get(int(key), f"{int(key):016x}"), float(weight))
        for key, weight in zip(keys, weights.reshape(-1), strict=True)
    ]
