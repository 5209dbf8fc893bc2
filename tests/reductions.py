# SPDX-License-Identifier: Apache-2.0
"""The reductions in NumPy: which there are, of what, and what the calls of a group must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
FLOATS = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]
BOOL = np.dtype("bool")
DTYPES = [*INTEGERS, *FLOATS, BOOL, *COMPLEX]
ARITHMETIC = ("sum", "mean", "prod", "min", "max")
OPS = (*ARITHMETIC, "and", "or", "xor")
_COMBINE = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def has_meaning(dtype: np.dtype[Any], op: str) -> bool:
    """Whether this reduction of this dtype is one; the others are a TypeError."""
    if op == "mean":
        return dtype in FLOATS or dtype in COMPLEX
    if op in ("min", "max"):
        return dtype not in COMPLEX
    return op in ("sum", "prod") or dtype in INTEGERS or dtype == BOOL


def fold(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts of all ranks combined in rank order, rounded where the core rounds."""
    total = parts[0].copy()
    for part in parts[1:]:
        _COMBINE[op](total, part, out=total)
    if op != "mean":
        return total
    if total.dtype in COMPLEX:  # part by part, where NumPy multiplies by a rounded 1 / n
        pairs = total.view(total.real.dtype)
        return (pairs / pairs.dtype.type(len(parts))).view(total.dtype)
    wide = np.float64 if total.dtype == np.float64 else np.float32
    return (total.astype(wide) / wide(len(parts))).astype(total.dtype)
