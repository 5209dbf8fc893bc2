# SPDX-License-Identifier: Apache-2.0
"""Scores and gradients of a batch, by the core (core/learn/linear.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from commute import _core
from commute.learn.reader import Batch
from commute.learn.settings import LOSSES

__all__ = ["gradients", "scores"]

Array = np.ndarray[Any, Any]


def scores(batch: Batch, weights: Array) -> Array:
    """The sum of weight times value of every example; `weights` has one for each key."""
    made = np.empty(batch.count, np.float32)
    _core.linear_scores(
        batch.offsets.ctypes.data,
        _address(batch.values),
        batch.count,
        weights.ctypes.data,
        made.ctypes.data,
    )
    return made


def gradients(model: str, batch: Batch, scored: Array, out: Array) -> Array:
    """The gradient of the loss by the weight at each place, written to `out`."""
    _core.linear_gradients(
        LOSSES[model][1],
        batch.offsets.ctypes.data,
        _address(batch.values),
        batch.count,
        scored.ctypes.data,
        batch.labels.ctypes.data,
        batch.weights.ctypes.data,
        out.ctypes.data,
    )
    return out


def _address(values: Array | None) -> int:
    return 0 if values is None else int(values.ctypes.data)
