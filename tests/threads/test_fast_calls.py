# SPDX-License-Identifier: Apache-2.0
"""The compiled call paths do what the methods do, and nothing else."""

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
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int16", "uint64", "float16", "bool", "complex128"]
)
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


def test_broadcast_and_barrier() -> None:
    """Any root, named or not; a wrong one is the method's to explain."""

    def work(world: Group) -> None:
        for number in range(30):
            root = number % world.size
            x = np.full(5, world.rank, np.float32)
            calls = [
                lambda x, root=root: world.broadcast(x, root),
                lambda x, root=root: world.broadcast(x, root=root),
            ]
            assert calls[number % 2](x) is x
            np.testing.assert_array_equal(x, root)
            assert world.barrier() is None
        np.testing.assert_array_equal(world.broadcast(np.full(3, world.rank)), 0)
        with pytest.raises(ValueError, match="root= from 0 to 2, got 3"):
            world.broadcast(np.ones(2), 3)
        with pytest.raises(ValueError, match="root= from 0 to 2, got -1"):
            world.broadcast(np.ones(2), root=-1)
        with pytest.raises(TypeError):
            world.barrier(1)
        world.barrier(timeout=5.0)

    run_threads(3, work)


def test_tensors() -> None:
    """Plain CPU tensors of every dtype; whatever is special about one goes to the method."""
    torch = pytest.importorskip("torch")

    def work(world: Group) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8):
            for _ in range(3):
                x = torch.full((3, 2), world.rank + 1).to(dtype)
                assert world.allreduce(x) is x
                assert x.tolist() == [[3, 3]] * 3
        with pytest.raises(ValueError, match="not contiguous"):
            world.allreduce(torch.ones(4, 4)[:, 1])
        with pytest.raises(TypeError, match="plain dense tensor"):
            world.allreduce(torch.eye(3).to_sparse())
        leaf = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="autograd still needs"):
            world.allreduce(leaf * 2)
        world.allreduce(leaf.detach())
        assert leaf.tolist() == [2, 2]

    run_threads(2, work)


def test_threads_of_one_rank_at_once() -> None:
    """Two threads of a rank call together; each gets its own result."""

    def work(world: Group) -> None:
        def call() -> None:
            for _ in range(200):
                x = np.full(64, world.rank + 1.0)
                world.allreduce(x)
                assert x[0] == x[-1] == 3.0

        helper = threading.Thread(target=call)
        helper.start()
        call()
        helper.join(60)
        assert not helper.is_alive()

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
