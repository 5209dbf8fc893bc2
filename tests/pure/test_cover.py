# SPDX-License-Identifier: Apache-2.0
"""The cells that the collectives are compared with NumPy in: that none is missing, or too many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cells import AXES, CELLS_MAX, LINKS, WAYS, covered, fits, in_full, read, written
from commute import plan
from cover import cover, pairs, product

SMALL = {"a": range(4), "b": "xyz", "c": range(3), "d": (True, False)}


def anything(part):
    return True


def ruled(forbidden):
    """Rules over two and three axes: no cell has all values of one of these."""
    return lambda part: not any(rule.items() <= part.items() for rule in forbidden)


def rules(rng):
    """Some pairs and triples of values."""
    axes = [list(SMALL) for _ in range(12)]
    chosen = [rng.choice(names, 2 + at % 2, replace=False) for at, names in enumerate(axes)]
    return [{name: rng.choice(list(SMALL[name])) for name in names} for names in chosen]


def by_hand(axes, fits):
    """The product, without looking at parts."""
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [cell for cell in cells if fits(cell)]


def pairs_of(axes, cells):
    return {pair for cell in cells for pair in pairs(axes, cell)}


def test_pairs_of_a_cell():
    """Each two of its values, once."""
    found = list(pairs(SMALL, {"a": 1, "b": "x", "c": 2, "d": True}))

    assert len(found) == len(set(found)) == 6
    assert ("a", 1, "b", "x") in found and ("c", 2, "d", True) in found


def test_the_product_is_all_that_fits(rng):
    """With any rules, and of a part only the cells that have it."""
    for _ in range(20):
        legal = ruled(rules(rng))
        expected = by_hand(SMALL, legal)

        assert list(product(SMALL, legal)) == expected
        wanted = [cell for cell in expected if cell["c"] == 1]
        assert list(product(SMALL, legal, {"c": 1})) == wanted


def test_a_cover_has_every_pair_that_some_cell_has(rng):
    """No more and no less, whatever the rules; and each of its cells obeys them."""
    for _ in range(20):
        legal = ruled(rules(rng))
        found, every = cover(SMALL, legal, rng), by_hand(SMALL, legal)

        assert all(cell in every for cell in found)
        assert pairs_of(SMALL, found) == pairs_of(SMALL, every)


def test_a_cover_is_small(rng):
    """No cell without a new pair, and not many more than the two longest axes need."""
    found = cover(SMALL, anything, rng)
    seen = [pairs_of(SMALL, found[:count]) for count in range(len(found) + 1)]

    assert all(less < more for less, more in itertools.pairwise(seen))
    assert 12 <= len(found) <= 20


@pytest.mark.parametrize("link", LINKS)
def test_the_cover_of_a_link(link, seed):
    """Each pair of values that some cell of the whole product has; no cell that it has not."""
    cells = [cell._asdict() for cell in covered(link, seed)]
    found = pairs_of(AXES, cells)

    assert all(fits(link, cell) for cell in cells)
    for a, b in itertools.combinations(AXES, 2):
        for v, w in itertools.product(AXES[a], AXES[b]):
            possible = next(in_full(link, **{a: v, b: w}), None) is not None
            assert ((a, v, b, w) in found) == possible


def test_the_covers_are_small_enough(seed):
    """All links together."""
    assert sum(len(covered(link, seed)) for link in LINKS) <= CELLS_MAX


def test_a_seed_replays(seed):
    """The same cells from the same seed, others from another."""
    again = covered.__wrapped__("shared", seed)

    assert again == covered("shared", seed)
    assert again != covered("shared", seed + 1)


def test_cells_as_text(seed):
    """What a process reads is what was written."""
    cells = covered("tcp", seed)

    assert read(written(cells)) == cells


def test_float32_is_in_full():
    """Every algorithm, size and length, in place or not: as many cells as there are by hand."""
    cells = list(in_full("memory", dtype="float32"))
    sums = [cell for cell in cells if cell.op in ("sum", "none")]
    seen = {(cell.way, cell.ranks, cell.elements, cell.into) for cell in sums}

    assert len(seen) == len(sums)  # no length twice under two names
    wanted = 0
    for way in WAYS:
        places = {"allreduce": 3, "reduce": 3, "broadcast": 3}.get(way.call, 2)
        lengths = 7 * 9 - 3 - 9 * (way.algorithm == "line")
        wanted += lengths - 9 if way.algorithm == plan.DIRECT else lengths * places
    assert len(sums) == wanted


def test_what_is_refused_is_no_cell():
    """Rules as the calls have them."""
    by = {str(way): way for way in WAYS}
    refused = [
        ("tcp", {"way": by["allreduce-two-shot"]}),
        ("shared", {"way": by["allreduce-two-shot"], "ranks": 1}),
        ("shared", {"way": by["allreduce-line"], "length": "large"}),
        ("shared", {"way": by["allreduce-direct"], "into": "out"}),
        ("shared", {"way": by["allreduce-direct"], "length": "0"}),
        ("shared", {"way": by["allgather-ring"], "into": "x"}),
        ("shared", {"way": by["reduce-binomial"], "into": "new"}),
        ("shared", {"way": by["broadcast-chain"], "op": "sum"}),
        ("shared", {"way": by["allreduce-ring"], "op": "none"}),
        ("shared", {"dtype": "int8", "op": "mean"}),
        ("shared", {"dtype": "complex64", "op": "min"}),
        ("shared", {"dtype": "bfloat16", "op": "xor"}),
    ]

    assert [link for link, part in refused if fits(link, part)] == []
    assert all(fits("memory", {"way": way}) for way in WAYS)


def test_large_is_more_than_a_tile():
    """Of every plan but the direct one, whose tile bounds nothing."""
    for cell in in_full("memory", length="large", into="out"):
        if cell.way.algorithm is not None and cell.dtype in ("int8", "complex128"):
            tile = plan.tile_bytes(plan.build(*cell.way, cell.ranks))

            assert cell.elements * np.dtype(cell.dtype).itemsize > tile
