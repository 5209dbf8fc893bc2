# SPDX-License-Identifier: Apache-2.0
"""The binomial tree, the family that trees of messages share.

Places are numbered from the root, which is place 0. The parent of a place is the place without its
lowest set bit; so place 0 has the children 1, 2, 4, ..., and the child at distance 2^k is the root
of a subtree of up to 2^k places. The tree of n places has ceil(log2 n) levels.
"""

from __future__ import annotations


def parent(place: int) -> int:
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """The children, smallest subtree first."""
    reach = place & -place or size
    distances = (1 << k for k in range(size.bit_length()))
    return [place + d for d in distances if d < reach and place + d < size]


def reach(place: int, size: int) -> int:
    """How many places the subtree of a place has, itself included; they follow each other."""
    return min(place & -place or size, size - place)
