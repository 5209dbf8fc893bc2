# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls, point to point messages, and how they mix with blocking ones."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import commute
from commute import Group, Handle, OperationTimeoutError
from commute.testing import run_threads


def test_every_call_has_an_async_twin(ranks):
    """Each returns a handle at once, and wait() gives what the blocking call returns."""

    def work(group: Group) -> None:
        mine = np.full((2, 3), group.rank + 1.0)
        reduced, given, rooted = mine.copy(), mine.copy(), mine.copy()
        handles = [
            group.allreduce_async(reduced),
            group.broadcast_async(given, root=1),
            group.reduce_async(rooted, root=0, op="max"),
            group.allgather_async(mine),
            group.reduce_scatter_async(mine, op="mean"),
            group.barrier_async(),
        ]
        assert all(isinstance(handle, Handle) for handle in handles)
        results = [handle.wait() for handle in handles]
        assert results[0] is reduced and results[1] is given and results[2] is rooted
        np.testing.assert_array_equal(reduced, 3.0)
        np.testing.assert_array_equal(given, 2.0)
        np.testing.assert_array_equal(rooted, 2.0)  # max; rank 1's own value is 2 anyway
        assert results[3].shape == (2, 2, 3)
        np.testing.assert_array_equal(results[4], np.full(3, 1.5))
        assert results[5] is None
        assert all(handle.done() for handle in handles)
        assert "done" in repr(handles[0])
        assert handles[0].wait() is reduced  # again

    ranks(2).values(work)


def test_many_in_flight_waited_for_in_any_order(ranks, seed):
    """Fifty at once, blocking ones in between, waited for in an order that differs by rank."""

    def work(group: Group) -> list[float]:
        handles = []
        for number in range(50):
            handles.append(group.allreduce_async(np.full(100 * number, float(number))))
            if number % 7 == 3:  # a blocking call waits for all before it: program order is kept
                group.barrier()
                assert all(handle.done() for handle in handles)
        order = np.random.default_rng([seed, group.rank]).permutation(50)
        for number in order:
            np.testing.assert_array_equal(handles[number].wait(), 3.0 * number)
        return [float(group.allreduce(np.ones(1))[0])]

    assert ranks(3).values(work) == [[3.0]] * 3


def test_async_progresses_while_nobody_waits(ranks):
    """The progress thread moves it: done() becomes true without a wait."""

    def work(group: Group) -> np.ndarray:
        x = np.ones(500_000)
        handle = group.allreduce_async(x)
        pause = threading.Event()
        for _ in range(2000):
            if handle.done():
                break
            pause.wait(0.005)
        assert handle.done()
        return x[-1]

    assert ranks(3).values(work) == [3.0] * 3


def test_arrays_of_async_calls_are_kept_alive(ranks):
    """The caller may drop its array: the operation holds it until it is done."""

    def work(group: Group) -> None:
        handles = [group.allreduce_async(np.full(30_000, float(i))) for i in range(20)]
        for number, handle in enumerate(handles):
            np.testing.assert_array_equal(handle.wait(), 2.0 * number)

    ranks(2).values(work)


def test_messages_arrive_in_the_order_they_were_sent(ranks):
    """Per pair, blocking and asynchronous sends mixed, of all sizes."""
    sizes = [1, 0, 100_000, 3, 70_000, 0, 17]

    def work(group: Group) -> list[float] | None:
        if group.rank == 0:
            for number, size in enumerate(sizes):
                x = np.full(size, float(number))
                if number % 2:
                    group.send_async(x, to=1)
                else:
                    group.send(x, to=1)
            group.barrier()
            return None
        got = [group.recv(np.empty(size), source=0) for size in sizes]
        group.barrier()
        for number, x in enumerate(got):
            np.testing.assert_array_equal(x, float(number))
        return None

    ranks(2).values(work)


def test_everyone_talks_to_everyone(ranks):
    """Receives posted before the sends, between all pairs at once, and a collective around them."""

    def work(group: Group) -> None:
        others = [rank for rank in range(group.size) if rank != group.rank]
        inbox = {rank: np.empty(5000) for rank in others}
        receives = [group.recv_async(inbox[rank], source=rank) for rank in others]
        first = group.allreduce_async(np.ones(3))
        sends = [
            group.send_async(np.full(5000, 10.0 * group.rank + rank), to=rank) for rank in others
        ]
        np.testing.assert_array_equal(group.allreduce(np.ones(3)), group.size)
        for handle in [*sends, *receives, first]:
            handle.wait()
        for rank in others:
            np.testing.assert_array_equal(inbox[rank], 10.0 * rank + group.rank)

    ranks(5).values(work)


def test_a_receive_posted_early_does_not_hold_up_collectives(ranks):
    """Nothing is sent until ten collectives later."""

    def work(group: Group) -> float:
        x = np.zeros(10)
        handle = group.recv_async(x, source=0) if group.rank == 1 else None
        for _ in range(10):
            group.allreduce(np.ones(2000))
            group.barrier()
        if handle is None:
            group.send(np.full(10, 5.0), to=1)
            return 5.0
        assert not handle.done() or x[0] == 5.0
        return float(handle.wait()[0])

    assert ranks(2).values(work) == [5.0, 5.0]


def test_recv_timeout_is_recoverable(ranks):
    """Nothing had arrived: the group is sound and the message goes to the next recv."""
    sent = threading.Event()

    def work(group: Group) -> Any:
        if group.rank == 0:
            sent.wait(20)
            group.send(np.full(4, 3.0), to=1)
            return group.allreduce(np.ones(1))[0]
        out = np.zeros(4)
        with pytest.raises(OperationTimeoutError, match=r"recv.*4 float64.*0\.05 s.*rank 1"):
            group.recv(out, source=0, timeout=0.05)
        assert not out.any()
        sent.set()
        np.testing.assert_array_equal(group.recv(np.zeros(4), source=0), 3.0)
        assert not out.any()
        return group.allreduce(np.ones(1))[0]

    assert ranks(2).values(work) == [2.0, 2.0]


def test_wait_timeout_is_recoverable(ranks):
    """handle.wait(timeout) gives up waiting, not the operation; it names who is missing."""
    gave_up = threading.Barrier(3)

    def work(group: Group) -> Any:
        if group.rank == 2:
            gave_up.wait(10)
            return group.allreduce(np.ones(9))[0]
        handle = group.allreduce_async(np.ones(9))
        with pytest.raises(TimeoutError, match="it goes on, wait for it again") as caught:
            handle.wait(timeout=0.3)
        assert isinstance(caught.value, commute.CommuteError)
        assert "allreduce #1 of 9 float64" in str(caught.value)
        assert not handle.done()
        assert "under way" in repr(handle)
        gave_up.wait(10)
        return handle.wait()[0]

    assert ranks(3).values(work) == [3.0] * 3


def test_two_worlds_in_one_process(ranks):
    """Two groups live side by side, used alternately, async calls of both in flight."""
    first, second = ranks(3), ranks(3)

    def work(group: Group) -> Any:
        other = second.groups[group.rank]
        handles = []
        for number in range(10):
            handles.append(group.allreduce_async(np.full(1000, float(number))))
            handles.append(other.allreduce_async(np.full(1000, float(-number))))
        values = [handle.wait()[0] for handle in handles]
        other.barrier()
        return values

    wanted = [3.0 * sign * number for number in range(10) for sign in (1, -1)]
    assert first.values(work) == [wanted] * 3


def test_several_threads_of_one_rank(ranks):
    """Blocking calls from two threads of a rank, one for messages and one for collectives."""

    def work(group: Group) -> None:
        peer = 1 - group.rank
        got = []

        def talk() -> None:
            for number in range(100):
                if group.rank == 0:
                    group.send(np.full(50, float(number)), to=peer)
                else:
                    got.append(group.recv(np.empty(50), source=peer)[0])

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        for _ in range(100):
            np.testing.assert_array_equal(group.allreduce(np.ones(300)), 2.0)
        thread.join(20)
        assert not thread.is_alive()
        assert group.rank == 0 or got == list(range(100))

    ranks(2).values(work)


def test_run_threads_raises_the_first_failure():
    """commute.testing: results in rank order, or the exception of the lowest rank."""
    assert run_threads(3, lambda group: group.rank * 10) == [0, 10, 20]

    def work(group: Group) -> None:
        group.barrier()
        if group.rank > 0:
            raise RuntimeError(f"rank {group.rank}")

    with pytest.raises(RuntimeError, match="rank 1"):
        run_threads(3, work)


def test_alone():
    """A world of one needs nobody: every call works, messages have no one to go to."""
    with commute.init() as world:
        x = np.arange(4.0)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert world.allreduce(x) is x
        np.testing.assert_array_equal(world.allgather(x), x[None])
        np.testing.assert_array_equal(world.reduce_scatter(x[None]), x)
        world.broadcast(x)
        world.reduce(x, op="mean")
        world.barrier()
        assert world.allreduce_async(x).wait() is x
        with pytest.raises(ValueError, match=r"to= from 0 to 0|which is this one"):
            world.send(x, to=0)
        np.testing.assert_array_equal(x, np.arange(4.0))
