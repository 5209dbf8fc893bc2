# SPDX-License-Identifier: Apache-2.0
"""How many features are forecast, for data whose growth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from commute.learn.forecast import AT, FEW, Forecast

TOTAL = 10_000_000


def told(features: Callable[[float], float], shares: tuple[float, ...] = AT) -> list[int]:
    """What it says at each of these shares."""
    forecast = Forecast()
    said = []
    for share in shares:
        assert forecast.is_due(share)
        said.append(forecast.after(share, round(features(share))))
    assert not forecast.is_due(1.0)
    return said


@pytest.mark.parametrize("exponent", [0.3, 0.6, 1.0])
def test_a_power_is_followed(exponent):
    said = told(lambda x: TOTAL * x**exponent)

    assert said[:2] == [0, 0] and said[3] == 0
    assert said[2] == pytest.approx(TOTAL * 0.125**exponent, rel=1e-4)
    assert said[4] == pytest.approx(TOTAL, rel=1e-4)


@pytest.mark.parametrize("draws", [1, 2, 6, 20, 100])
def test_a_vocabulary_that_is_used_up(draws):
    """By so many draws per word, all equally likely: never much more room than there are words."""
    seen = lambda x: TOTAL * -math.expm1(-draws * x)  # noqa: E731
    said = told(seen)

    for at, until in ((2, AT[4]), (4, 1.0)):
        assert 0.95 * seen(until) <= said[at] <= 1.6 * seen(until)


def test_zipf_as_of_clicks():
    """A million examples of `commute generate clicks`, as they were counted."""
    counted = {0.008: 97_015, 0.016: 169_437, 0.032: 293_220, 0.064: 500_542, 0.125: 827_977}
    said = told(lambda x: counted[x], tuple(counted))

    assert 0.95 < said[2] / 827_977 < 1.15
    assert 0.95 < said[4] / 3_374_407 < 1.15


def test_few_features_need_no_room():
    assert told(lambda _: FEW - 1) == [0] * len(AT)


def test_no_more_features():
    """The curve does not fall, and dropped rows do no harm."""
    assert told(lambda _: FEW)[4] == FEW
    assert told(lambda x: FEW + 1000 * (1 - x))[4] >= FEW


def test_shares_between():
    """Batches do not end where one would like them to; a large one passes several."""
    said = told(lambda x: TOTAL * x**0.7, (0.009, 0.02, 0.034, 0.07, 0.13))
    assert said[4] == pytest.approx(TOTAL, rel=1e-4)

    forecast = Forecast()
    assert forecast.after(0.5, TOTAL) == 0
    assert not forecast.is_due(0.9)
