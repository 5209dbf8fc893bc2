# SPDX-License-Identifier: Apache-2.0
"""Scores and gradients of a batch, by the core (core/learn/linear.h).

`weights` has one for each feature that differs, and `index` its number at every place of the batch,
as `SparseTable.distinct` gives them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commute import _core
from commute.learn.metrics import Metrics
from commute.learn.reader import Batch
from commute.learn.settings import LOSSES

__all__ = ["learn", "scores"]

Array = np.ndarray[Any, Any]


def scores(batch: Batch, index: Array, weights: Array) -> Array:
    """The sum of weight times value of every example."""
    made = np.empty(batch.count, np.float32)
    _core.linear_scores(batch.offsets, index, batch.values, weights, made)
    return made


def learn(model: str, batch: Batch, index: Array, weights: Array, judged: Metrics) -> None:
    """The gradient of the loss by every weight, written over the weights.

    The examples are scored before, and these scores added to `judged`.
    """
    _core.linear_learn(
        LOSSES[model][1],
        batch.offsets,
        index,
        batch.values,
        batch.labels,
        batch.weights,
        weights,
        judged.array,
    )
