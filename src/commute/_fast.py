# SPDX-License-Identifier: Apache-2.0
"""The compiled call path in front of `Group.allreduce`; see core/bindings/fast_call.cc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commute import _core
from commute._arrays import CODES
from commute._runner import Runner


def fast_allreduce(runner: Runner, method: Callable[..., Any]) -> Any:
    """A callable that takes over small blocking sums of NumPy arrays; None where it cannot."""
    descrs: list[object] = [np.dtype(name) if name != "bfloat16" else None for name in CODES]
    sample = np.zeros(3, dtype=np.float32)
    return _core.fast_call(
        runner.engine, method, runner.finish, descrs, sample, sample.__array_interface__["data"][0]
    )
