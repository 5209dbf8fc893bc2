# SPDX-License-Identifier: Apache-2.0
"""How good predictions are, kept as plain sums. Pure; the core adds up (core/learn/metrics.h).

Progressive validation: an example is predicted first and learned from afterwards, so the training
data judges the model without a second pass. All that is kept is one array of float64 sums:

    examples | weight | loss | label | prediction | binary | logloss | 0's by bin | 1's by bin

Sums of two workers add up, and what happened since an earlier moment is a difference; workers push
the array to a dense table with update "sum". `binary` is the weight of the examples whose label is
0 or 1; without any, log-loss and AUC are not a number.

The bins count weights by score, for the AUC and for the calibration. They are uniform in the score
(the logit), from -12 to 12, so those of the probability get finer towards 0 and 1, where rare
events are. Within a bin, order is unknown and counts as a tie. That moves the AUC by less than
1e-3 where scores have a standard deviation of at least 0.05, four bins; by about 5e-6 where it is
1. The AUC of scores that hardly differ, as in the first moments of a run, is nearer to a half than
it should be.

>>> import numpy as np
>>> m = Metrics()
>>> m.add(np.array([2.0, -1.0, 0.5, -3.0]), np.array([1.0, 0.0, 0.0, 0.0]))
>>> m.examples, round(m.logloss, 4), m.auc
(4, 0.3657, 1.0)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from commute import _core
from commute._errors import ArrayError, SettingError

__all__ = ["LOSSES", "Metrics"]

LOSSES: Final = ("logistic", "squared", "hinge", "perceptron")  # as the core numbers them

# As the core has them.
_BINS: Final = 2048
_EDGE: Final = 12.0  # scores beyond it share the outermost bin; sigmoid(-12) is 6e-6
_PER_UNIT: Final = _BINS / (2 * _EDGE)
_PARTS: Final = 20  # of the calibration

# Places in the array.
_EXAMPLES, _WEIGHT, _LOSS, _LABEL, _PREDICTION, _BINARY, _LOGLOSS, _HISTOGRAM = range(8)

Floats = npt.NDArray[np.float64]
AnyFloats = npt.NDArray[np.floating[Any]]


class Metrics:
    """Sums over examples, and the figures that follow from them."""

    SIZE: ClassVar[int] = _HISTOGRAM + 2 * _BINS
    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: Floats = np.zeros(self.SIZE)

    @classmethod
    def of(cls, array: AnyFloats) -> Metrics:
        """The metrics whose sums are in `array`; of float64 in one piece it is not copied."""
        if array.shape != (cls.SIZE,):
            raise ArrayError(f"expected metrics of shape ({cls.SIZE},), got {array.shape}")
        made = cls.__new__(cls)
        made.array = np.asarray(array, np.float64, order="C")
        return made

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics.of(self.array + other.array)

    def __sub__(self, other: Metrics) -> Metrics:
        """What was added since `other`."""
        return Metrics.of(self.array - other.array)

    def add(
        self,
        scores: AnyFloats,
        labels: AnyFloats,
        weights: AnyFloats | None = None,
        loss: str = "logistic",
    ) -> None:
        """Counts a batch: raw scores (margins), labels, and how much each example matters.

        Labels are 0 or 1, or any number for the squared loss. No weights means 1 each.
        """
        if loss not in LOSSES:
            raise SettingError(f"there is no loss {loss!r}; expected one of {', '.join(LOSSES)}")
        score, label = _floats(scores), _floats(labels)
        weight = np.ones(score.shape, np.float32) if weights is None else _floats(weights)
        if score.ndim != 1 or not score.shape == label.shape == weight.shape:
            raise ArrayError(
                "expected scores, labels and weights in one dimension and of one length,"
                f" got shapes {score.shape}, {label.shape} and {weight.shape}"
            )
        _core.metrics_add(LOSSES.index(loss), score, label, weight, self.array)

    @property
    def examples(self) -> int:
        return round(float(self.array[_EXAMPLES]))

    @property
    def weight(self) -> float:
        return float(self.array[_WEIGHT])

    @property
    def loss(self) -> float:
        """The mean of the loss that is trained; not a number before the first example."""
        return self._mean(_LOSS)

    @property
    def mean_label(self) -> float:
        return self._mean(_LABEL)

    @property
    def mean_prediction(self) -> float:
        """Of probabilities; of the scores themselves for the squared loss."""
        return self._mean(_PREDICTION)

    @property
    def logloss(self) -> float:
        """The mean log-loss of sigmoid(score); not a number where labels are not 0 or 1."""
        return self._mean(_LOGLOSS, _BINARY)

    def _mean(self, place: int, of: int = _WEIGHT) -> float:
        weight = float(self.array[of])
        return float(self.array[place]) / weight if weight > 0 else math.nan

    def _histogram(self) -> tuple[Floats, Floats]:
        """Weights of the 0's and of the 1's by bin."""
        zeros, ones = self.array[_HISTOGRAM:].reshape(2, _BINS)
        return zeros, ones

    @property
    def auc(self) -> float:
        """How often a 1 has a higher score than a 0; not a number unless both occur."""
        zeros, ones = self._histogram()
        pairs = float(zeros.sum()) * float(ones.sum())
        if not pairs > 0:
            return math.nan
        below = np.cumsum(zeros) - zeros / 2
        return float(ones @ below) / pairs

    @property
    def calibration(self) -> list[tuple[float, float, float]]:
        """(mean prediction, observed rate of 1's, weight) of up to 20 parts of equal weight.

        The parts are ordered by prediction. A bin is never split: where many examples share a
        score, there are fewer parts and some are heavier.
        """
        zeros, ones = self._histogram()
        both = zeros + ones
        total = float(both.sum())
        if not total > 0:
            return []
        centre = (np.arange(_BINS) + 0.5) / _PER_UNIT - _EDGE
        probability = 1.0 / (1.0 + np.exp(-centre))
        middle = (np.cumsum(both) - both / 2) / total
        part = np.clip((middle * _PARTS).astype(np.intp), 0, _PARTS - 1)
        weight, hits, predicted = (
            np.bincount(part, values, _PARTS) for values in (both, ones, both * probability)
        )
        used = weight > total * 1e-9  # a difference of sums may leave a crumb in an empty part
        rows = zip(predicted[used], hits[used], weight[used], strict=True)
        return [(float(p / w), float(h / w), float(w)) for p, h, w in rows]


def _floats(given: AnyFloats) -> npt.NDArray[np.float32]:
    return np.asarray(given, np.float32, order="C")
