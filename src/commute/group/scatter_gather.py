# SPDX-License-Identifier: Apache-2.0
"""The general primitive: arrays of some ranks go to others in units, a message for each pair.

The array of each source is cut along its leading axis into units. Units and destinations are
counted off against each other like cards: with as many units as destinations each gets one, with a
single unit all get that one, and in general unit i is for destination d if they are equal modulo
the smaller of the two numbers, of which the larger must be a multiple.

All messages are posted before any is waited for, receives first; so no order of ranks hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from commute import _core
from commute._arrays import copy_into, empty_like, overlap, reading, writing

if TYPE_CHECKING:
    from commute.group.messages import Messages

_CALL = "scatter_gather"


class Deal(NamedTuple):
    """What is dealt out to whom, checked."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    unit: int

    def units_for(self, place: int, units: int) -> slice:
        """Which of a source's units are for the destination at this place of the list."""
        many = len(self.destinations)
        if units <= many:
            return slice(place % units, place % units + 1)
        return slice(place, None, many)

    def share(self, units: int) -> int:
        """How many units of one source a destination gets."""
        return max(1, units // len(self.destinations))


def deal(group: Messages, sources: Any, destinations: Any, unit: Any) -> Deal:
    """The arguments as a Deal; raises ValueError."""
    if not isinstance(unit, int | np.integer) or unit < 1:
        raise ValueError(f"{_CALL} expected unit= a whole number from 1 up, got {unit!r}")
    givers, takers = (
        _ranks(group, ranks, what)
        for what, ranks in (("sources", sources), ("destinations", destinations))
    )
    return Deal(givers, takers, int(unit))


def scatter_gather(
    group: Messages, x: Any, dealt: Deal, out: Any, timeout: float | None, *, background: bool
) -> tuple[list[_core.Operation], Any]:
    """Posts this rank's messages; the operations, and what this rank gets."""
    group._runner.check()
    me = group.rank
    sends, receives = me in dealt.sources, me in dealt.destinations
    if x is None and (sends or (receives and out is None)):
        raise ValueError(
            f"{_CALL} on rank {me} got no x; a source has one, and a destination passes one like"
            " it, or out="
        )
    units = None if x is None else _units(x, dealt)
    operations: list[_core.Operation] = []
    options: Any = {"call": _CALL, "background": background}
    parts: list[Any] = []
    if receives:
        out = _result(group, x, out, dealt, units)
        rows = out.shape[0] // len(dealt.sources)
        parts = [out[k * rows : (k + 1) * rows] for k in range(len(dealt.sources))]
        for source, part in zip(dealt.sources, parts, strict=True):
            if source != me:
                buffer = writing(part, _CALL)
                operations.append(group._post(buffer, source, timeout, sends=False, **options))
    for place, to in enumerate(dealt.destinations if sends and units else ()):
        cut = x.reshape(units, dealt.unit, *x.shape[1:])
        buffer = reading(cut[dealt.units_for(place, units or 1)], _CALL)
        if to == me:
            copy_into(writing(parts[dealt.sources.index(me)], _CALL), buffer)
        else:
            operations.append(group._post(buffer, to, timeout, sends=True, **options))
    return operations, out if receives else None


def _result(group: Messages, x: Any, out: Any, dealt: Deal, units: int | None) -> Any:
    if x is None or units is None:
        if not out.shape or out.shape[0] % (len(dealt.sources) * dealt.unit):
            raise ValueError(
                f"{_CALL} on rank {group.rank} expected out= with whole units of {dealt.unit} from"
                f" each of {len(dealt.sources)} sources, got shape {tuple(out.shape)}"
            )
        return out
    shape = (len(dealt.sources) * dealt.share(units) * dealt.unit, *x.shape[1:])
    if out is None:
        return empty_like(x, shape)
    given, target = reading(x, _CALL), writing(out, _CALL)
    if target.shape != shape or target.dtype != given.dtype:
        raise ValueError(
            f"{_CALL} on rank {group.rank} expected out= of shape {shape} and the dtype of x, got"
            f" shape {target.shape}; allocate it like the result"
        )
    if overlap(given, target):
        raise ValueError(f"{_CALL} got an out= that overlaps x; pass separate memory")
    return out


def _units(x: Any, dealt: Deal) -> int:
    shape = tuple(x.shape)
    if not shape or shape[0] < 1 or shape[0] % dealt.unit:
        raise ValueError(
            f"{_CALL} expected a leading axis of whole units of {dealt.unit}, got shape {shape}"
        )
    units, many = shape[0] // dealt.unit, len(dealt.destinations)
    if max(units, many) % min(units, many):
        raise ValueError(
            f"{_CALL} cannot deal {units} units evenly to {many} destinations; cut x into 1, {many}"
            f" or a multiple of {many} units"
        )
    return int(units)


def _ranks(group: Messages, ranks: Any, what: str) -> tuple[int, ...]:
    found: Sequence[Any] = tuple(ranks) if isinstance(ranks, Sequence | np.ndarray) else ()
    if not found or len(set(found)) != len(found):
        raise ValueError(f"{_CALL} expected {what}= different ranks in a list, got {ranks!r}")
    for rank in found:
        group._check_rank(rank, what, _CALL)
    return tuple(int(rank) for rank in found)
