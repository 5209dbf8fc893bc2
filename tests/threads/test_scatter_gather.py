# SPDX-License-Identifier: Apache-2.0
"""The general primitive: the five collectives that are cases of it, and what is none of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commute import ClosedError, Group, MismatchError, init

SIZES = (1, 2, 3, 5, 8)


def array_of(rank: int, rows: int) -> np.ndarray:
    return 1000 * rank + np.arange(rows * 2).reshape(rows, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 4, 3000])
def test_the_five_cases(ranks, size, rows):
    """Each equal to the collective of that name."""
    root = size // 2
    everyone = range(size)

    def work(group: Group) -> None:
        mine = array_of(group.rank, rows)
        wide = array_of(group.rank, rows * size)  # one part for each rank
        parts = wide.reshape(size, rows, 2)

        def deal(x: np.ndarray, sources: Any, destinations: Any, unit: int) -> Any:
            return group.scatter_gather(x, sources, destinations, unit)

        broadcast = deal(mine, [root], everyone, rows)
        np.testing.assert_array_equal(broadcast, group.broadcast(mine.copy(), root=root))
        scatter = deal(wide, [root], everyone, rows)
        np.testing.assert_array_equal(scatter, group.scatter(parts, root))
        gather, gathered = deal(mine, everyone, [root], rows), group.gather(mine, root)
        assert (gather is None) == (gathered is None) == (group.rank != root)
        if gather is not None:
            np.testing.assert_array_equal(gather.reshape(parts.shape), gathered)
        allgather = deal(mine, everyone, everyone, rows)
        np.testing.assert_array_equal(allgather.reshape(parts.shape), group.allgather(mine))
        alltoall = deal(wide, everyone, everyone, rows)
        np.testing.assert_array_equal(alltoall.reshape(parts.shape), group.alltoall(parts))

    ranks(size).values(work)


def test_some_to_others(ranks):
    """Two sources, four destinations, two units of each: dealt out in turn, in the lists' order."""

    def work(group: Group) -> Any:
        x = np.array([10 * group.rank, 10 * group.rank + 1])
        got = group.scatter_gather(x, sources=[4, 0], destinations=[1, 2, 3, 0], unit=1)
        return None if got is None else got.tolist()

    assert ranks(6).values(work) == [[41, 1], [40, 0], [41, 1], [40, 0], None, None]


def test_more_units_than_destinations(ranks):
    """Six units of two rows to three ranks: units 0 and 3, 1 and 4, 2 and 5."""

    def work(group: Group) -> Any:
        x = np.arange(12.0)
        return group.scatter_gather(x, [0], [0, 1, 2], unit=2).tolist()

    assert ranks(3).values(work) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_without_an_array_of_ones_own(ranks):
    """A destination passes out=, and whoever is neither needs nothing."""

    def work(group: Group) -> Any:
        x = np.arange(4.0) + 1 if group.rank == 0 else None
        out = np.zeros(2) if group.rank in (1, 2) else None
        got = group.scatter_gather(x, [0], [1, 2], unit=2, out=out)
        assert got is out
        return got is not None and got.tolist()

    assert ranks(4).values(work) == [False, [1, 2], [3, 4], False]


def test_asynchronously_and_with_tensors(ranks):
    torch = pytest.importorskip("torch")

    def work(group: Group) -> None:
        x = torch.full((2, 3), group.rank)
        handles = [group.scatter_gather_async(x, [k % 2, 2], range(3), unit=2) for k in range(10)]
        for k, handle in reversed(list(enumerate(handles))):
            got = handle.wait(timeout=10)
            assert got[:, 0].tolist() == [k % 2, k % 2, 2, 2]

    ranks(3).values(work)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no unit": ({"unit": 0}, "unit= a whole number from 1 up, got 0"),
    "half a unit": ({"unit": 4}, r"whole units of 4, got shape \(6,\)"),
    "uneven": ({"unit": 1, "destinations": [0, 1, 2, 3]}, "cannot deal 6 units evenly to 4 dest"),
    "twice": ({"sources": [0, 0]}, r"sources= different ranks in a list, got \[0, 0\]"),
    "nobody": ({"destinations": []}, r"destinations= different ranks in a list, got \[\]"),
    "a number": ({"sources": 3}, "sources= different ranks in a list, got 3"),
    "a stranger": ({"sources": [4]}, "sources= from 0 to 3, got 4"),
    "no axis": ({"x": np.array(1.0)}, r"whole units of 2, got shape \(\)"),
    "nothing": ({"x": None}, "got no x; a source has one, and a destination passes one like it"),
    "an out of another shape": ({"out": np.ones(3)}, r"out= of shape \(8,\) .* got shape \(3,\)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(ranks, what):
    """Found before anything is sent; the group goes on."""
    options, words = WRONG[what]
    given = {"x": np.ones(6), "sources": range(4), "destinations": [0, 1, 2], "unit": 2, **options}

    def work(group: Group) -> None:
        if group.rank in (0, 1):
            with pytest.raises(ValueError, match=words):
                group.scatter_gather(**given)
        group.barrier()

    ranks(4).values(work)


def test_an_out_that_overlaps(ranks):
    def work(group: Group) -> None:
        x = np.ones(4)
        with pytest.raises(ValueError, match="overlaps x; pass separate memory"):
            group.scatter_gather(x, [0], [0, 1], unit=4, out=x)
        group.barrier()

    ranks(2).values(work)


def test_a_closed_group_says_so():
    with init() as world:
        assert world.scatter_gather(np.ones(2), [0], [0], unit=2).tolist() == [1.0, 1.0]
    with pytest.raises(ClosedError, match="the group is closed"):
        world.scatter_gather(np.ones(2), [0], [0], unit=2)


def test_sources_of_different_lengths_are_a_mismatch(ranks):
    ended = ranks(2)(
        lambda group: group.scatter_gather(np.ones(2 + 2 * group.rank), [0, 1], [0, 1], unit=1)
    )

    assert all(isinstance(error, MismatchError) for error in ended)
