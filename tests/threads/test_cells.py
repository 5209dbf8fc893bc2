# SPDX-License-Identifier: Apache-2.0
"""Every collective against NumPy on the in-memory link: see cells.py for what is chosen of a call.

Of float32 and its sum all cells, otherwise those of a seeded cover; `--all` has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from cells import SIZES, Cell, check, covered, in_full

AT_ONCE = 25  # cells per deadline of the ranks


def run(ranks: Any, size: int, cells: Iterable[Cell], seed: int) -> int:
    """Checks all cells on one group, one after the other; how many there were."""
    group_of, numbered = ranks(size), list(enumerate(cells))
    for begin in range(0, len(numbered), AT_ONCE):
        some = numbered[begin : begin + AT_ONCE]
        group_of.values(lambda group, some=some: [check(group, c, n, seed) for n, c in some])
    return len(numbered)


@pytest.mark.parametrize("size", SIZES)
def test_a_cover(ranks, run_seed, size):
    """Each pair of values that can come together does, in the cells of all sizes."""
    cells = [cell for cell in covered("memory", run_seed) if cell.ranks == size]

    assert run(ranks, size, cells, run_seed) > 0


@pytest.mark.parametrize("op", ["sum", "none"])
@pytest.mark.parametrize("size", SIZES)
def test_float32_in_full(ranks, seed, size, op):
    """Every algorithm, length and place of the result; of reductions the sum."""
    assert run(ranks, size, in_full("memory", ranks=size, dtype="float32", op=op), seed) > 0


@pytest.mark.timeout(170)
@pytest.mark.parametrize("size", SIZES)
def test_all(ranks, seed, size, way):
    """The whole product."""
    assert run(ranks, size, in_full("memory", ranks=size, way=way), seed) > 0
