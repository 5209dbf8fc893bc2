# SPDX-License-Identifier: Apache-2.0
"""A trained model: weights by feature, and how lines become features.

    model/model.json    settings, recipe, names of the largest weights, figures
    model/weights/      the store's checkpoint, with the optimizer's state (docs/checkpoints.md)

>>> from commute.learn import Model
>>> Model.load("model/").predict("data.svm")      # doctest: +SKIP
array([0.93, 0.08], dtype=float32)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from commute._errors import CheckpointError
from commute._init import init
from commute.learn.documents import decoded, encoded
from commute.learn.linear import scores
from commute.learn.reader import BadLines, Stream, ahead
from commute.learn.recipe import Recipe
from commute.learn.report import Report, figure
from commute.learn.settings import Training
from commute.learn.sources import deal, find, remove_spooled
from commute.store.sparse import SparseTable
from commute.store.store import Store

__all__ = ["WEIGHTS", "Card", "Model", "declare", "describe", "read_card", "write_card"]

CARD = "model.json"
WEIGHTS = "weights"
VERSION = 1
SCORED_AT_ONCE = 1000  # examples


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model besides its weights."""

    version: int = VERSION
    training: Training
    recipe: Recipe
    largest: list[tuple[str, float]]  # names and weights
    report: Report


def declare(store: Store, training: Training) -> SparseTable:
    """The table of weights."""
    return store.sparse(
        "weights",
        1,
        update=training.optimizer_of(),
        admit=training.admit,
        wire=training.wire,
    )


def write_card(path: str | os.PathLike[str], card: Card) -> None:
    """In one step, once it is on disk."""
    target = Path(path) / CARD
    new = target.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(encoded(card, indent=1))
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error


def read_card(path: str | os.PathLike[str]) -> Card:
    """Raises CheckpointError."""
    target = Path(path) / CARD
    try:
        card = decoded(target.read_bytes(), Card)
    except OSError as error:
        raise CheckpointError(
            f"{path} is no model: {target.name} cannot be read: {error.strerror}"
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{target} is damaged, or of another program: {error}") from error
    if card.version != VERSION:
        raise CheckpointError(f"{target} has version {card.version}; this program reads {VERSION}")
    return card


class Model:
    """A model in this process. It ends with the block, or by `close`."""

    def __init__(self, card: Card, path: str | os.PathLike[str]) -> None:
        self.card, self.path = card, Path(path)
        self._world = init(rank=0, size=1)
        try:
            self._store = self._world.store("learn", staleness=None)
            self.table = declare(self._store, card.training)
            self._store.load(self.path / WEIGHTS)
        except BaseException:
            self._world.close()
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Model:
        """The model saved there. Raises CheckpointError."""
        return cls(read_card(path), path)

    @property
    def report(self) -> Report:
        """How it was trained, and how well."""
        return self.card.report

    def predict(self, data: str | Sequence[str], *, raw: bool = False) -> np.ndarray[Any, Any]:
        """A number for every example: a probability for lr, else the score.

        Args:
            data: files, or patterns of their names, in the format of the training data.
            raw: the score also for lr.
        """
        return np.concatenate([np.empty(0, np.float32), *self.predictions(data, raw=raw)])

    def predictions(
        self, data: str | Sequence[str], *, raw: bool = False, bad: BadLines | None = None
    ) -> Iterator[np.ndarray[Any, Any]]:
        """As `predict`, some at a time."""
        sources = find([data] if isinstance(data, str) else data)
        [pieces] = deal(sources, 1)
        stream = Stream(
            self.card.recipe,
            pieces,
            size=lambda _: SCORED_AT_ONCE,
            bad=BadLines(0, ", and every example needs its number") if bad is None else bad,
            labels_needed=False,
        )
        is_probability = self.card.training.model == "lr" and not raw
        try:
            for batch in ahead(iter(stream)):
                ticket, index = self.table.distinct(batch.keys)
                scored = scores(batch, index, self.table.pull(ticket).reshape(-1))
                yield _probabilities(scored) if is_probability else scored
        finally:
            remove_spooled(sources)

    def close(self) -> None:
        self._world.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _probabilities(scored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):  # a probability of 0 then
        made: np.ndarray[Any, Any] = 1 / (1 + np.exp(-scored))
    return made


def describe(path: str | os.PathLike[str], top: int) -> str:
    """A model in words: settings, sizes, figures, and its largest weights."""
    card = read_card(path)
    report, training = card.report, card.training
    files = [file for file in (Path(path) / WEIGHTS).rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    lines = [
        f"{training.model} with {training.optimizer}, lr {training.lr:g}, l1 {training.l1:g},"
        f" l2 {training.l2:g}; format {card.recipe.format}",
        f"{report.features:,} features, {size / 1e6:,.1f} MB on disk, {report.examples:,} examples",
    ]
    if report.test is not None:
        lines.append(_figures("test", report.test.loss, report.test.logloss, report.test.auc))
    lines.append(_figures("training", report.loss, report.logloss, report.auc))
    lines += ["", f"largest of {report.features:,} weights:"]
    lines += [f"  {weight:+10.4f}  {name}" for name, weight in card.largest[:top]]
    return "\n".join(lines)


def _figures(name: str, loss: float, logloss: float, auc: float) -> str:
    shown = [("loss", loss)] if math.isnan(logloss) else [("log-loss", logloss), ("AUC", auc)]
    return f"{name}: " + ", ".join(f"{what} {figure(value)}" for what, value in shown)
