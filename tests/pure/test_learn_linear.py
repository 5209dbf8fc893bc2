# SPDX-License-Identifier: Apache-2.0
"""Scores and gradients of a batch, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commute.learn.cache import Block
from commute.learn.linear import learn, scores
from commute.learn.metrics import Metrics
from commute.learn.settings import LOSSES

pytestmark = pytest.mark.timeout(30)

EXAMPLES, FEATURES = 200, 60


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
    places = int(counts.sum())
    labels = rng.integers(0, 2, EXAMPLES) if binary else rng.normal(0, 3, EXAMPLES)
    return Block(
        EXAMPLES,
        labels.astype(np.float32),
        rng.choice([0.0, 0.5, 1.0, 3.0], EXAMPLES).astype(np.float32),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
        np.arange(FEATURES, dtype=np.uint64),
        rng.integers(0, FEATURES - 1, places).astype(np.uint32),
        None if plain else rng.normal(0, 2, places).astype(np.float32),
    )


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "values"])
@pytest.mark.parametrize("model", LOSSES)
def test_against_numpy(model, plain, rng):
    """The four losses, with values and where all are 1; features come up again and again."""
    batch = batch_of(rng, plain, binary=model != "linear")
    weights = rng.normal(0, 0.5, FEATURES).astype(np.float32)
    index = batch.index
    values = np.ones(len(index)) if plain else batch.values.astype(np.float64)
    rows = np.repeat(np.arange(EXAMPLES), np.diff(batch.offsets.astype(np.int64)))
    expected = np.bincount(rows, weights[index] * values, EXAMPLES)
    scored = scores(batch, index, weights)
    # From here the core's own scores: a step of a loss must not depend on the last bit of one.
    by_score = batch.weights * slopes(model, scored.astype(np.float64), batch.labels)
    judged, alone = Metrics(), Metrics()
    alone.add(scored, batch.labels, batch.weights, LOSSES[model][0])
    learn(model, batch, index, weights, judged)

    np.testing.assert_allclose(scored, expected, rtol=1e-5, atol=1e-5)
    assert scored[0] == scored[-1] == 0
    np.testing.assert_array_equal(judged.array, alone.array)
    by_feature = np.bincount(index, by_score[rows] * values, FEATURES)
    np.testing.assert_allclose(weights, by_feature, rtol=1e-4, atol=1e-4)
    assert weights[-1] == 0  # a feature that no example has


def test_gradients_are_added_in_the_order_of_examples(rng):
    """So they have the same bits wherever they are computed."""
    batch = batch_of(rng, False, binary=True)
    index = batch.index
    zeros = np.zeros(FEATURES, np.float32)
    learn("lr", batch, index, zeros, Metrics())
    rows = np.repeat(np.arange(EXAMPLES), np.diff(batch.offsets.astype(np.int64)))
    slope = (batch.weights * (np.float32(0.5) - batch.labels))[rows] * batch.values
    expected = np.zeros(FEATURES, np.float32)
    np.add.at(expected, index, slope)

    np.testing.assert_array_equal(zeros, expected)


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
    key, index = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    batch = Block(1, one * label, one, np.array([0, 1], np.uint32), key, index, None)
    weight = one * score
    learn(model, batch, index, weight, Metrics())

    assert weight.tolist() == [slope]


def test_an_empty_batch():
    """Nothing is written."""
    none: Any = np.empty(0, np.float32)
    keys, index = np.empty(0, np.uint64), np.empty(0, np.uint32)
    batch = Block(0, none, none, np.zeros(1, np.uint32), keys, index, None)
    judged = Metrics()
    learn("lr", batch, index, none, judged)

    assert scores(batch, index, none).size == 0
    assert not judged.array.any()
