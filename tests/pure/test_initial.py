# SPDX-License-Identifier: Apache-2.0
"""What rows start with, as it is declared: the core's numbers, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from commute import ArrayError, Normal, SettingError, Uniform
from commute.store.initial import core_initial

INF, NAN = float("inf"), float("nan")
TENTH = float(np.float32(0.1))  # what a row of float32 holds for 0.1

GOOD: dict[str, tuple[Any, str, tuple[int, float, float, int]]] = {
    "zeros": (None, "int32", (0, 0.0, 0.0, 0)),
    "zeros of bfloat16": (None, "bfloat16", (0, 0.0, 0.0, 0)),
    "a whole number": (-3, "int8", (0, -3.0, 0.0, 0)),
    "the largest exact": (1 << 53, "int64", (0, 2.0**53, 0.0, 0)),
    "a float": (0.1, "float64", (0, 0.1, 0.0, 0)),
    "a float32": (0.1, "float32", (0, TENTH, 0.0, 0)),
    "NumPy's float32": (np.float32(0.1), "float32", (0, TENTH, 0.0, 0)),
    "a bfloat16": (-2.5, "bfloat16", (0, -2.5, 0.0, 0)),
    "infinity": (INF, "float16", (0, INF, 0.0, 0)),
    "infinity of bfloat16": (-INF, "bfloat16", (0, -INF, 0.0, 0)),
    "uniform": (Uniform(), "float32", (1, -0.05, 0.05, 7)),
    "uniform of float64": (Uniform(1, 2.5), "float64", (1, 1.0, 2.5, 7)),
    "normal": (Normal(), "float64", (2, 0.0, 0.01, 7)),
    "normal around": (Normal(std=0, mean=-1), "float32", (2, -1.0, 0.0, 7)),
}


@pytest.mark.parametrize("init, dtype, core", GOOD.values(), ids=GOOD)
def test_initial_as_the_core_knows_it(init: Any, dtype: str, core: Any) -> None:
    """Kind, two numbers, seed; numbers as rows hold them, and no seed where nothing is drawn."""
    found = core_initial(init, dtype, 7)

    assert found == core
    assert [type(part) for part in found] == [int, float, float, int]


NEVER: dict[str, tuple[Any, list[str]]] = {
    "low NaN": (lambda: Uniform(NAN, 1), ["low", "Uniform", "nan"]),
    "high infinite": (lambda: Uniform(0, INF), ["high", "Uniform", "inf"]),
    "high beyond floats": (lambda: Uniform(0, 10**400), ["high", "Uniform", "finite"]),
    "low is text": (lambda: Uniform("0", 1), ["low", "Uniform", "'0'"]),
    "no high": (lambda: Uniform(0, None), ["high", "Uniform", "None"]),
    "low is high": (lambda: Uniform(1, 1), ["low", "below high", "high=1"]),
    "low above high": (lambda: Uniform(2, 1), ["low", "below high", "low=2"]),
    "too far apart": (lambda: Uniform(-1e308, 1e308), ["infinitely far", "1e+308"]),
    "std below 0": (lambda: Normal(-0.1), ["std", "Normal", "-0.1", "at least 0"]),
    "std NaN": (lambda: Normal(NAN), ["std", "Normal", "nan"]),
    "std infinite": (lambda: Normal(INF), ["std", "Normal", "inf"]),
    "mean infinite": (lambda: Normal(1, -INF), ["mean", "Normal", "-inf"]),
    "mean is text": (lambda: Normal(1, "0"), ["mean", "Normal", "'0'"]),
}


@pytest.mark.parametrize("make, words", NEVER.values(), ids=NEVER)
def test_distribution_that_cannot_be(make: Any, words: list[str]) -> None:
    """It is refused where it is written, with the name of the number and what was got."""
    with pytest.raises(SettingError) as refused:
        make()

    assert all(word in str(refused.value) for word in words), str(refused.value)


MISFITS: dict[str, tuple[Any, str, Any, type[Exception], str]] = {
    "uniform integers": (Uniform(), "int32", 7, SettingError, "float32 or float64.*Unif.*int32"),
    "uniform halves": (Uniform(), "float16", 7, SettingError, "float32 or float64.*float16"),
    "normal bfloat16": (Normal(), "bfloat16", 7, SettingError, "float32 or float64.*bfloat16"),
    "high of float64": (Uniform(0, 1e300), "float32", 7, ArrayError, "Uniform.*float32"),
    "std of float64": (Normal(1e300), "float32", 7, ArrayError, "Normal.*float32"),
    "a half": (0.5, "int32", 7, ArrayError, "init of rows.*int32, got 0.5"),
    "too large": (300, "uint8", 7, ArrayError, "init of rows.*uint8, got 300"),
    "below 0": (-1, "uint64", 7, ArrayError, "init of rows.*uint64, got -1"),
    "too large a float": (1e39, "float32", 7, ArrayError, "init of rows.*float32"),
    "too large for bfloat16": (3.4e38, "bfloat16", 7, SettingError, "bfloat16, got 3.4e[+]38"),
    "not exact": ((1 << 53) + 1, "int64", 7, SettingError, "float64 holds exactly.*push"),
    "text": ("zeros", "float32", 7, SettingError, "a number, commute.Uniform.*got str"),
    "an array": (np.ones(3), "float32", 7, SettingError, "a number, commute.Uniform.*ndarray"),
    "a class": (Normal, "float32", 7, SettingError, "a number, commute.Uniform.*got type"),
    "seed below 0": (Normal(), "float32", -1, SettingError, "seed.*got -1"),
    "seed too large": (None, "float32", 1 << 64, SettingError, "seed.*2[*][*]64 - 1"),
    "seed is text": (None, "float32", "7", SettingError, "seed.*'7'"),
    "seed yes": (None, "float32", True, SettingError, "seed.*True"),
}


@pytest.mark.parametrize("init, dtype, seed, error, words", MISFITS.values(), ids=MISFITS)
def test_initial_that_does_not_fit(
    init: Any, dtype: str, seed: Any, error: type[Exception], words: str
) -> None:
    """What rows of this dtype cannot start with is refused, and the message says what they can."""
    with pytest.raises(error) as refused:
        core_initial(init, dtype, seed)

    assert re.search(words, str(refused.value)), str(refused.value)


def test_largest_seed() -> None:
    """Every uint64 is a seed, also NumPy's."""
    assert core_initial(Normal(), "float32", (1 << 64) - 1)[3] == (1 << 64) - 1
    assert core_initial(Normal(), "float32", np.uint64(5))[3] == 5
