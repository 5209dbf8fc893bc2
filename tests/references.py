# SPDX-License-Identifier: Apache-2.0
"""The updates in NumPy, a step at a time: what the kernels of core/store/update.cc must give.

    take_step, states = reference(update), first_states(update, value)
    value, states = take_step(value, states, gradient, 1)

They compute in the value's type and in the order of operations that the kernels have, so that the
bits are equal too. A row is updated as a dense table of that row would be, by the contributions
that name it: `step` counts those, from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from commute import FTRL, SGD, Adagrad, Adam, Momentum, Semiring

States = tuple[Any, ...]  # as many arrays like the value as the update keeps
Step = Callable[[Any, States, Any, int], tuple[Any, States]]


def first_states(update: Any, value: Any) -> States:
    """What the update keeps of a value before the first step."""
    start = update.initial if isinstance(update, Adagrad) else 0
    return tuple(np.full_like(value, start) for _ in range(_KEPT.get(type(update), 0)))


def reference(update: Any) -> Step:
    """One step of this update: (value, states, gradient, step) to the next value and states."""
    if isinstance(update, Semiring):  # the gradient is what came, times its scale
        update = _NAMES.get(update.add, update.add)
    if isinstance(update, str):
        combine = _PLAIN[update]
        return lambda value, states, g, step: (combine(value, g), states)
    take_step = _OPTIMIZERS[type(update)]
    return lambda value, states, g, step: take_step(update, value, states, g, step)


def values_after(updates: Iterable[Any], value: Any, gradients: Any) -> list[Any]:
    """The value after each of the gradients; `updates` has the one of each step."""
    seen: list[Any] = []
    states: States = ()
    for step, (update, g) in enumerate(zip(updates, gradients, strict=True), 1):
        states = states if seen else first_states(update, value)
        value, states = reference(update)(value, states, g, step)
        seen.append(value)
    return seen


def _sgd(update: SGD, value: Any, states: States, g: Any, step: int) -> tuple[Any, States]:
    g = g + update.weight_decay * value
    return value - update.lr * g, states


def _momentum(update: Momentum, value: Any, states: States, g: Any, step: int) -> Any:
    one = value.dtype.type(1)
    fresh = one if step == 1 else one - value.dtype.type(update.dampening)
    g = g + update.weight_decay * value
    buffer = update.momentum * states[0] + fresh * g
    change = g + update.momentum * buffer if update.nesterov else buffer
    return value - update.lr * change, (buffer,)


def _adagrad(update: Adagrad, value: Any, states: States, g: Any, step: int) -> Any:
    lr = update.lr / (1 + (step - 1) * update.lr_decay)
    g = g + update.weight_decay * value
    squares = states[0] + g * g
    return value - lr * g / (np.sqrt(squares) + update.eps), (squares,)


def _adam(update: Adam, value: Any, states: States, g: Any, step: int) -> Any:
    one, (b1, b2) = value.dtype.type(1), map(value.dtype.type, update.betas)
    lr = update.lr / (1 - update.betas[0] ** step)
    scale = (1 - update.betas[1] ** step) ** 0.5
    g = g + update.weight_decay * value
    mean = b1 * states[0] + (one - b1) * g
    square = b2 * states[1] + (one - b2) * g * g
    return value - lr * mean / (np.sqrt(square) / scale + update.eps), (mean, square)


def _ftrl(update: FTRL, value: Any, states: States, g: Any, step: int) -> Any:
    z, n = states
    squares = n + g * g
    sigma = (np.sqrt(squares) - np.sqrt(n)) / update.lr
    z = z + (g - sigma * value)
    steep = (update.beta + np.sqrt(squares)) / update.lr + update.l2
    beyond = -(z - np.sign(z) * update.l1) / steep
    return np.where(np.abs(z) <= z.dtype.type(update.l1), z.dtype.type(0), beyond), (z, squares)


_NAMES = {"+": "sum", "*": "prod", "or": "max", "and": "min"}
_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "assign": lambda value, g: g,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}
_KEPT = {Momentum: 1, Adagrad: 1, Adam: 2, FTRL: 2}
_OPTIMIZERS: dict[type, Callable[..., tuple[Any, States]]] = {
    SGD: _sgd,
    Momentum: _momentum,
    Adagrad: _adagrad,
    Adam: _adam,
    FTRL: _ftrl,
}
