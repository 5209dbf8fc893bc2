# SPDX-License-Identifier: Apache-2.0
"""gather, scatter and alltoall: arrays in and out; test_cells.py compares them with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from commute import Group, MismatchError


def test_out_of_the_exchanging_calls(ranks):
    """They make a new array, or fill out=; gather gives None off the root."""

    def work(group: Group) -> None:
        x = np.arange(6.0).reshape(2, 3) + 10 * group.rank
        root = group.rank == 1
        gathered = group.gather(x, root=1)
        assert (gathered is None) != root
        out = np.zeros((2, 2, 3)) if root else None
        assert group.gather(x, root=1, out=out) is out
        if root:
            np.testing.assert_array_equal(gathered, [x - 10, x])
            np.testing.assert_array_equal(out, gathered)
        part = group.scatter(gathered, root=1)  # of the others' x nothing is used
        np.testing.assert_array_equal(part, x)
        into = np.zeros((2, 3))
        assert group.scatter(gathered, root=1, out=into) is into
        np.testing.assert_array_equal(into, x)
        turned = group.alltoall(x)
        wanted = [np.arange(3.0) + 3 * group.rank + 10 * rank for rank in range(2)]
        np.testing.assert_array_equal(turned, wanted)
        into = np.zeros((2, 3))
        assert group.alltoall(x, out=into) is into
        np.testing.assert_array_equal(into, turned)

    ranks(2).values(work)


def test_scatter_tells_shape_and_dtype(ranks):
    """A rank that passes None gets what the root gives: any shape and dtype, tensor for tensor."""
    values = [
        np.arange(24, dtype="int16").reshape(3, 2, 4),
        np.arange(3.0),  # a part is a number
        np.zeros((3, 0, 5), "float16"),
        np.arange(9).astype(ml_dtypes.bfloat16).reshape(3, 3),
        torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    ]

    def work(group: Group) -> None:
        for root, x in enumerate(values):
            root %= 3
            part = group.scatter(x if group.rank == root else None, root=root)
            assert type(part) is type(x)
            assert (part.dtype, part.shape) == (x.dtype, x.shape[1:])
            assert bool((part == x[group.rank]).all())

    ranks(3).values(work)


def test_exchanges_in_flight_together(ranks):
    """The asynchronous twins keep program order, also beside blocking calls."""

    def work(group: Group) -> None:
        x = np.arange(12.0).reshape(3, 4) + 100 * group.rank
        out = np.empty(4)
        gather = group.gather_async(x, root=2)
        scatter = group.scatter_async(x, root=1, out=None if group.rank == 0 else out)
        alltoall = group.alltoall_async(x, algorithm="bruck")
        barrier = group.barrier_async(algorithm="token-ring")
        total = group.allreduce(np.ones(3))[0]
        everyone = np.stack([np.arange(12.0).reshape(3, 4) + 100 * rank for rank in range(3)])

        assert total == 3
        assert gather.wait() is None or (gather.wait() == everyone).all()
        np.testing.assert_array_equal(scatter.wait(), everyone[1][group.rank])
        np.testing.assert_array_equal(alltoall.wait(), everyone[:, group.rank])
        assert barrier.wait() is None

    ranks(3).values(work)


def test_mistakes_in_exchanging_calls_are_this_ranks_alone(ranks):
    """Arguments are checked before anything is sent, so the group goes on."""

    def work(group: Group) -> float:
        x = np.ones((2, 4))
        with pytest.raises(ValueError, match=r"alltoall expected a leading axis of length 2"):
            group.alltoall(np.ones(3))
        with pytest.raises(ValueError, match=r"out= of shape \(2, 4\)"):
            group.alltoall(x, out=np.ones(8))
        with pytest.raises(ValueError, match="overlaps x"):
            group.alltoall(x, out=x)
        with pytest.raises(ValueError, match="root= from 0 to 1, got 2"):
            group.gather(x, root=2)
        with pytest.raises(ValueError, match="gather by 'ring' is not known; choose from linear"):
            group.gather(x, algorithm="ring")
        with pytest.raises(ValueError, match="scatter by 'ring' is not known; choose from linear"):
            group.scatter(x if group.rank == 0 else None, algorithm="ring")
        if group.rank == 0:
            with pytest.raises(ValueError, match=r"scatter expected a leading axis of length 2"):
                group.scatter(np.ones((3, 2)))
            with pytest.raises(ValueError, match=r"scatter expected an array .* got NoneType"):
                group.scatter(None)
        return float(group.allreduce(np.ones(1))[0])

    assert ranks(2).values(work) == [2.0, 2.0]


def test_ranks_that_disagree_about_a_scatter(ranks):
    """Room for another number of elements than the root gives is an error on all ranks."""

    def work(group: Group) -> None:
        out = np.empty(5) if group.rank == 1 else None
        group.scatter(np.ones((3, 4)) if group.rank == 0 else None, out=out)
        group.barrier()

    ended = ranks(3)(work)

    assert [type(error) for error in ended] == [MismatchError] * 3
    assert "scatter of 5 float64 with root 0" in str(ended[1])
