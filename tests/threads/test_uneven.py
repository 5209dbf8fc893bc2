# SPDX-License-Identifier: Apache-2.0
"""alltoall_v against NumPy, with counts given, told, and given by some; and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import commute
from commute import (
    AbandonedError,
    ClosedError,
    Group,
    MismatchError,
    OperationTimeoutError,
)

DTYPES = [
    *(np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *(np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32"), np.dtype("float64")),
    *(np.dtype("bool"), np.dtype("complex64"), np.dtype("complex128")),
]
LONG = 30_001  # rows; far more than the in-memory link holds


class Case:
    """Who sends how many rows to whom, and the rows themselves."""

    def __init__(self, rng: np.random.Generator, size: int, dtype: Any, rows_max: int) -> None:
        self.size = size
        self.counts = rng.integers(0, rows_max, (size, size), endpoint=True)  # [source, to]
        self.counts[rng.random((size, size)) < 0.3] = 0
        columns: tuple[int, ...] = ((), (1,), (3,), (2, 2))[rng.integers(4)]
        self.arrays = [
            rng.integers(0, 100, (rows, *columns)).astype(dtype) for rows in self.counts.sum(axis=1)
        ]

    def wanted(self, rank: int) -> Any:
        """What NumPy says that a rank gets."""
        ends = self.counts.cumsum(axis=1)
        begins = ends - self.counts
        return np.concatenate(
            [
                self.arrays[source][begins[source, rank] : ends[source, rank]]
                for source in range(self.size)
            ]
        )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_against_numpy(ranks, seed, size):
    """Every dtype, rows of several shapes, counts from 0 up; some ranks are told, some know."""
    rng = np.random.default_rng([seed, size])
    cases = [Case(rng, size, dtype, 20) for dtype in DTYPES] + [Case(rng, size, "int8", LONG)]
    knows = rng.random((len(cases), size)) < 0.5

    def work(group: Group) -> None:
        me = group.rank
        for number, case in enumerate(cases):
            given = case.counts[:, me].tolist() if knows[number, me] else None
            x = case.arrays[me]
            before = x.copy()
            got = group.alltoall_v(x, case.counts[me], given)
            assert got.dtype == x.dtype and got is not x
            np.testing.assert_array_equal(got, case.wanted(me))
            np.testing.assert_array_equal(x, before)

    ranks(size).values(work)


def test_equal_counts_are_an_alltoall(ranks):
    def work(group: Group) -> None:
        x = np.arange(12.0).reshape(4, 3) + 100 * group.rank
        got = group.alltoall_v(x, [1] * 4)
        np.testing.assert_array_equal(got, group.alltoall(x))

    ranks(4).values(work)


def test_nothing_at_all(ranks):
    """Nobody has a row, rows have no elements, and one rank sends all there is to itself."""

    def work(group: Group) -> None:
        assert group.alltoall_v(np.empty((0, 4)), [0] * 3).shape == (0, 4)
        assert group.alltoall_v(np.empty((6, 0)), [1, 2, 3]).shape == (3 * (group.rank + 1), 0)
        counts = [0, 2 * (group.rank == 1), 0]
        got = group.alltoall_v(np.arange(sum(counts)), counts, counts)
        assert got.tolist() == ([0, 1] if group.rank == 1 else [])

    ranks(3).values(work)


def test_many_in_flight_keep_their_order(ranks, seed):
    """With counts, handles pile up; among messages, collectives and blocking calls of the kind."""
    rng = np.random.default_rng(seed)
    cases = [Case(rng, 3, "int32", 50 if number % 5 else 3000) for number in range(30)]

    def work(group: Group) -> None:
        me = group.rank
        handles = []
        for number, case in enumerate(cases):
            given = None if number % 7 == me else case.counts[:, me]
            out = np.empty_like(case.wanted(me)) if number % 2 else None
            handle = group.alltoall_v_async(case.arrays[me], case.counts[me], given, out=out)
            handles.append(handle)
            if out is not None:
                assert handle.wait(timeout=10) is out
        got = group.sendrecv(np.array([me]), to=(me + 1) % 3, source=(me - 1) % 3)
        assert got.tolist() == [(me - 1) % 3]
        assert group.allreduce(np.ones(1))[0] == 3.0
        for case, handle in reversed(list(zip(cases, handles, strict=True))):
            np.testing.assert_array_equal(handle.wait(timeout=10), case.wanted(me))
            assert handle.done()

    ranks(3).values(work)


def test_out_strided_input_and_tensors(ranks):
    """out= is filled and returned; what is read may be strided; torch in, torch out."""
    torch = pytest.importorskip("torch")

    def work(group: Group) -> None:
        me = group.rank
        columns = np.arange(12).reshape(4, 3).T + 100 * me
        out = np.empty((2 + me, 4), columns.dtype)
        counts = [1, 2] if me == 0 else [1, 1]
        assert group.alltoall_v(columns[: sum(counts)], counts, out=out) is out
        mine = np.arange(12).reshape(4, 3).T
        wanted = [mine[0], mine[0] + 100] if me == 0 else [mine[1], mine[2], mine[1] + 100]
        np.testing.assert_array_equal(out, wanted)
        got = group.alltoall_v(torch.full((2, 3), me), torch.tensor([me, 2 - me]))
        assert isinstance(got, torch.Tensor)
        assert got[:, 0].tolist() == ([1] if me == 0 else [0, 0, 1])

    ranks(2).values(work)


def test_of_a_group(ranks):
    """Counts are by the ranks of the group; who is not in it is told so."""

    def work(world: Group) -> Any:
        team = world.group([2, 0])
        if world.rank == 1:
            with pytest.raises(commute.CommuteError, match="rank 1 is not in the group of ranks"):
                team.alltoall_v(np.ones(2), [1, 1])
            return None
        return team.alltoall_v(np.full(3, world.rank), [1, 2]).tolist()

    assert ranks(3).values(work) == [[2, 2, 0, 0], None, [2, 0]]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few counts": ({"send_counts": [5]}, r"send_counts= 2 whole .* one for each.* got \[5\]"),
    "below zero": ({"send_counts": [6, -1]}, r"whole numbers from 0 up, .* got \[6, -1\]"),
    "fractions": ({"send_counts": [2.5, 2.5]}, r"whole numbers from 0 up, .* got \[2.5, 2.5\]"),
    "a number": ({"send_counts": 5}, "send_counts= 2 whole numbers from 0 up, .* got 5"),
    "too many": ({"recv_counts": [1] * 3}, r"recv_counts= 2 whole numbers .* got \[1, 1, 1\]"),
    "rows": ({"send_counts": [2, 2]}, r"x of 4 rows, the sum of send_counts, got shape \(5, 2\)"),
    "no rows": ({"x": np.array(5.0)}, r"expected x of 5 rows, .* got shape \(\)"),
    "a list": ({"x": [1.0] * 5}, "alltoall_v on rank [01] expected an array"),
    "to itself": ({"recv_counts": [9, 9]}, r"recv_counts\[[01]\] to be what it sends .* got 9"),
    "out": (
        {"recv_counts": [2, 3], "send_counts": [2, 3], "out": np.ones((4, 2))},
        r"alltoall_v on rank [01] expected out= of shape \(5, 2\) .* got shape \(4, 2\)",
    ),
    "columns of out": ({"out": np.ones((5, 3))}, r"out= of shape \(5, 2\) .* got shape \(5, 3\)"),
    "dtype of out": ({"out": np.ones((5, 2), "int8")}, "and another dtype"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(ranks, what):
    """Found before anything is sent; the group goes on."""
    options, words = WRONG[what]
    given = {"x": np.ones((5, 2)), "send_counts": [2, 3], **options}

    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=words):
            group.alltoall_v(**given)
        assert group.alltoall_v(np.ones(2), [1, 1]).shape == (2,)

    ranks(2).values(work)


def test_an_out_that_overlaps(ranks):
    def work(group: Group) -> None:
        x = np.ones(4)
        for counts in ([2, 2], None):
            with pytest.raises(ValueError, match="overlaps x; pass separate memory"):
                group.alltoall_v(x, [2, 2], counts, out=x)
        group.barrier()

    ranks(2).values(work)


@pytest.mark.parametrize("expected", [0, 3])
def test_counts_that_do_not_agree(ranks, expected):
    """Rank 0 sends two rows, rank 1 expects none, or more: all ranks are told who and what."""

    def work(group: Group) -> None:
        counts = [expected, 2, 2] if group.rank == 1 else None
        group.alltoall_v(np.ones((6, 5)), [2, 2, 2], counts)
        group.barrier()

    ended = ranks(3)(work)

    said = f"from rank 0 to rank 1 has 10 float64, the receiver expected {5 * expected} float64"
    assert [type(error) for error in ended] == [MismatchError] * 3
    assert all(said in str(error) for error in ended)


def test_rows_expected_where_none_come(ranks):
    """Also when nothing at all is sent to the rank that waits."""

    def work(group: Group) -> None:
        group.alltoall_v(np.ones(0), [0, 0], [0, 0] if group.rank == 0 else [4, 0])

    ended = ranks(2)(work)

    assert "has 0 float64, the receiver expected 4 float64" in str(ended[1])
    assert isinstance(ended[1], MismatchError)


def test_rows_of_another_shape_or_dtype(ranks):
    for other in (np.ones((2, 3)), np.ones((2, 2), "int8")):

        def work(group: Group, other: Any = other) -> None:
            group.alltoall_v(other if group.rank else np.ones((2, 2)), [1, 1])
            group.barrier()

        assert all(isinstance(error, MismatchError) for error in ranks(2)(work))


def test_an_out_that_is_too_short_for_what_is_told(ranks):
    """The rank hears it too late to take no part: it raises, and nobody waits for it."""

    def work(group: Group) -> None:
        out = np.ones(4) if group.rank == 1 else None
        group.alltoall_v(np.ones(3), [1, 1, 1], out=out)
        group.barrier()

    ended = ranks(3)(work)

    assert isinstance(ended[1], ValueError)
    assert "alltoall_v on rank 1 expected out= of shape (3,)" in str(ended[1])
    for error in (ended[0], ended[2]):
        assert isinstance(error, AbandonedError) and error.rank == 1
        assert "rank 1 gave up alltoall_v: alltoall_v on rank 1 expected out=" in str(error)


def test_a_timeout_gives_it_up(ranks):
    """Whether the counts are missing or the rows."""
    for counts in (None, [1, 1]):

        def work(group: Group, counts: Any = counts) -> None:
            if group.rank == 0:
                group.alltoall_v(np.ones(2), [1, 1], counts, timeout=0.05)
            else:
                for _ in range(2):  # at most one row comes
                    group.recv(np.empty(1), source=0)

        ended = ranks(2)(work)

        assert isinstance(ended[0], OperationTimeoutError)
        assert "waiting for rank 1" in str(ended[0])
        assert isinstance(ended[1], commute.CommuteError)


def test_a_closed_group_says_so():
    with commute.init() as world:
        assert world.alltoall_v(np.arange(3), [3]).tolist() == [0, 1, 2]
        assert world.alltoall_v_async(np.arange(3), [3], [3]).wait().tolist() == [0, 1, 2]
    with pytest.raises(ClosedError, match="the group is closed"):
        world.alltoall_v(np.arange(3), [3])
