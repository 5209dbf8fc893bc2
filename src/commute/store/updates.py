# SPDX-License-Identifier: Apache-2.0
"""Updates: what a contribution does to a table's value, by name and numbers.

They are declared, not shipped: the core's kernels do the work where the table lies
(core/store/update.h has the formulas). Defaults are torch's, where torch has such an optimizer.

>>> from commute import Adam
>>> Adam(lr=0.01)
Adam(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, Final

from commute import _core
from commute._errors import SettingError

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "Semiring",
    "Update",
    "core_update",
    "with_set",
]

# The core's codes (core/store/update.h, core/dtype.h).
_PLAIN: Final = {"sum": 0, "assign": 1, "min": 2, "max": 3, "prod": 4}
_SGD, _MOMENTUM, _ADAGRAD, _ADAM, _FTRL = 5, 6, 7, 8, 9
_TIMES: Final = {"sum": 0, "prod": 1, "min": 2, "max": 3}
# How mathematicians and programmers call them.
_ALIASES: Final = {
    "+": "sum",
    "plus": "sum",
    "add": "sum",
    "*": "prod",
    "times": "prod",
    "mul": "prod",
    "or": "max",
    "and": "min",
}


class Update:
    """What `update=` takes besides a name."""

    def _core(self) -> _core.Update:
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Update):
    """value -= lr * g, where g is the contribution plus weight_decay * value."""

    lr: float
    weight_decay: float = 0.0

    def _core(self) -> _core.Update:
        return _optimizer(self, _SGD, self.lr, self.weight_decay)


@dataclass(frozen=True)
class Momentum(Update):
    """b = momentum * b + (1 - dampening) * g, at first b = g; value -= lr * b.

    As torch's SGD with momentum; with nesterov, value -= lr * (g + momentum * b).
    """

    lr: float
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def _core(self) -> _core.Update:
        if not isinstance(self.nesterov, bool):
            raise SettingError(f"expected nesterov to be True or False, got {self.nesterov!r}")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise SettingError("Nesterov momentum needs a momentum above 0 and no dampening")
        given = (self.lr, self.weight_decay, self.momentum, self.dampening)
        return _optimizer(self, _MOMENTUM, *given, nesterov=self.nesterov)


@dataclass(frozen=True)
class Adagrad(Update):
    """s += g * g; value -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)."""

    lr: float = 0.01
    lr_decay: float = 0.0
    initial: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def _core(self) -> _core.Update:
        given = (self.lr, self.weight_decay, 0.0, 0.0, self.eps, self.lr_decay, self.initial)
        return _optimizer(self, _ADAGRAD, *given)


@dataclass(frozen=True)
class Adam(Update):
    """Adam with bias correction; weight decay is added to the gradient, as torch's Adam does."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def _core(self) -> _core.Update:
        betas = self.betas
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not pair or not all(isinstance(b, numbers.Real) and 0 <= b < 1 for b in betas):
            raise SettingError(f"expected two betas from 0 to below 1, got {betas!r}")
        return _optimizer(self, _ADAM, self.lr, self.weight_decay, *self.betas, self.eps)


@dataclass(frozen=True)
class FTRL(Update):
    """FTRL-proximal, of McMahan and others, 2013: its l1 keeps at 0 what matters little.

    z += g - (sqrt(n + g * g) - sqrt(n)) / lr * value and n += g * g; then the value is 0 where
    |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2). It starts from zeros.

    >>> from commute import FTRL
    >>> FTRL(l1=0.5)
    FTRL(lr=0.1, beta=1.0, l1=0.5, l2=0.0)
    """

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def _core(self) -> _core.Update:
        core = _optimizer(self, _FTRL, self.lr, 0.0, self.l1, self.l2, self.beta)
        if self.lr == 0:  # it divides by it
            raise SettingError(f"expected lr of FTRL to be a number above 0, got {self.lr!r}")
        return core


@dataclass(frozen=True)
class Semiring(Update):
    """value = value (+) c (x) pushed, for `push(pushed, scale=c)`.

    `add` and `mul` are "sum", "prod", "min" or "max" (also "+", "*", "or", "and"): shortest paths
    are Semiring(add="min", mul="+"), reachability on 0 and 1 is Semiring(add="or", mul="and").
    """

    add: str
    mul: str

    def _core(self) -> _core.Update:
        add, mul = (_ALIASES.get(str(name), str(name)) for name in (self.add, self.mul))
        if add not in _TIMES or mul not in _TIMES:
            known = ", ".join([*_TIMES, *_ALIASES])
            raise SettingError(f"expected add and mul to be of {known}; got {self}")
        return _core.Update(_PLAIN[add], semiring=True, times=_TIMES[mul])


def _optimizer(update: Any, kind: int, *given: float, nesterov: bool = False) -> _core.Update:
    for field in dataclasses.fields(update):
        value = getattr(update, field.name)
        if field.name in ("betas", "nesterov"):
            continue
        if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
            raise SettingError(
                f"expected {field.name} of {type(update).__name__} to be a number of at least 0,"
                f" got {value!r}"
            )
    return _core.Update(kind, nesterov=nesterov, numbers=[float(number) for number in given])


def core_update(update: str | Update) -> _core.Update:
    """The update as the core knows it; raises SettingError for one that does not exist."""
    if isinstance(update, Update):
        return update._core()
    if isinstance(update, str) and update in _PLAIN:
        return _core.Update(_PLAIN[update])
    raise SettingError(
        f"there is no update {update!r}; expected {', '.join(map(repr, _PLAIN))}, or an object such"
        " as commute.SGD(lr=0.1), Momentum, Adagrad, Adam, FTRL or Semiring"
    )


# Where a number is in the core's update.
_PLACES: Final = {
    "lr": (0,),
    "weight_decay": (1,),
    "momentum": (2,),
    "dampening": (3,),
    "betas": (2, 3),
    "l1": (2,),
    "l2": (3,),
    "eps": (4,),
    "beta": (4,),
    "lr_decay": (5,),
}


def with_set(update: str | Update, changes: dict[str, Any]) -> tuple[Update, _core.Update]:
    """The update with some of its numbers changed, and the change as the core knows it."""
    if not isinstance(update, Update) or isinstance(update, Semiring):
        raise SettingError(f"update {update!r} has no numbers to set")
    fields = [field.name for field in dataclasses.fields(update)]  # type: ignore[arg-type]
    known = [name for name in fields if name in _PLACES]
    unknown = [name for name in changes if name not in known]
    if unknown or not changes:
        got = ", ".join(unknown) or "nothing"
        raise SettingError(f"{type(update).__name__} has {', '.join(known)} to set; got {got}")
    changed: Update = dataclasses.replace(update, **changes)  # type: ignore[type-var]
    kind = changed._core().kind  # checks the numbers
    change = [math.nan] * 7
    for name, value in changes.items():
        given = value if name == "betas" else (value,)
        for place, number in zip(_PLACES[name], given, strict=True):
            change[place] = float(number)
    return changed, _core.Update(kind, numbers=change)
