# SPDX-License-Identifier: Apache-2.0
"""Persistent operations: bound once, started again and again, and what is refused."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest

import commute
from commute import (
    AbandonedError,
    ArrayError,
    ClosedError,
    CommuteError,
    ForkedError,
    Group,
    MismatchError,
    OperationTimeoutError,
)

LENGTHS = [0, 1, 500, 3000, 200_000]  # kernels up to 16 KB, plans beyond


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_allreduce_again_and_again(ranks, length, algorithm):
    """The array is the caller's between wait and start; the result is the array."""

    def work(group: Group) -> None:
        x = np.empty(length, dtype=np.float32)
        total = group.allreduce_init(x, algorithm=algorithm)
        for step in range(20):
            x[:] = step + group.rank
            total.start()
            assert total.wait() is x
            np.testing.assert_array_equal(x, 3 * step + 3)
            assert total.done() and total.wait() is x  # again, without a start

    ranks(3).values(work)


def test_every_collective_has_one(ranks):
    """Each gives what the plain call gives, every time; without out the result is made once."""

    def work(group: Group) -> None:
        x, shared, rooted = np.empty((3, 4)), np.empty(4), np.empty(4)
        mean = np.empty((3, 4))
        made = [
            group.allreduce_init(x, "mean", out=mean, deterministic=True),
            group.broadcast_init(shared, root=1),
            group.reduce_init(rooted, root=2, op="max"),
            group.allgather_init(shared),
            group.reduce_scatter_init(x, "prod"),
            group.barrier_init(),
        ]
        first: list[Any] = []
        for step in range(5):
            x[:], shared[:], rooted[:] = step + group.rank, 10 * step + group.rank, group.rank
            results = []
            for operation in made:
                operation.start()
                results.append(operation.wait(timeout=20))
            np.testing.assert_array_equal(results[0], step + 1.0)
            np.testing.assert_array_equal(results[1], 10 * step + 1)
            np.testing.assert_array_equal(results[2], 2 if group.rank == 2 else group.rank)
            np.testing.assert_array_equal(results[3], np.full((3, 4), 10 * step + 1))
            np.testing.assert_array_equal(results[4], step * (step + 1) * (step + 2))
            assert results[5] is None
            first = first or results
            assert all(one is other for one, other in zip(first, results, strict=True))
        assert results[0] is mean and (x == step + group.rank).all()

    ranks(3).values(work)


@pytest.mark.parametrize("length", [0, 1, 500, 20_000])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchanges_again_and_again(ranks, size, length):
    """gather, scatter and alltoall, by every algorithm, each time with what is in the array."""
    root = size - 1

    def values(step: int, rank: int) -> Any:
        return np.arange(size * length).reshape(size, length) + 1000 * rank + step

    def work(group: Group) -> None:
        me = group.rank
        x, part = np.empty((size, length), np.int64), np.empty(length, np.int64)
        given, room = (x, None) if me == root else (None, part)
        for gather, alltoall in [(None, None), ("linear", "pairwise"), ("binomial", "bruck")]:
            gathered = group.gather_init(x, root, algorithm=gather)
            scattered = group.scatter_init(given, root, out=room, algorithm=gather)
            turned = group.alltoall_init(x, algorithm=alltoall)
            for step in range(4):
                x[:] = values(step, me)
                for operation in (gathered, scattered, turned):
                    operation.start()
                everyone = np.stack([values(step, rank) for rank in range(size)])
                np.testing.assert_array_equal(turned.wait(timeout=10), everyone[:, me])
                np.testing.assert_array_equal(scattered.wait(timeout=10), everyone[root, me])
                whole = gathered.wait(timeout=10)
                assert (whole is None) == (me != root)
                if me == root:
                    np.testing.assert_array_equal(whole, everyone)
            assert scattered.wait() is part or me == root
            assert gathered.wait() is whole  # made once

    ranks(size).values(work)


def test_exchanges_into_out(ranks):
    """out= is bound too; what is in it before does not matter."""

    def work(group: Group) -> None:
        x, whole, turned, part = (np.empty(shape) for shape in ((2, 3), (2, 2, 3), (2, 3), 3))
        made = [
            group.gather_init(x, out=whole),
            group.alltoall_init(x, out=turned),
            group.scatter_init(x, root=1, out=part),
        ]
        for step in range(3):
            x[:] = 10 * step + group.rank
            for operation in made:
                operation.start()
            assert made[0].wait() is (whole if group.rank == 0 else None)
            assert made[1].wait() is turned and made[2].wait() is part
            assert turned[:, 0].tolist() == [10 * step, 10 * step + 1]
            assert part.tolist() == [10 * step + 1] * 3
            assert group.rank or whole[:, 1, 2].tolist() == [10 * step, 10 * step + 1]

    ranks(2).values(work)


def test_a_scatter_of_another_length_than_the_roots(ranks):
    """Shapes are not told beforehand, but compared when it runs."""

    def work(group: Group) -> None:
        x = np.ones((2, 4)) if group.rank == 0 else None
        part = group.scatter_init(x, out=np.empty(4 + group.rank))
        part.start()
        with pytest.raises(MismatchError, match="scatter of 5 float64 with root 0"):
            part.wait()  # the root may have sent all before it hears of it
            group.barrier()

    ranks(2).values(work)


def test_an_array_that_would_be_copied_is_refused(ranks):
    """A copy of a strided array, made once, would be sent again and again."""
    torch = pytest.importorskip("torch")
    group = ranks(2).groups[0]
    strided = np.ones((3, 2)).T

    for make in (group.gather_init, group.alltoall_init, group.allgather_init, group.scatter_init):
        with pytest.raises(ArrayError, match=r"_init keeps its array, got .* \(2, 3\) that is not"):
            make(strided)
        with pytest.raises(ArrayError, match="alltoall_init keeps its array"):
            group.alltoall_init(torch.ones((3, 2)).T)
    with pytest.raises(ArrayError, match="allreduce_init keeps its array"):
        group.allreduce_init(strided, out=np.ones((2, 3)))


def test_started_together_and_mixed_with_other_calls(ranks, seed):
    """Program order holds among persistent, asynchronous and blocking calls; waits in any order."""

    def work(group: Group) -> None:
        arrays = [np.empty(length) for length in LENGTHS]
        made = [group.allreduce_init(x) for x in arrays]
        order = np.random.default_rng([seed, group.rank])
        for step in range(30):
            for x in arrays:
                x[:] = step
            handles = []
            for number, operation in enumerate(made):
                operation.start()
                if number % 2:
                    handles.append(group.allreduce_async(np.full(300, float(number))))
                if number == 3:
                    np.testing.assert_array_equal(group.allreduce(np.ones(2)), 2.0)
            for number in order.permutation(len(made)):
                np.testing.assert_array_equal(made[number].wait(), 2 * step)
            for handle, number in zip(handles, (1, 3), strict=True):
                np.testing.assert_array_equal(handle.wait(), 2.0 * number)

    ranks(2).values(work)


def test_it_moves_while_nobody_waits(ranks):
    """A plan is driven in the background, a kernel by asking whether it is done."""

    def work(group: Group) -> None:
        for length in (4, 200_000):
            x = np.full(length, 1.0)
            total = group.allreduce_init(x)
            total.start()
            while not total.done():
                pass
            np.testing.assert_array_equal(x, 2.0)
            assert total.wait() is x

    ranks(2).values(work)


def test_starting_twice_is_refused(ranks):
    """Also when it has finished, but nobody has waited; the one under way is not harmed."""

    def work(group: Group) -> None:
        x = np.ones(3)
        total = group.allreduce_init(x)
        total.start()
        with pytest.raises(CommuteError, match="this allreduce is under way already; wait for it"):
            total.start()
        while not total.done():
            pass
        with pytest.raises(CommuteError, match="under way already"):
            total.start()
        assert "under way>" in repr(total) and "not under way" not in repr(total)
        np.testing.assert_array_equal(total.wait(), 2.0)
        assert repr(total) == "<Persistent allreduce of 3 float64 by sum, not under way>"
        total.start()
        np.testing.assert_array_equal(total.wait(), 4.0)

    ranks(2).values(work)


def test_waiting_for_what_was_never_started(ranks):
    with pytest.raises(CommuteError, match="this barrier was never started; call start"):
        ranks(2).groups[0].barrier_init().wait()


def test_arguments_are_checked_when_it_is_made(ranks):
    group = ranks(2).groups[0]

    with pytest.raises(ValueError, match="expected op= one of"):
        group.allreduce_init(np.ones(2), "median")
    with pytest.raises(ValueError, match="leading axis of length 2"):
        group.reduce_scatter_init(np.ones(3))
    with pytest.raises(ValueError, match="expected root= from 0 to 1"):
        group.broadcast_init(np.ones(3), root=2)
    with pytest.raises(ValueError, match="expected root= from 0 to 1"):
        group.gather_init(np.ones(3), root=2)
    with pytest.raises(ValueError, match="scatter_init expected root= from 0 to 1, got -1"):
        group.scatter_init(np.ones((2, 3)), root=-1)
    with pytest.raises(ValueError, match="scatter_init on rank 0 expected out= like its part of"):
        group.scatter_init(None, root=1)
    with pytest.raises(ValueError, match="scatter expected a leading axis of length 2"):
        group.scatter_init(np.ones(3))
    with pytest.raises(ValueError, match="alltoall by 'ring' is not known"):
        group.alltoall_init(np.ones((2, 3)), algorithm="ring")
    with pytest.raises(CommuteError, match="rank 0 is not in the group of ranks 1,"):
        group.group([1]).allreduce_init(np.ones(3))


def test_a_wait_may_time_out_and_be_repeated(ranks):
    """The operation goes on; only the timeout of the call itself gives it up."""

    def work(group: Group) -> None:
        total = group.allreduce_init(np.ones(3))
        if group.rank == 0:
            total.start()
            with pytest.raises(OperationTimeoutError, match=r"has not finished after 0\.05 s"):
                total.wait(timeout=0.05)
            with pytest.raises(CommuteError, match="under way already"):
                total.start()
            group.send(np.ones(1), to=1)
        else:
            group.recv(np.ones(1), source=0)
            total.start()
        np.testing.assert_array_equal(total.wait(), 2.0)

    ranks(2).values(work)


def test_a_broken_group_is_named(ranks):
    """Mismatched starts, and a timeout of the call: wait raises, and so does the next start."""

    def mismatched(group: Group) -> None:
        total = group.allreduce_init(np.ones(3 + group.rank))
        total.start()
        with pytest.raises(MismatchError, match="allreduce of 3 float64"):
            total.wait()
        with pytest.raises(MismatchError):
            total.start()
        with pytest.raises(MismatchError):
            total.wait()

    def late(group: Group) -> type:
        barrier = group.barrier_init(timeout=0.2)
        if group.rank == 0:
            barrier.start()
            with pytest.raises(OperationTimeoutError) as caught:
                barrier.wait()
            return type(caught.value)
        with pytest.raises(AbandonedError) as told:
            group.recv(np.ones(1), source=0)
        with pytest.raises(AbandonedError):
            barrier.start()
        return type(told.value)

    ranks(2).values(mismatched)
    assert ranks(2).values(late) == [OperationTimeoutError, AbandonedError]


def test_closing_ends_it(ranks):
    def work(group: Group) -> None:
        total = group.allreduce_init(np.ones(3))
        total.start()
        total.wait()
        group.barrier()
        group.close()
        with pytest.raises(ClosedError, match="the group is closed"):
            total.start()

    ranks(2).values(work)


def test_what_is_let_go_under_way_is_finished(ranks):
    """The array lives until the operation is done, and no longer than the group needs it."""

    def work(group: Group) -> float:
        x = np.ones(300_000)
        total = group.allreduce_init(x)
        total.start()
        gone = weakref.ref(x)
        del total, x
        gc.collect()
        group.barrier()  # program order: the allreduce is done by then
        group.barrier()  # whoever starts an operation lets go of what has finished
        group.barrier_async().wait()
        gc.collect()
        return float(gone() is None)

    assert ranks(2).values(work) == [1.0, 1.0]


def test_a_forked_child_may_not_start_it():
    with commute.init() as world:
        total = world.allreduce_init(np.ones(2))
        total.start()
        total.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                total.start()
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        total.start()
        np.testing.assert_array_equal(total.wait(), 1.0)


def test_torch_tensors_and_groups(ranks):
    torch = pytest.importorskip("torch")

    def work(world: Group) -> list[float]:
        team = world.group([2, 0])
        if world.rank not in team:
            return []
        x = torch.full((5,), float(world.rank))
        total = team.allreduce_init(x)
        for _ in range(3):
            total.start()
            assert total.wait() is x
        return x.tolist()

    assert ranks(3).values(work) == [[8.0] * 5, [], [8.0] * 5]
