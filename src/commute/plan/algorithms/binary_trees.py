# SPDX-License-Identifier: Apache-2.0
"""Two binary trees on the same places, so that no place has children in both.

The places are numbered from 1 to n, from left to right. In the first tree odd places are leaves,
those that 2 divides but not 4 are one level up, and so on; the place on top is the largest power
of two. In the second tree the places are mirrored if n is even and moved by one if it is odd,
which makes leaves of all that had children. With half of an array on each tree, every place passes
on only as much as it gets. (Sanders, Speck and Träff, 2009.)
"""

from __future__ import annotations

from typing import NamedTuple


class Tree(NamedTuple):
    """`parent[q]` is 0 on top; of place 0, above the tree, the one child is the top."""

    parent: list[int]
    children: list[list[int]]


def two_trees(size: int) -> tuple[Tree, Tree]:
    """The two trees on places 1 to `size`."""
    places = range(1, size + 1)
    plain = {place: place for place in places}
    turned = {place: size + 1 - place for place in places}
    if size % 2:
        turned = {place: place - 1 or size for place in places}
    return _tree(plain, size), _tree(turned, size)


def _tree(stands_for: dict[int, int], size: int) -> Tree:
    """The tree in which each place has the position of another one in the first tree."""
    place_at = {position: place for place, position in stands_for.items()} | {0: 0}
    parent = [0] * (size + 1)
    children: list[list[int]] = [[] for _ in range(size + 1)]
    for position in range(1, size + 1):
        place, above = place_at[position], place_at[_above(position, size)]
        parent[place] = above
        children[above].append(place)
    return Tree(parent, children)


def _above(position: int, size: int) -> int:
    lowest = position & -position
    above = (position ^ lowest) | lowest << 1
    return above if above <= size else position ^ lowest
