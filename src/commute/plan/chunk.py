# SPDX-License-Identifier: Apache-2.0
"""The one rule that cuts any length into chunks.

A space has blocks of equal length (OUT of allgather has one per rank, most others just one). The
part of a block that belongs to the tile at hand is cut into the plan's `chunks` chunks; chunk c of
block b has the id b * chunks + c. Chunks begin on 64-byte boundaries, so that no cache line
belongs to two of them; the length may be anything, and then some chunks are empty, but keep their
messages. With E elements of s bytes, K chunks and g = max(1, 64 // s) elements per line:

    bound(c) = min(E, ceil(ceil(E * c / K) / g) * g)    bound(K) = E
    chunk c = [bound(c), bound(c + 1))

C++ has the same rule, and the same table of examples in its tests.
"""

from __future__ import annotations

LINE_BYTES = 64


def bounds(elements: int, itemsize: int, chunks: int) -> list[int]:
    """The chunks + 1 bounds, in elements, of one block's tile.

    >>> bounds(100, itemsize=4, chunks=4)
    [0, 32, 64, 80, 100]
    """
    grain = max(1, LINE_BYTES // itemsize)
    inner = (-(-elements * c // chunks) for c in range(chunks))
    return [min(elements, -(-bound // grain) * grain) for bound in inner] + [elements]
