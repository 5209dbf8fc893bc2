# SPDX-License-Identifier: Apache-2.0
"""Progressive validation: sums that add up, and figures that agree with scikit-learn's."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from commute import ArrayError, SettingError
from commute.learn import metrics
from commute.learn.metrics import Metrics

SEED = 20240
COUNT = 20_000


def drawn(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels and weights of a kind of data."""
    print("seed", SEED, "kind", kind)
    rng = np.random.default_rng(SEED)
    centre, spread = {
        "realistic": (-1.5, 1.3),
        "rare": (-6.0, 1.0),
        "confident": (0.0, 9.0),
        "timid": (0.0, 0.1),
        "weighted": (-1.0, 1.0),
    }[kind]
    truth = rng.normal(centre, spread, COUNT)
    labels = rng.random(COUNT) < 1 / (1 + np.exp(-truth))
    scores = truth + rng.normal(0, spread / 2, COUNT)
    weights = rng.gamma(1.0, 2.0, COUNT) if kind == "weighted" else np.ones(COUNT)
    return scores.astype("f"), labels.astype("f"), weights.astype("f")


@pytest.mark.parametrize("kind", ["realistic", "rare", "confident", "timid", "weighted"])
def test_figures_are_those_of_scikit_learn(kind):
    """Log-loss to rounding, AUC to 1e-3, in batches of any size."""
    judge = pytest.importorskip("sklearn.metrics")
    scores, labels, weights = drawn(kind)
    found = Metrics()
    for cut in np.split(np.arange(COUNT), [1, 1, 700, 9000]):
        found.add(scores[cut], labels[cut], weights[cut])
    chances = 1 / (1 + np.exp(-scores.astype("d")))
    auc = judge.roc_auc_score(labels, scores, sample_weight=weights)

    assert found.examples == COUNT
    assert found.weight == pytest.approx(float(weights.sum(dtype="d")))
    assert found.logloss == pytest.approx(
        judge.log_loss(labels, chances, sample_weight=weights), rel=1e-6
    )
    assert found.loss == found.logloss
    assert found.auc == pytest.approx(auc, abs=1e-3)
    assert found.mean_label == pytest.approx(np.average(labels, weights=weights))
    assert found.mean_prediction == pytest.approx(np.average(chances, weights=weights))


def summed(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, loss: str) -> np.ndarray:
    """The sums, by plain NumPy."""
    score, label, weight = (array.astype("d") for array in (scores, labels, weights))
    margin = (2 * label - 1) * score
    chance = 1 / (1 + np.exp(-score))
    logloss = np.logaddexp(0, score) - label * score
    lost = {
        "logistic": logloss,
        "squared": (score - label) ** 2,
        "hinge": np.maximum(1 - margin, 0),
        "perceptron": np.maximum(-margin, 0),
    }[loss]
    binary = loss != "squared"
    bins = np.minimum((np.clip(score, -12, 12) + 12) * 2048 / 24, 2047).astype(int)
    counts = [np.bincount(bins, weight * (label == y) * binary, 2048) for y in (0, 1)]
    means = [len(score), weight.sum(), weight @ lost, weight @ label]
    means += [weight @ (chance if binary else score), weight.sum() * binary]
    return np.concatenate([means, [weight @ logloss * binary], *counts])


@pytest.mark.parametrize("kind", ["realistic", "confident", "weighted"])
@pytest.mark.parametrize("loss", metrics.LOSSES)
def test_sums_are_those_of_numpy(kind, loss):
    """Each of them, also of the bins, and scores beyond the last."""
    scores, labels, weights = drawn(kind)
    scores[:4] = [12, -12, 50, -50]
    found = Metrics()
    found.add(scores, labels, weights, loss)

    np.testing.assert_allclose(found.array, summed(scores, labels, weights, loss), rtol=1e-9)


@pytest.mark.parametrize("score", [0.0, -0.0, 3.7, -12.0, 12.0, 1e30, -1e30])
def test_equal_scores_are_a_toss(score):
    """One score for all has an AUC of exactly a half, and a calibration of one part."""
    found = Metrics()
    found.add(np.full(7, score, "f"), np.array([0, 1, 1, 0, 0, 1, 0], "f"))

    assert found.auc == 0.5
    assert [row[1:] for row in found.calibration] == [(3 / 7, 7.0)]


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_auc(label):
    """Without pairs to compare there is no AUC, but there is a log-loss."""
    found = Metrics()
    found.add(np.array([1.0, -2.0], "f"), np.full(2, label, "f"))

    assert math.isnan(found.auc)
    assert found.logloss > 0


def test_separated_classes_are_told_apart():
    """A perfect order gives 1, its reverse 0."""
    scores, labels = np.array([-9, -1, 1, 20], "f"), np.array([0, 0, 1, 1], "f")
    right, wrong = Metrics(), Metrics()
    right.add(scores, labels)
    wrong.add(-scores, labels)

    assert (right.auc, wrong.auc) == (1.0, 0.0)


def test_nothing_yet():
    """Before the first example no figure is a number, and none is an error."""
    empty = Metrics()
    empty.add(np.empty(0, "f"), np.empty(0, "f"))
    figures = (empty.loss, empty.logloss, empty.auc, empty.mean_label, empty.mean_prediction)

    assert (empty.examples, empty.weight, empty.calibration) == (0, 0.0, [])
    assert all(map(math.isnan, figures))


def test_losses():
    """Each loss by its formula; labels 0 and 1 are -1 and 1 to hinge and perceptron."""
    scores = np.array([2.0, -0.5, 0.25], "f")
    labels = np.array([1.0, 1.0, 0.0], "f")
    weights = np.array([1.0, 2.0, 4.0], "f")
    found = {}
    for loss in metrics.LOSSES:
        found[loss] = Metrics()
        found[loss].add(scores, labels, weights, loss)

    assert found["hinge"].loss == pytest.approx((0 + 2 * 1.5 + 4 * 1.25) / 7)
    assert found["perceptron"].loss == pytest.approx((0 + 2 * 0.5 + 4 * 0.25) / 7)
    assert found["squared"].loss == pytest.approx((1 + 2 * 2.25 + 4 * 0.0625) / 7)
    assert found["hinge"].logloss == found["logistic"].loss
    assert found["hinge"].auc == found["logistic"].auc


def test_squared_loss_has_no_classes():
    """Any numbers are labels; what needs classes is not a number."""
    found = Metrics()
    found.add(np.array([10.0, -3.0], "f"), np.array([12.0, -3.0], "f"), loss="squared")

    assert (found.loss, found.mean_label, found.mean_prediction) == (2.0, 4.5, 3.5)
    assert math.isnan(found.logloss)
    assert math.isnan(found.auc)
    assert found.calibration == []


def test_sums_add_up_and_subtract():
    """Two workers' sums are the whole; the whole without the first is the second."""
    scores, labels, weights = drawn("realistic")
    first, second, whole = Metrics(), Metrics(), Metrics()
    first.add(scores[:600], labels[:600], weights[:600])
    second.add(scores[600:], labels[600:], weights[600:])
    whole.add(scores, labels, weights)
    window = whole - first

    assert first.array.shape == (Metrics.SIZE,)
    assert first.array.dtype == np.float64
    np.testing.assert_allclose((first + second).array, whole.array)
    assert window.examples == second.examples
    assert window.auc == second.auc
    assert window.logloss == pytest.approx(second.logloss)
    assert Metrics.of(first.array).array is first.array


def test_calibration_is_near_the_truth():
    """Of true chances: parts of equal weight, in order, near the diagonal."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    scores = rng.normal(-2, 1.5, 200_000)
    labels = rng.random(len(scores)) < 1 / (1 + np.exp(-scores))
    found = Metrics()
    found.add(scores, labels.astype("d"))
    predicted, observed, weight = map(np.array, zip(*found.calibration, strict=True))

    assert len(predicted) == 20
    assert np.all(np.diff(predicted) > 0)
    np.testing.assert_allclose(weight, 10_000, rtol=0.1)
    np.testing.assert_allclose(predicted, observed, atol=0.02)
    assert predicted @ weight / weight.sum() == pytest.approx(found.mean_prediction, abs=1e-4)


def test_a_model_that_diverged():
    """Scores that are no numbers spoil the loss, and only that; nothing is raised or warned of."""
    found = Metrics()
    scores = np.array([np.nan, np.inf, -np.inf, 1.0, -1.0], "f")
    found.add(scores, np.array([0, 1, 0, 1, 0], "f"))

    assert not math.isfinite(found.logloss)
    assert 0 <= found.auc <= 1
    assert found.array[-4096:].sum() == 5


def test_what_does_not_fit_is_refused():
    """Wrong shapes and unknown losses are told apart from bad figures."""
    found = Metrics()

    with pytest.raises(ArrayError, match=r"\(3,\), \(2,\) and \(3,\)"):
        found.add(np.zeros(3), np.zeros(2))
    with pytest.raises(ArrayError, match="one dimension"):
        found.add(np.zeros((2, 2)), np.zeros((2, 2)))
    with pytest.raises(SettingError, match="'huber'; expected one of logistic"):
        found.add(np.zeros(1), np.zeros(1), loss="huber")
    with pytest.raises(ArrayError, match="of shape"):
        Metrics.of(np.zeros(3))
    assert not found.array.any()


def test_samples_run():
    """The samples in the docstrings give what they show."""
    found = doctest.testmod(metrics)

    assert found.attempted > 0
    assert found.failed == 0
