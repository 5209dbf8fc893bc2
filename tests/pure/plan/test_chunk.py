# SPDX-License-Identifier: Apache-2.0
"""The chunk rule. The core's tests hold the same table."""

import pytest

from commute.plan import bounds

# elements, bytes per element, chunks, bounds in elements
TABLE = [
    (0, 4, 1, [0, 0]),
    (0, 4, 4, [0, 0, 0, 0, 0]),
    (1, 4, 1, [0, 1]),
    (1, 4, 4, [0, 1, 1, 1, 1]),
    (3, 8, 8, [0, 3, 3, 3, 3, 3, 3, 3, 3]),
    (16, 4, 2, [0, 16, 16]),
    (17, 4, 2, [0, 16, 17]),
    (32, 4, 2, [0, 16, 32]),
    (33, 4, 2, [0, 32, 33]),
    (100, 4, 4, [0, 32, 64, 80, 100]),
    (100, 4, 3, [0, 48, 80, 100]),
    (100, 1, 3, [0, 64, 100, 100]),
    (1000, 2, 6, [0, 192, 352, 512, 672, 864, 1000]),
    (1000, 8, 7, [0, 144, 288, 432, 576, 720, 864, 1000]),
    (7, 64, 3, [0, 3, 5, 7]),
    (7, 128, 3, [0, 3, 5, 7]),
    (1 << 33, 1, 3, [0, 2863311552, 5726623104, 8589934592]),
]


@pytest.mark.parametrize(("elements", "itemsize", "chunks", "expected"), TABLE)
def test_table(elements: int, itemsize: int, chunks: int, expected: list[int]) -> None:
    """The rule gives exactly these bounds, which C++ must give too."""
    got = bounds(elements, itemsize, chunks)

    assert got == expected


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_chunks_cover_everything_on_cache_lines(itemsize: int) -> None:
    """Bounds rise from 0 to the length, and all but the last lie on 64-byte boundaries."""
    for elements in [*range(70), 127, 128, 129, 1000, 4096, 12345]:
        for chunks in [1, 2, 3, 5, 8, 64, 66]:
            got = bounds(elements, itemsize, chunks)

            assert len(got) == chunks + 1
            assert got[0] == 0
            assert got[-1] == elements
            assert got == sorted(got)
            assert all(b == elements or b * itemsize % 64 == 0 for b in got)
