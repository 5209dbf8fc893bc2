# SPDX-License-Identifier: Apache-2.0
"""sendrecv: both messages at once, in rings and lines, to others and to oneself."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from commute import Group, MismatchError, OperationTimeoutError, init

LONG = 100_003  # far more than the in-memory link holds


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, LONG])
def test_a_ring_does_not_wait_for_itself(ranks, size, length):
    """Everyone sends to the right and receives from the left, in one call each."""

    def work(group: Group) -> np.ndarray:
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        x = np.full(length, group.rank, "float32")
        got = group.sendrecv(x, to=right, source=left)
        assert got is not x and (x == group.rank).all()
        return got

    for rank, got in enumerate(ranks(size).values(work)):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, np.full(length, (rank - 1) % size))


def test_two_ranks_swap_arrays_of_any_kind(ranks):
    """To and from the same rank; what arrives may have another length and dtype than what goes."""

    def work(group: Group) -> Any:
        mine, theirs = (np.arange(9.0), np.empty((2, 2), "int8"))
        if group.rank == 1:
            mine, theirs = np.ones((2, 2), "int8"), np.empty(9)
        out = group.sendrecv(mine, to=1 - group.rank, source=1 - group.rank, out=theirs)
        assert out is theirs
        return out.tolist()

    assert ranks(2).values(work) == [[[1, 1], [1, 1]], list(range(9))]


def test_a_line_has_two_ends(ranks):
    """None is nobody: the first rank receives nothing, the last one sends nothing."""

    def work(group: Group) -> Any:
        to = group.rank + 1 if group.rank < 3 else None
        source = group.rank - 1 if group.rank else None
        got = group.sendrecv(np.array([group.rank]), to=to, source=source)
        kept = np.array([7])
        assert group.sendrecv(np.array([group.rank]), to, source, out=kept) is kept
        assert group.sendrecv(np.zeros(1), None, None) is None
        return (got is not None and got.tolist()), kept.tolist()

    assert ranks(4).values(work) == [(False, [7]), ([0], [0]), ([1], [1]), ([2], [2])]


def test_many_at_once_keep_their_order(ranks):
    """Handles in flight in both directions round a ring, among collectives and plain messages."""

    def work(group: Group) -> None:
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        handles = []
        for number in range(30):
            x = np.full(1000 * (number % 4), 100.0 * group.rank + number)
            way = (right, left) if number % 2 else (left, right)
            handles.append((number, way, group.sendrecv_async(x, *way)))
        assert group.allreduce(np.ones(1))[0] == 3.0
        for number, (_, source), handle in reversed(handles):
            np.testing.assert_array_equal(
                handle.wait(timeout=10), np.full(1000 * (number % 4), 100.0 * source + number)
            )
            assert handle.done() and "done" in repr(handle)

    ranks(3).values(work)


def test_strided_input_and_tensors(ranks):
    """What is read may be strided; torch in, torch out."""
    torch = pytest.importorskip("torch")

    def work(group: Group) -> None:
        other = 1 - group.rank
        columns = np.arange(12.0).reshape(3, 4)[:, 1] + group.rank
        np.testing.assert_array_equal(
            group.sendrecv(columns, to=other, source=other), np.array([1.0, 5.0, 9.0]) + other
        )
        got = group.sendrecv(torch.full((2, 3), group.rank), to=other, source=other)
        assert isinstance(got, torch.Tensor) and got.eq(other).all() and got.shape == (2, 3)

    ranks(2).values(work)


def test_to_oneself():
    """A ring of one is a copy; asynchronously too."""
    with init() as world:
        x = np.arange(5)
        got = world.sendrecv(x, to=0, source=0)
        later = world.sendrecv_async(x, to=0, source=0)

        assert got is not x and got.tolist() == x.tolist()
        assert later.done() and later.wait().tolist() == x.tolist()
        with pytest.raises(ValueError, match=r"expected out= of 5 elements .* got 4"):
            world.sendrecv(x, to=0, source=0, out=np.empty(4, x.dtype))


def test_mistakes_are_found_before_anything_is_sent(ranks):
    """A wrong argument is this rank's alone: the group goes on."""

    def work(group: Group) -> float:
        x, other = np.ones(4), 1 - group.rank
        with pytest.raises(ValueError, match="sendrecv expected to= from 0 to 1, got 2"):
            group.sendrecv(x, to=2, source=other)
        with pytest.raises(ValueError, match="sendrecv expected source= from 0 to 1, got -1"):
            group.sendrecv(x, to=other, source=-1)
        with pytest.raises(ValueError, match="overlaps x; pass separate memory"):
            group.sendrecv(x, to=other, source=other, out=x)
        with pytest.raises(ValueError, match="must receive from itself"):
            group.sendrecv(x, to=group.rank, source=other)
        with pytest.raises(ValueError, match="must receive from itself"):
            group.sendrecv(x, to=None, source=group.rank)
        return float(group.sendrecv(x * group.rank, to=other, source=other)[0])

    assert ranks(2).values(work) == [1.0, 0.0]


def test_lengths_that_differ_are_a_mismatch(ranks):
    """The receiver says what it expected and what came."""

    def work(group: Group) -> None:
        other = 1 - group.rank
        group.sendrecv(np.ones(4 + group.rank), to=other, source=other)

    ended = ranks(2)(work)

    assert all(isinstance(error, MismatchError) for error in ended)
    said = re.compile(r"has (5|4) float64, the receiver expected (4|5) float64; pass arrays of")
    assert all(said.search(str(error)) for error in ended)


def test_a_timeout_gives_it_up(ranks):
    """Nobody answers: the caller is told whom it waited for, and the group is broken."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.sendrecv(np.ones(4), to=1, source=1, timeout=0.05)
        else:
            group.recv(np.empty(4), source=0)
            group.barrier()

    ended = ranks(2)(work)

    assert isinstance(ended[0], OperationTimeoutError)
    assert "recv of 4 float64 timed out after 0.05 s on rank 0, waiting for rank 1" in str(ended[0])
    assert ended[1] is not None
