# SPDX-License-Identifier: Apache-2.0
"""The compiled call paths do what the methods do, and nothing else."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from commute import AbandonedError, ClosedError, Group, MismatchError
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


# ---- blocks ----

Call = Callable[[Group, np.ndarray, np.ndarray], Any]
# How each is called with a whole array and a part of it, and which of the two is the result.
BLOCK_CALLS: dict[str, tuple[Call, str]] = {
    "allgather": (lambda world, whole, part: world.allgather(part, out=whole), "whole"),
    "reduce_scatter": (lambda world, whole, part: world.reduce_scatter(whole, out=part), "part"),
    "gather": (lambda world, whole, part: world.gather(part, 1, out=whole), "whole"),
    "scatter": (lambda world, whole, part: world.scatter(whole, root=1, out=part), "part"),
}


def frames_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the Python functions that it entered beyond this file's."""
    entered: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            entered.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        return call(), entered
    finally:
        sys.setprofile(None)


def wanted_of(name: str, rank: int, ranks: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Of parts that are all rank + number, and wholes whose part r is 10 rank + r + number."""
    if name in ("allgather", "gather"):
        return np.stack([np.full(shape, peer + number) for peer in range(ranks)])
    if name == "scatter":
        return np.full(shape, 10 + rank + number)
    return np.full(shape, sum(10 * peer + rank + number for peer in range(ranks)))


@pytest.mark.parametrize("name", BLOCK_CALLS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3), (70_000,)])
def test_blocks_without_a_frame(name: str, shape: tuple[int, ...]) -> None:
    """Once a plan is bound, calls with out= enter no Python function, and give what NumPy does."""
    call, into = BLOCK_CALLS[name]

    def work(world: Group) -> None:
        for number in range(4):
            part = np.full(shape, world.rank + number, np.float32)
            whole = np.stack(
                [np.full_like(part, 10 * world.rank + rank + number) for rank in range(3)]
            )
            result, entered = frames_of(lambda p=part, w=whole: call(world, w, p))
            assert number < 2 or entered == []
            if name == "gather" and world.rank != 1:
                assert result is None
                continue
            assert result is (whole if into == "whole" else part)
            wanted = wanted_of(name, world.rank, 3, number, shape)
            np.testing.assert_array_equal(result, wanted)

    run_threads(3, work)


@pytest.mark.parametrize("length", [1, 7, 100_000])
def test_turned_blocks_and_sums_without_a_frame(length: int) -> None:
    """So do alltoall, a reduction at a root, and those that work in place but are given out=."""

    def work(world: Group) -> None:
        for number in range(4):
            x = np.stack([np.full(length, 10.0 * world.rank + r + number) for r in range(2)])
            out, total, sent = np.zeros_like(x), np.ones(length), np.zeros(length)
            calls = [
                lambda x=x, out=out: world.alltoall(x, out=out),
                lambda total=total: world.reduce(total, 1),
                lambda x=x, sent=sent: world.reduce(x[0], root=0, out=sent),
                lambda x=x, sent=sent: world.broadcast(x[1], root=1, out=sent),
                lambda x=x, sent=sent: world.allreduce(x[1], out=sent),
            ]
            results = []
            for call, given in zip(calls, (out, total, sent, sent, sent), strict=True):
                result, entered = frames_of(call)
                results.append(result.copy())
                assert result is given
                assert number < 2 or entered == []
            wanted = [np.full(length, 10.0 * r + world.rank + number) for r in range(2)]
            np.testing.assert_array_equal(results[0], wanted)
            assert set(results[1]) == {2.0 if world.rank == 1 else 1.0}
            assert set(results[2]) == {10.0 + 2 * number if world.rank == 0 else 0.0}
            assert set(results[3]) == {11.0 + number}
            assert set(results[4]) == {12.0 + 2 * number}

    run_threads(2, work)


def test_blocks_that_do_not_fit() -> None:
    """What is wrong with arrays of blocks is the method's to say; nothing is sent before."""

    def work(world: Group) -> None:
        x, part = np.ones((2, 3), np.float32), np.ones(3, np.float32)
        frozen = np.ones((2, 3), np.float32)
        frozen.flags.writeable = False
        for _ in range(2):
            world.alltoall(x, out=np.empty_like(x))
            world.allgather(part, out=np.empty_like(x))
            world.scatter(x, out=np.empty_like(part))
        refused: list[tuple[Callable[[], Any], str]] = [
            (lambda: world.alltoall(x, out=np.empty((2, 4), np.float32)), "shape"),
            (lambda: world.alltoall(x, out=np.empty((2, 3))), "another dtype"),
            (lambda: world.alltoall(x, out=x), "overlaps"),
            (lambda: world.alltoall(x, out=frozen), "read-only"),
            (lambda: world.alltoall(np.ones((3, 2)), out=np.empty((3, 2))), "leading axis"),
            (lambda: world.allgather(part, out=np.empty((3, 3), np.float32)), "shape"),
            (lambda: world.gather(part, 2, out=x), "root= from 0 to 1, got 2"),
            (lambda: world.gather(part, root=-1, out=x), "root= from 0 to 1, got -1"),
            (lambda: world.reduce_scatter(x, out=np.empty((1, 3), np.float32)), "shape"),
        ]
        if world.rank == 0:
            refused += [(lambda: world.scatter(x, out=np.empty(4, np.float32)), "shape")]
        for call, why in refused:
            with pytest.raises(ValueError, match=why):
                call()
        # Also taken: what is only read may be read-only, or in any order.
        np.testing.assert_array_equal(world.alltoall(frozen, out=np.empty_like(x)), 1)
        turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        got = world.alltoall(turned, out=np.empty((2, 3)))
        np.testing.assert_array_equal(got, [turned[world.rank]] * 2)
        np.testing.assert_array_equal(world.alltoall(x), 1)
        gathered = world.gather(part, out="not looked at" if world.rank else np.empty_like(x))
        assert (gathered is None) == (world.rank != 0)

    run_threads(2, work)


def test_heads_of_scatters() -> None:
    """A root that tells without a frame tells ranks without out= what they get, call after call."""
    torch = pytest.importorskip("torch")
    wholes: list[Any] = [
        np.arange(24, dtype="int16").reshape(3, 2, 4),
        np.arange(3.0),
        torch.arange(12.0).reshape(3, 4),
        np.arange(300_000, dtype="float32").reshape(3, -1),
    ]

    def work(world: Group) -> None:
        for number in range(24):  # each whole from each root twice: the second time without a frame
            whole, root = wholes[number % 4], number % 3
            told = number // 12 == 1 and world.rank != root
            out = None if told else (whole[0] + 0 if whole.ndim > 1 else np.zeros(()))
            x = whole if world.rank == root else None
            part = world.scatter(x, root, out=out)
            assert type(part) is type(whole) or whole.ndim == 1
            assert bool((part == whole[world.rank]).all())

    run_threads(3, work)


def test_more_axes_than_a_head_tells() -> None:
    """A tensor may have more than NumPy's 64; ranks without out= could not be told."""
    torch = pytest.importorskip("torch")

    def work(world: Group) -> None:
        for _ in range(2):
            world.scatter(torch.ones(1, 1), out=torch.ones(1))
        for axes in (64, 65, 80):
            whole = torch.ones([1] * (1 + axes))
            if axes <= 64:
                assert world.scatter(whole, out=torch.zeros([1] * axes)).sum() == 1
                continue
            with pytest.raises(ValueError, match=f"at most 64 axes, got {axes}"):
                world.scatter(whole, out=torch.zeros([1] * axes))

    run_threads(1, work)


def test_arrays_are_let_go_of() -> None:
    """What the method was given is not kept while compiled calls follow."""

    def work(world: Group) -> None:
        x = np.ones((2, 5), np.float32)
        seen = weakref.ref(x)
        world.alltoall(x, out=np.empty_like(x))
        del x
        assert seen() is None

    run_threads(2, work)


def test_a_reduction_in_an_array_that_all_reach() -> None:
    """A reduction at a root has no plan that works where the arrays are, but needs no frame."""

    def work(world: Group) -> None:
        x = world.empty(100_000)
        for number in range(4):
            x[:] = world.rank + number
            result, entered = frames_of(lambda: world.reduce(x, 1))
            assert result is x and (number < 2 or entered == [])
            assert x[7] == x[-1] == (1 + 2 * number if world.rank == 1 else number)

    run_threads(2, work)


def test_broken_around_a_scatter() -> None:
    """A scatter that waits when its group breaks raises what the method would; both its operations
    are over.
    """

    def work(world: Group) -> None:
        whole, part = np.ones((2, 50_000), np.float32), np.empty(50_000, np.float32)
        for _ in range(3):
            world.scatter(whole, out=part)
        if world.rank == 0:
            world._runner.give_up("the rest")
            return
        for _ in range(2):
            with pytest.raises(AbandonedError, match="rank 0 gave up the rest"):
                world.scatter(None, out=part)

    run_threads(2, work)


def test_tensors_of_blocks() -> None:
    """Tensors too, and a tensor into an array."""
    torch = pytest.importorskip("torch")

    def work(world: Group) -> None:
        for number in range(4):
            x = torch.arange(6.0).reshape(2, 3) + 10 * world.rank
            out = torch.zeros(2, 3)
            result, entered = frames_of(lambda x=x, out=out: world.alltoall(x, out=out))
            assert result is out and (number < 2 or entered == [])
            wanted = np.arange(3.0) + 3 * world.rank + 10 * np.arange(2)[:, None]
            np.testing.assert_array_equal(out.numpy(), wanted)
            into = np.zeros((2, 3), np.float32)
            np.testing.assert_array_equal(world.alltoall(x, out=into), wanted)

    run_threads(2, work)


def test_mismatched_blocks() -> None:
    """Lengths that differ between ranks are found as in the method, on all ranks."""

    def work(world: Group) -> str:
        x = np.ones((2, 4), np.float32)
        for _ in range(2):
            world.alltoall(x, out=np.empty_like(x))
        y = np.ones((2, 4 + world.rank), np.float32)
        with pytest.raises(MismatchError) as caught:
            world.alltoall(y, out=np.empty_like(y))
        return str(caught.value)

    assert all("alltoall of 4" in text and "of 5" in text for text in run_threads(2, work))
