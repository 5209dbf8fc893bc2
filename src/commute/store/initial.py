# SPDX-License-Identifier: Apache-2.0
"""What a row holds that nobody has pushed: zeros, a number, or random numbers.

Random ones are drawn from the table's seed and the row's key (`initial_row` in core/store/rows.h):
the same for every worker, whenever it asks, and however the rows are spread over the servers.

>>> from commute import Normal
>>> core_initial(Normal(std=0.5), "float32", seed=7)
(2, 0.0, 0.5, 7)
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from commute._errors import SettingError
from commute.store.table import number_as

__all__ = ["Normal", "Uniform", "core_initial"]

# The core's codes (core/store/rows.h).
_CONSTANT, _UNIFORM, _NORMAL = 0, 1, 2
_DRAWN: Final = ("float32", "float64")
_BFLOAT16_MAX: Final = (2 - 2**-7) * 2.0**127
_SEEDS: Final = 1 << 64


@dataclass(frozen=True)
class Uniform:
    """Rows start with numbers that are equally likely from `low` up to below `high`.

    >>> from commute import Uniform
    >>> Uniform(high=0.1)
    Uniform(low=-0.05, high=0.1)
    """

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _check_finite(self, low=self.low, high=self.high)
        if not self.low < self.high or math.isinf(float(self.high) - float(self.low)):
            raise SettingError(
                f"expected low of Uniform to be below high, and not infinitely far, got {self}"
            )


@dataclass(frozen=True)
class Normal:
    """Rows start with normally distributed numbers of this standard deviation and mean.

    >>> from commute import Normal
    >>> Normal(0.1)
    Normal(std=0.1, mean=0.0)
    """

    std: float = 0.01
    mean: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, std=self.std, mean=self.mean)
        if self.std < 0:
            raise SettingError(f"expected std of Normal to be at least 0, got {self.std!r}")


def core_initial(init: Any, dtype: str, seed: int) -> tuple[int, float, float, int]:
    """The kind, its two numbers and the seed, as the core knows them.

    A constant has seed 0, whatever was given: declarations that mean the same are equal.

    Raises:
        SettingError: it is nothing that rows can start with.
        ArrayError: a number that does not fit the dtype.
    """
    whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < _SEEDS:
        raise SettingError(f"expected seed to be a whole number from 0 to 2**64 - 1, got {seed!r}")
    if isinstance(init, Uniform):
        return _UNIFORM, *_drawn(init, dtype, init.low, init.high), int(seed)
    if isinstance(init, Normal):
        return _NORMAL, *_drawn(init, dtype, init.mean, init.std), int(seed)
    return _CONSTANT, _constant(init, dtype), 0.0, 0


def _drawn(init: Uniform | Normal, dtype: str, *given: float) -> tuple[float, float]:
    if dtype not in _DRAWN:
        raise SettingError(
            f"expected a table of {' or '.join(_DRAWN)} for init={init}, got {dtype}; declare one,"
            " or let rows start with a number"
        )
    for number in given:
        number_as(number, dtype, f"init={init}")
    a, b = map(float, given)
    return a, b


def _constant(init: Any, dtype: str) -> float:
    """As a row holds it: what two workers write differently and means the same is equal."""
    if init is None:
        return 0.0
    if not isinstance(init, (int, float, np.generic)):
        raise SettingError(
            "expected init of rows to be None, a number, commute.Uniform or commute.Normal, got"
            f" {type(init).__name__}; push what single rows shall hold"
        )
    if dtype == "bfloat16":
        return _bfloat16(init)
    cast = number_as(init, dtype, "init of rows")
    value = float(cast)
    if cast.dtype.kind in "iu" and int(value) != int(cast):
        raise SettingError(
            f"expected init of rows to be a number that float64 holds exactly, got {init!r}; push"
            " the difference"
        )
    return value


def _bfloat16(init: Any) -> float:
    """NumPy has none: the core rounds it, here it is only looked whether it fits."""
    value = float(number_as(init, "float32", "init of rows"))
    if math.isfinite(value) and abs(value) > _BFLOAT16_MAX:
        raise SettingError(f"expected init of rows to fit bfloat16, got {init!r}")
    return value


def _check_finite(init: Uniform | Normal, **given: Any) -> None:
    for name, value in given.items():
        if not _is_finite(value):
            raise SettingError(
                f"expected {name} of {type(init).__name__} to be a finite number, got {value!r}"
            )


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
