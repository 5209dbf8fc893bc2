# SPDX-License-Identifier: Apache-2.0
"""What is to be trained, and how: checked once, passed on as JSON, kept with the model."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from commute._errors import SettingError
from commute.learn.recipe import Recipe
from commute.learn.sources import Source
from commute.store.updates import FTRL, SGD, Adagrad, Adam, Update

__all__ = ["LOSSES", "Plan", "Training", "checked"]

# By the model's name: its loss, and the core's code of it (core/learn/linear.h).
LOSSES = {
    "lr": ("logistic", 0),
    "linear": ("squared", 1),
    "svm": ("hinge", 2),
    "perceptron": ("perceptron", 3),
}
OPTIMIZERS = ("ftrl", "adagrad", "adam", "sgd")
BATCH_MAX, BATCH_MIN = 1000, 16  # where none is given
BATCH_SHARE = 32  # a batch is at most so small a part of what was read before


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a training run.

    >>> checked(Training(model="lr", lr=0.05)).optimizer_of()
    FTRL(lr=0.05, beta=1.0, l1=0.0, l2=0.0)
    """

    model: str = "lr"
    optimizer: str = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    epochs: int = 1
    batch: int = 0  # 0: it grows with what was read, up to BATCH_MAX
    staleness: int | None = None
    deterministic: bool = False
    wire: str | None = None
    admit: int = 1
    workers: int = 1
    servers: int = 0
    streams: int = 0  # 0: one for each worker
    save_every: int = 0  # examples
    bad_lines: int = 100
    cache: bool = False

    @property
    def loss(self) -> str:
        return LOSSES[self.model][0]

    @property
    def binary(self) -> bool:
        return self.model != "linear"

    def batch_after(self, examples: int) -> int:
        """The size of a stream's next batch. Much is learned from the first examples, if it is
        learned at once.

        >>> [Training().batch_after(n) for n in (0, 6_400, 1_000_000)]
        [16, 200, 1000]
        """
        return self.batch or min(BATCH_MAX, max(BATCH_MIN, examples // BATCH_SHARE))

    def optimizer_of(self) -> Update:
        """What the store applies."""
        match self.optimizer:
            case "ftrl":
                return FTRL(lr=self.lr, beta=self.beta, l1=self.l1, l2=self.l2)
            case "adagrad":
                return Adagrad(lr=self.lr, weight_decay=self.l2)
            case "adam":
                return Adam(lr=self.lr, weight_decay=self.l2)
            case _:
                return SGD(lr=self.lr, weight_decay=self.l2)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the workers of a run need to know."""

    training: Training
    recipe: Recipe
    data: tuple[Source, ...]
    test: tuple[Source, ...] = ()
    save: str | None = None
    start_from: str | None = None
    title: str = "training"
    folder: str  # where progress and result are written
    notes: tuple[str, ...] = ()


def checked(training: Training) -> Training:
    """The same, or SettingError."""
    _among("model", training.model, LOSSES)
    _among("optimizer", training.optimizer, OPTIMIZERS)
    for name in ("epochs", "admit", "workers"):
        _at_least(name, getattr(training, name), 1)
    for name in ("batch", "servers", "streams", "save_every", "bad_lines"):
        _at_least(name, getattr(training, name), 0)
    if training.staleness is not None:
        _at_least("staleness", training.staleness, 0)
    for name in ("l1", "l2", "beta"):
        _number(name, getattr(training, name), "0 or more", getattr(training, name) >= 0)
    _number("lr", training.lr, "above 0", training.lr > 0)
    if training.l1 and training.optimizer != "ftrl":
        raise SettingError(f"l1 needs the optimizer ftrl, got {training.optimizer}")
    if training.workers > 1 and training.servers == 0:
        raise SettingError(
            f"{training.workers} workers need a server to share: --servers 1; one worker needs none"
        )
    if training.deterministic and training.staleness != 0:
        raise SettingError("deterministic needs staleness 0: all workers in step")
    if training.streams and training.streams % training.workers:
        raise SettingError(
            f"expected streams to be a multiple of the {training.workers} workers,"
            f" got {training.streams}"
        )
    if training.wire not in (None, "float16", "bfloat16"):
        raise SettingError(f"expected wire to be float16 or bfloat16, got {training.wire!r}")
    return training


def _among(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise SettingError(f"expected {name} to be one of {', '.join(known)}; got {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise SettingError(f"expected {name} to be {least} or more, got {value}")


def _number(name: str, value: float, words: str, fits: bool) -> None:
    if not (math.isfinite(value) and fits):
        raise SettingError(f"expected {name} to be {words}, got {value}")
