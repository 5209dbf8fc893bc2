# SPDX-License-Identifier: Apache-2.0
"""Scores and gradients of a batch, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commute.learn.cache import Block
from commute.learn.linear import gradients, scores
from commute.learn.settings import LOSSES

pytestmark = pytest.mark.timeout(30)

EXAMPLES = 200


def slopes(model: str, score: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The derivative of the loss by the score."""
    y = 2 * label - 1
    return {
        "lr": 1 / (1 + np.exp(-score)) - label,
        "linear": score - label,
        "svm": np.where(y * score < 1, -y, 0),
        "perceptron": np.where(y * score <= 0, -y, 0),
    }[model]


def batch_of(rng: np.random.Generator, plain: bool, binary: bool) -> Block:
    """With examples that have no feature, also the first and the last."""
    counts = rng.integers(0, 9, EXAMPLES)
    counts[[0, -1]] = 0
    keys = int(counts.sum())
    labels = rng.integers(0, 2, EXAMPLES) if binary else rng.normal(0, 3, EXAMPLES)
    return Block(
        EXAMPLES,
        labels.astype(np.float32),
        rng.choice([0.0, 0.5, 1.0, 3.0], EXAMPLES).astype(np.float32),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
        rng.integers(0, 1 << 63, keys).astype(np.uint64),
        None if plain else rng.normal(0, 2, keys).astype(np.float32),
    )


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "values"])
@pytest.mark.parametrize("model", LOSSES)
def test_against_numpy(model, plain, rng):
    """The four losses, with values and where all are 1."""
    batch = batch_of(rng, plain, binary=model != "linear")
    weights = rng.normal(0, 0.5, len(batch.keys)).astype(np.float32)
    values = np.ones(len(weights)) if plain else batch.values.astype(np.float64)
    rows = np.repeat(np.arange(EXAMPLES), np.diff(batch.offsets.astype(np.int64)))
    expected = np.bincount(rows, weights * values, EXAMPLES)
    scored = scores(batch, weights)
    # From here the core's own scores: a step of a loss must not depend on the last bit of one.
    by_score = batch.weights * slopes(model, scored.astype(np.float64), batch.labels)

    np.testing.assert_allclose(scored, expected, rtol=1e-5, atol=1e-5)
    assert scored[0] == scored[-1] == 0
    out = np.full(len(weights), np.nan, np.float32)
    assert gradients(model, batch, scored, out) is out
    np.testing.assert_allclose(out, by_score[rows] * values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", LOSSES)
def test_gradients_take_the_place_of_weights(model, rng):
    """As the trainer does: the same room is used again."""
    batch = batch_of(rng, False, binary=True)
    weights = rng.normal(size=len(batch.keys)).astype(np.float32)
    scored = scores(batch, weights)
    elsewhere = gradients(model, batch, scored, np.empty_like(weights))

    np.testing.assert_array_equal(gradients(model, batch, scored, weights), elsewhere)


@pytest.mark.parametrize(
    ("model", "score", "label", "slope"),
    [
        ("lr", 1000, 1, 0),
        ("lr", -1000, 1, -1),
        ("lr", -1000, 0, 0),
        ("svm", 1, 1, 0),
        ("svm", 0.99, 1, -1),
        ("svm", -1, 0, 0),
        ("perceptron", 0, 1, -1),
        ("perceptron", 0, 0, 1),
        ("perceptron", 0.1, 1, 0),
        ("linear", 2.5, -1, 3.5),
    ],
)
def test_edges(model: str, score: float, label: float, slope: float):
    """Where a loss has a corner, and scores that no exponential can hold."""
    one: Any = np.ones(1, np.float32)
    batch = Block(1, one * label, one, np.array([0, 1], np.uint32), np.zeros(1, np.uint64), None)
    made = gradients(model, batch, one * score, np.empty(1, np.float32))

    assert made.tolist() == [slope]


def test_an_empty_batch():
    """Nothing is written."""
    none: Any = np.empty(0, np.float32)
    batch = Block(0, none, none, np.zeros(1, np.uint32), np.empty(0, np.uint64), None)

    assert scores(batch, none).size == 0
    assert gradients("lr", batch, none, none).size == 0
