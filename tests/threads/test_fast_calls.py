# SPDX-License-Identifier: Apache-2.0
"""The compiled call path in front of allreduce does what the method does, and nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from commute import ClosedError, Group, MismatchError
from commute.testing import memory_groups, run_threads


def is_fast(world: Group) -> bool:
    return type(world.allreduce).__name__ == "FastCall"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 7, 1000, 300_000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint64", "float16"])
def test_same_answers(ranks: int, length: int, dtype: str) -> None:
    """It gives NumPy's sum in place and returns the array itself, call after call."""

    def work(world: Group) -> None:
        assert is_fast(world)
        for number in range(4):
            x = np.full(length, world.rank + number, dtype=dtype)
            assert world.allreduce(x) is x
            wanted = sum(rank + number for rank in range(ranks))
            np.testing.assert_array_equal(x, np.full(length, wanted, dtype=dtype))

    run_threads(ranks, work)


def test_the_method_has_the_rest() -> None:
    """Keywords, other arrays and wrong ones go to the method, with its results and errors."""

    def work(world: Group) -> None:
        world.allreduce(np.ones(3, np.float32))
        assert world.allreduce(np.ones(2), "max")[0] == 1.0
        assert world.allreduce(np.ones(2), op="mean")[0] == 1.0
        assert world.allreduce(bytearray(b"\1"))[0] == world.size
        frozen = np.ones(2, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            world.allreduce(frozen)
        with pytest.raises(ValueError, match="not contiguous"):
            world.allreduce(np.ones((4, 4), np.float32)[:, 1])
        with pytest.raises(TypeError, match="expected an array"):
            world.allreduce([1.0])
        assert "Combine x over all ranks" in world.allreduce.__doc__

    run_threads(2, work)


def test_a_slow_peer_is_waited_for() -> None:
    """A call that takes longer than the GIL is held goes on asleep."""
    late = threading.Event()

    def work(world: Group) -> float:
        x = np.ones(5, np.float32)
        world.allreduce(x)
        if world.rank == 1:
            late.wait(0.2)
        return float(world.allreduce(x)[0])

    assert run_threads(2, work) == [4.0, 4.0]


def test_mismatch_and_close() -> None:
    """Its failures are those of the method; a closed group has only the method."""

    def work(world: Group) -> str:
        world.allreduce(np.ones(5, np.float32))
        with pytest.raises(MismatchError) as caught:
            world.allreduce(np.ones(5 + world.rank, np.float32))
        with pytest.raises(MismatchError):
            world.allreduce(np.ones(5, np.float32))
        return str(caught.value)

    texts = run_threads(2, work)
    assert all("allreduce of 5 float32" in text and "of 6 float32" in text for text in texts)
    (group,) = memory_groups(1)
    group.close()
    assert not is_fast(group)
    with pytest.raises(ClosedError):
        group.allreduce(np.ones(1))
