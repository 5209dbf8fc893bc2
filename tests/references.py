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


class RowTable:
    """A sparse table as a dict of rows.

    Args:
        initial: the value of a row that nobody has pushed, by its key.

    Attributes:
        rows: by key its value, states and how often it was updated.
    """

    def __init__(self, width: int, dtype: Any, update: Any = "sum", initial: Any = None) -> None:
        self.width = width
        self.dtype = np.dtype(dtype)
        self.update = update
        self.initial = initial or (lambda key: np.zeros(width, dtype))
        self.rows: dict[int, tuple[Any, States, int]] = {}
        name = update.add if isinstance(update, Semiring) else update
        name = name if isinstance(name, str) else "sum"  # optimizers get the sum
        self._combine = _PLAIN[_NAMES.get(name, name)]

    def push(self, *contributions: tuple[Any, Any], divisor: int = 1) -> None:
        """One round: what repeated keys were given with is combined first, in that order."""
        total: dict[int, Any] = {}
        for keys, rows in contributions:
            values = np.asarray(rows).reshape(-1, self.width)
            mine: dict[int, Any] = {}
            for key, row in zip(np.ravel(keys).tolist(), values, strict=True):
                mine[key] = self._combine(mine[key], row) if key in mine else row
            for key, row in mine.items():
                total[key] = self._combine(total[key], row) if key in total else row
        for key, row in total.items():
            value, states, step = self.rows.get(key) or self._fresh(key)
            g = row if divisor == 1 else row / self.dtype.type(divisor)
            value, states = reference(self.update)(value, states, g, step + 1)
            self.rows[key] = (value.astype(self.dtype), states, step + 1)

    def _fresh(self, key: int) -> tuple[Any, States, int]:
        value = self.initial(key)
        return value, first_states(self.update, value), 0

    def drop(self, keys: Any) -> None:
        for key in np.ravel(keys).tolist():
            self.rows.pop(key, None)

    def pull(self, keys: Any) -> Any:
        given = np.asarray(keys, np.uint64)
        found = [(self.rows.get(key) or self._fresh(key))[0] for key in given.ravel().tolist()]
        return np.array(found, self.dtype).reshape(*given.shape, self.width)


def _sgd(update: SGD, value: Any, states: States, g: Any, step: int) -> tuple[Any, States]:
    g = g + update.weight_decay * value
    return value - update.lr * g, states


def _momentum(update: Momentum, value: Any, states: States, g: Any, step: int) -> Any:
    one = value.dtype.type(1)
    fresh = one if step == 1 else value.dtype.type(1 - update.dampening)
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
    b1, b2 = map(value.dtype.type, update.betas)
    lr = update.lr / (1 - update.betas[0] ** step)
    scale = (1 - update.betas[1] ** step) ** 0.5
    g = g + update.weight_decay * value
    mean = b1 * states[0] + value.dtype.type(1 - update.betas[0]) * g
    square = b2 * states[1] + value.dtype.type(1 - update.betas[1]) * g * g
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
