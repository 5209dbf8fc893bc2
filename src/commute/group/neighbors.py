# SPDX-License-Identifier: Apache-2.0
"""Halo exchange: the ranks of a group as a grid, and the layers of cells that neighbours share.

A large array is cut into blocks, one per rank of the grid. Each rank's block has `halo` more cells
at both ends of every axis of the grid, its halo, in which it wants to see the cells of its
neighbours:

        halo   what is mine    halo
      | h ... |  ...........  | ... h |        one axis, halo cells at each end
          ^     |           |     ^
          |     v           v     |
     their last   my first and last `halo` cells go to the neighbours

Axis after axis, each rank sends its first cells to the neighbour before it and its last cells to
the one after it, by two `sendrecv`, which cannot wait for each other in a ring. A layer of a later
axis contains the halos of the earlier ones, which have been filled by then: so the corners, which
belong to a diagonal neighbour, arrive by two or three hops, and nobody sends to more than 2
neighbours per axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commute.group.messages import Messages

AXES_MAX = 3


class Neighbors:
    """The ranks of a group as a grid of 1, 2 or 3 axes; made by `Group.neighbors`.

    Ranks are numbered row by row: the last coordinate changes first.

    Attributes:
        shape, periodic: as they were given, one entry for each axis.
        coordinates: my place in the grid.
    """

    def __init__(self, group: Messages, shape: Any, periodic: Any) -> None:
        self._group = group
        self.shape = _checked_shape(shape, group.size)
        self.periodic = _checked_periodic(periodic, len(self.shape))
        self.coordinates = _coordinates(group.rank, self.shape)

    def __repr__(self) -> str:
        return f"<Neighbors of {self.coordinates} in a grid of {self.shape}>"

    def rank_at(self, coordinates: tuple[int, ...]) -> int | None:
        """The rank at a place of the grid; None outside, except along periodic axes."""
        rank = 0
        for place, length, periodic in zip(coordinates, self.shape, self.periodic, strict=True):
            if not periodic and not 0 <= place < length:
                return None
            rank = rank * length + place % length
        return rank

    def beside(self, axis: int, step: int) -> int | None:
        """The neighbour `step` places away along an axis, -1 before and 1 after me."""
        place = list(self.coordinates)
        place[axis] += step
        return self.rank_at(tuple(place))

    def exchange(self, block: Any, halo: int = 1, *, timeout: float | None = None) -> Any:
        """Fill the halo of my block with the cells of my neighbours; in place, returns block.

        The first axes of block are those of the grid, each with `halo` cells at both ends that
        belong to neighbours; further axes are carried along. Corners are filled too. At an end
        of the grid that is not periodic the halo stays as it is: it holds your boundary values.

        Blocks need not be of equal length, if those side by side have equal faces: along an axis
        each rank of the grid may have its own length, of at least `halo` cells of its own. Others
        are a MismatchError.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     grid = world.neighbors((world.size,), periodic=True)
        ...     block = numpy.array([0.0, 1.0, 2.0, 3.0, 0.0])
        ...     grid.exchange(block)
        array([3., 1., 2., 3., 1.])
        """
        self._check_block(block, halo)
        if halo == 0:
            return block
        for axis in range(len(self.shape)):
            before, after = self.beside(axis, -1), self.beside(axis, 1)
            # Where both neighbours are one rank, its messages arrive in the order of these lines.
            for inner, to, source, outer in (
                (slice(halo, 2 * halo), before, after, slice(-halo, None)),
                (slice(-2 * halo, -halo), after, before, slice(None, halo)),
            ):
                layers = (slice(None),) * axis
                got = self._group.sendrecv(block[(*layers, inner)], to, source, timeout=timeout)
                if got is not None:
                    block[(*layers, outer)] = got
        return block

    def _check_block(self, block: Any, halo: int) -> None:
        if not isinstance(halo, int) or isinstance(halo, bool) or halo < 0:
            raise ValueError(f"exchange expected halo= a whole number from 0 up, got {halo!r}")
        found = tuple(getattr(block, "shape", ()))
        if len(found) < len(self.shape) or any(n < 3 * halo for n in found[: len(self.shape)]):
            raise ValueError(
                f"exchange on rank {self._group.rank} expected a block of at least"
                f" {3 * halo} cells along each of {len(self.shape)} axes (halo, {halo} of its own,"
                f" halo), got shape {found}; use fewer ranks or a smaller halo"
            )


def _coordinates(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for length in reversed(shape):
        rank, here = divmod(rank, length)
        place.append(here)
    return tuple(reversed(place))


def _checked_shape(shape: Any, size: int) -> tuple[int, ...]:
    try:
        found = tuple(int(n) for n in shape)
    except TypeError:
        found = (0,)
    if not 1 <= len(found) <= AXES_MAX or min(found) < 1:
        raise ValueError(
            f"neighbors expected a shape of 1 to {AXES_MAX} lengths from 1 up, got {shape!r}"
        )
    if math.prod(found) != size:
        raise ValueError(
            f"neighbors expected a grid of {size} ranks (the group's size), got shape {found} with"
            f" {math.prod(found)}"
        )
    return found


def _checked_periodic(periodic: Any, axes: int) -> tuple[bool, ...]:
    if isinstance(periodic, bool):
        return (periodic,) * axes
    found = tuple(periodic) if isinstance(periodic, list | tuple) else ()
    if len(found) != axes or not all(isinstance(each, bool) for each in found):
        raise ValueError(
            f"neighbors expected periodic= True, False or one of them for each of {axes} axes, got"
            f" {periodic!r}"
        )
    return found
