# SPDX-License-Identifier: Apache-2.0
"""Halo exchange against the whole array with the same halo, cut into blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from commute import Group, MismatchError, init

GRIDS = [(1,), (2,), (5,), (1, 1), (1, 3), (2, 2), (3, 2), (2, 1, 3), (2, 2, 2), (1, 2, 2)]
EDGE = -7  # what stands in the halo before, at the ends of the grid for ever


def cuts(lengths: list[int]) -> list[tuple[int, int]]:
    """Where the blocks of these lengths begin and end along an axis."""
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def padded(whole: np.ndarray, axes: int, halo: int, periodic: tuple[bool, ...]) -> np.ndarray:
    """The whole array with a halo of its own."""
    for axis in range(axes):
        width = [(halo, halo) if at == axis else (0, 0) for at in range(whole.ndim)]
        options: Any = {"mode": "wrap"} if periodic[axis] else {"constant_values": EDGE}
        whole = np.pad(whole, width, **options)
    return whole


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("periodic", ["none", "all", "mixed"])
@pytest.mark.parametrize("halo", [1, 2])
def test_blocks_see_what_the_whole_array_sees(ranks, rng, shape, periodic, halo):
    """Faces, edges and corners; blocks of different lengths; further axes are carried along."""
    axes = len(shape)
    wrapped = {"none": (False,) * axes, "all": (True,) * axes, "mixed": (True, False, True)[:axes]}
    around = wrapped[periodic]
    lengths = [[int(rng.integers(halo, halo + 4)) for _ in range(n)] for n in shape]
    whole = rng.integers(0, 1000, (*(sum(each) for each in lengths), 2))
    expected = padded(whole, axes, halo, around)

    def work(group: Group) -> None:
        grid = group.neighbors(shape, periodic=around if periodic == "mixed" else around[0])
        mine = [cuts(each)[place] for each, place in zip(lengths, grid.coordinates, strict=True)]
        block = np.full((*(end - begin + 2 * halo for begin, end in mine), 2), EDGE)
        block[(slice(halo, -halo),) * axes] = whole[tuple(slice(*cut) for cut in mine)]
        assert grid.exchange(block, halo) is block
        np.testing.assert_array_equal(
            block, expected[tuple(slice(begin, end + 2 * halo) for begin, end in mine)]
        )

    ranks(int(np.prod(shape))).values(work)


def test_places_in_a_grid(ranks):
    """Row by row; outside there is nobody, except where the axis is periodic."""

    def work(group: Group) -> Any:
        grid = group.neighbors((2, 3), periodic=[False, True])
        assert grid.shape == (2, 3) and grid.periodic == (False, True)
        assert grid.rank_at(grid.coordinates) == group.rank
        return grid.coordinates, [grid.beside(axis, step) for axis in (0, 1) for step in (-1, 1)]

    assert ranks(6).values(work) == [
        ((0, 0), [None, 3, 2, 1]),
        ((0, 1), [None, 4, 0, 2]),
        ((0, 2), [None, 5, 1, 0]),
        ((1, 0), [0, None, 5, 4]),
        ((1, 1), [1, None, 3, 5]),
        ((1, 2), [2, None, 4, 3]),
    ]


def test_tensors(ranks):
    torch = pytest.importorskip("torch")

    def work(group: Group) -> list[float]:
        block = torch.full((3,), float(group.rank))
        assert group.neighbors([2], periodic=True).exchange(block) is block
        return block.tolist()

    assert ranks(2).values(work) == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


def test_no_halo_is_no_exchange():
    with init() as world:
        block = np.arange(4)
        assert world.neighbors((1,), periodic=True).exchange(block, halo=0) is block
        assert block.tolist() == [0, 1, 2, 3]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"shape": (2, 2)}, r"grid of 6 ranks .* got shape \(2, 2\) with 4"),
    "four axes": ({"shape": (1, 1, 2, 3)}, "1 to 3 lengths from 1 up"),
    "no axis": ({"shape": ()}, "1 to 3 lengths"),
    "a number": ({"shape": 6}, "1 to 3 lengths .* got 6"),
    "none along an axis": ({"shape": (6, 0)}, "1 to 3 lengths"),
    "periodic of another axis": (
        {"shape": (2, 3), "periodic": [True]},
        r"for each of 2 axes, got \[True\]",
    ),
    "periodic a word": ({"shape": (6,), "periodic": "yes"}, "got 'yes'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_grids_that_cannot_be(ranks, what):
    options, words = WRONG[what]

    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=words):
            group.neighbors(**options)

    ranks(6).values(work)


def test_blocks_that_do_not_fit(ranks):
    """A block with too few cells of its own is refused here; faces that differ are a mismatch."""

    def refused(group: Group) -> None:
        grid = group.neighbors((2,))
        with pytest.raises(ValueError, match=r"at least 6 cells .* got shape \(5,\); use fewer"):
            grid.exchange(np.ones(5), halo=2)
        with pytest.raises(ValueError, match=r"along each of 1 axes .* got shape \(\)"):
            grid.exchange(np.array(1.0))
        with pytest.raises(ValueError, match="halo= a whole number from 0 up, got -1"):
            grid.exchange(np.ones(5), halo=-1)
        group.barrier()

    ranks(2).values(refused)
    ended = ranks(2)(lambda group: group.neighbors((2,)).exchange(np.ones((4, 5 + group.rank))))

    assert all(isinstance(error, MismatchError) for error in ended)
