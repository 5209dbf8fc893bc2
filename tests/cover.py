# SPDX-License-Identifier: Apache-2.0
"""Cells of a product that is too large to run: all of them, or so many that each pair is there.

    axes     by name the values that there are
    part     some axes with a value each; a cell is a part that has all axes
    fits     whether no rule is broken by what a part has; the rules may speak of several axes

A bug seldom needs more than two values to come together. So the cover has, for any two axes, each
pair of their values that fits into some cell; which cells these are is drawn by a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Axes = Mapping[str, Sequence[Any]]
Part = dict[str, Any]
Fits = Callable[[Part], bool]
Pair = tuple[str, Any, str, Any]


def product(axes: Axes, fits: Fits, part: Part | None = None) -> Iterator[Part]:
    """Every cell, in the order of the axes; of those that have this part, if one is given."""
    part = part or {}
    name = next((name for name in axes if name not in part), None)
    if name is None:
        yield {name: part[name] for name in axes}
        return
    for value in axes[name]:
        more = {**part, name: value}
        if fits(more):
            yield from product(axes, fits, more)


def pairs(axes: Axes, cell: Part) -> Iterator[Pair]:
    """The pairs of values that a cell has, or a part of one."""
    for a, b in itertools.combinations(axes, 2):
        if a in cell and b in cell:
            yield a, cell[a], b, cell[b]


def cover(axes: Axes, fits: Fits, rng: np.random.Generator) -> list[Part]:
    """Cells that have each pair of values that can come together.

    Each cell begins with a pair that is still missing. The other axes follow, the longest first,
    each with the value that brings the most missing pairs; the generator decides between equals.
    """
    missing = dict.fromkeys(_all_pairs(axes, rng))  # a set that keeps its order
    longest = sorted(axes, key=lambda name: -len(axes[name]))
    found = []
    while missing:
        pair = a, v, b, w = next(iter(missing))
        cell = _completed(axes, longest, fits, {a: v, b: w}, missing, rng)
        if cell is None:
            del missing[pair]  # no cell has both
            continue
        for each in pairs(axes, cell):
            missing.pop(each, None)
        found.append(cell)
    return found


def _all_pairs(axes: Axes, rng: np.random.Generator) -> list[Pair]:
    listed = [
        (a, v, b, w)
        for a, b in itertools.combinations(axes, 2)
        for v, w in itertools.product(axes[a], axes[b])
    ]
    return [listed[at] for at in rng.permutation(len(listed))]


def _completed(
    axes: Axes,
    longest: Sequence[str],
    fits: Fits,
    part: Part,
    missing: Mapping[Pair, None],
    rng: np.random.Generator,
) -> Part | None:
    """A cell that has this part; None where no cell has it."""
    if not fits(part):
        return None
    name = next((name for name in longest if name not in part), None)
    if name is None:
        return {name: part[name] for name in axes}
    values = [axes[name][at] for at in rng.permutation(len(axes[name]))]
    gain = {
        at: sum(pair in missing for pair in _pairs_with(axes, part, name, value))
        for at, value in enumerate(values)
    }
    for at in sorted(gain, key=lambda at: -gain[at]):
        more = {**part, name: values[at]}
        cell = _completed(axes, longest, fits, more, missing, rng)
        if cell is not None:
            return cell
    return None


def _pairs_with(axes: Axes, part: Part, name: str, value: Any) -> Iterator[Pair]:
    """The pairs that this value of one more axis makes with a part."""
    before = True
    for other in axes:
        if other == name:
            before = False
        elif other in part:
            yield (other, part[other], name, value) if before else (name, value, other, part[other])
