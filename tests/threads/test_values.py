# SPDX-License-Identifier: Apache-2.0
"""What the calls promise beside the values of test_cells.py: bits, objects, refusals, kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from commute import Group, plan
from reductions import ARITHMETIC, BFLOAT16, COMPLEX, FLOATS, fold

ALLREDUCES = plan.algorithms("allreduce")


def shared(group: Group, x: np.ndarray) -> np.ndarray:
    """A copy that all ranks reach."""
    array = group.empty(x.shape, x.dtype)
    array[...] = x
    return array


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_identical_bits_on_all_ranks(ranks, rng, algorithm):
    """Numbers whose sum depends on the order: still the same bits everywhere."""
    for size, dtype in [(3, "float32"), (5, "float64"), (6, "float16"), (7, BFLOAT16)]:
        values = rng.standard_normal((size, 2003)).astype(dtype)
        results = ranks(size).values(
            lambda group, v=values: group.allreduce(
                shared(group, v[group.rank]), algorithm=algorithm
            )
        )

        assert len({result.tobytes() for result in results}) == 1
        close = 0.2 if np.dtype(dtype).itemsize == 2 else 1e-4
        np.testing.assert_allclose(
            results[0].astype("float64"), values.astype("float64").sum(0), rtol=close, atol=close
        )


@pytest.mark.parametrize("place", ["memory", "loopback"])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_deterministic_is_the_sum_in_rank_order(ranks, rng, size, dtype, place):
    """Each reduction is NumPy's left fold over the ranks, bit for bit, in every place."""
    group_of = ranks(size)
    for group in group_of.groups:
        group._wiring.place = place  # loopback: messages over the links only
    for length in (1, 17, 1500, 70_001):
        values = rng.standard_normal((size, length)).astype(dtype)
        values += (
            (1j * rng.standard_normal((size, length))).astype(dtype) if dtype in COMPLEX else 0
        )
        tall = rng.standard_normal((size, size, length)).astype(dtype)
        root = int(rng.integers(size))

        def work(group: Group, v: Any = values, t: Any = tall, r: int = root) -> list[bytes]:
            mine = v[group.rank]
            found = [
                group.allreduce(mine.copy(), deterministic=True),
                group.reduce(mine.copy(), root=r, deterministic=True),
                group.reduce_scatter(t[group.rank], deterministic=True),
            ]
            return [x.tobytes() for x in found]

        total, parts = fold("sum", list(values)), fold("sum", list(tall))
        for rank, found in enumerate(group_of.values(work)):
            reduced = total if rank == root else values[rank]

            assert found == [x.tobytes() for x in (total, reduced, parts[rank])], (length, rank)


def test_deterministic_refuses_plans_that_are_not(ranks):
    """Forcing an algorithm that does not add in rank order raises, and names one that does."""

    def work(group: Group) -> Any:
        with pytest.raises(ValueError, match="choose from gather-to-root"):
            group.allreduce(np.ones(3), algorithm="ring", deterministic=True)
        return group.allreduce(np.ones(3), algorithm="gather-to-root", deterministic=True)[0]

    assert ranks(4).values(work) == [4.0] * 4


def test_not_a_number_spreads(ranks):
    """A NaN of one rank is in everybody's result, in every operation and float."""

    def work(group: Group) -> list[bool]:
        answers = []
        for dtype, op in itertools.product(FLOATS, ARITHMETIC):
            x = np.array([1.0, 2.0], dtype)
            if group.rank == 1:
                x[0] = np.nan
            group.allreduce(x, op)
            answers.append(bool(np.isnan(x[0]) and not np.isnan(x[1])))
        return answers

    assert all(map(all, ranks(3).values(work)))


def test_in_place_returns_the_same_object(ranks):
    """allreduce, broadcast and reduce work in place; with out= x is left alone."""

    def work(group: Group) -> None:
        x = np.full(5, group.rank + 1.0)
        assert group.allreduce(x) is x
        assert group.broadcast(x, root=1) is x
        assert group.reduce(x, root=2) is x
        x = np.full(5, group.rank + 1.0)
        out = np.zeros(5)
        assert group.allreduce(x, out=out) is out
        np.testing.assert_array_equal(out, 6.0)
        assert group.broadcast(x, root=2, out=out) is out
        np.testing.assert_array_equal(out, 3.0)
        assert group.reduce(x, root=0, op="max", out=out) is out
        np.testing.assert_array_equal(out, 3.0)
        assert group.allreduce(x, out=x) is x
        np.testing.assert_array_equal(x, 6.0)

    ranks(3).values(work)


def test_out_of_the_gathering_calls(ranks):
    """allgather and reduce_scatter make a new array, or fill out=."""

    def work(group: Group) -> None:
        x = np.arange(6.0).reshape(2, 3) + group.rank
        gathered = group.allgather(x)
        assert gathered.shape == (2, 2, 3)
        out = np.zeros((2, 2, 3))
        assert group.allgather(x, out=out) is out
        np.testing.assert_array_equal(out, gathered)
        part = group.reduce_scatter(gathered)
        assert part.shape == (2, 3)
        np.testing.assert_array_equal(part, 2 * gathered[group.rank])
        into = np.zeros((2, 3))
        assert group.reduce_scatter(gathered, out=into) is into
        np.testing.assert_array_equal(into, part)

    ranks(2).values(work)


def test_reduce_leaves_the_others_alone(ranks):
    """Off the root x may even be read-only, and keeps its value."""

    def work(group: Group) -> np.ndarray:
        x = np.full(1000, group.rank + 1.0)
        x.flags.writeable = group.rank == 1
        return group.reduce(x, root=1, op="prod")

    results = ranks(4).values(work)

    assert [result[0] for result in results] == [1.0, 24.0, 3.0, 4.0]


def test_mean_of_integers_is_a_type_error(ranks):
    def work(group: Group) -> None:
        for call in (group.allreduce, group.reduce):
            with pytest.raises(TypeError, match="mean of integers; use op='sum' or cast"):
                call(np.ones(4, "int32"), op="mean")
        with pytest.raises(TypeError, match="mean of integers"):
            group.reduce_scatter(np.ones((2, 4), "int32"), op="mean")
        group.barrier()

    ranks(2).values(work)


MEANINGLESS = {
    ("mean", "bool"): "mean of bools; use op='or', or cast to float",
    ("min", "complex64"): r"min of complex64, which has no order; pass abs\(x\), x.real or x.imag",
    ("max", "complex128"): "max of complex128, which has no order",
    ("and", "float32"): "by 'and' expected integers or bool, got float32; cast first",
    ("or", "float16"): "by 'or' expected integers or bool, got float16",
    ("xor", "complex128"): "by 'xor' expected integers or bool, got complex128",
}


@pytest.mark.parametrize(("op", "dtype"), MEANINGLESS)
def test_reductions_that_make_no_sense(ranks, op, dtype):
    """A TypeError that names both, on this rank alone."""

    def work(group: Group) -> None:
        words = MEANINGLESS[op, dtype]
        for call in (group.allreduce, group.reduce, group.reduce_scatter, group.allreduce_async):
            with pytest.raises(TypeError, match=words):
                call(np.ones((2, 4), dtype), op=op)
        group.barrier()

    ranks(2).values(work)


def test_truth_is_what_is_not_zero(ranks):
    """Bytes other than 0 and 1 in an array of bools are true, and results are 0 and 1."""

    def work(group: Group) -> list[list[int]]:
        odd = np.array([0, 0, 2, 4], "uint8") if group.rank else np.array([0, 8, 0, 1], "uint8")
        ops = ("sum", "prod", "min", "max", "and", "or", "xor")
        found = [group.allreduce(odd.copy().view(bool), op=op) for op in ops]
        return [x.view("uint8").tolist() for x in found]

    any_of, all_of, one_of = [0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]
    wanted = [any_of, all_of, all_of, any_of, all_of, any_of, one_of]
    assert ranks(2).values(work) == [wanted] * 2


def test_arguments_are_checked_before_anything_is_sent(ranks):
    """A mistake in the arguments is this rank's alone: the group goes on."""

    def work(group: Group) -> float:
        x = np.ones(4)
        with pytest.raises(ValueError, match=r"one of sum, .*, xor, a NumPy ufunc .* got 'median'"):
            group.allreduce(x, op="median")
        with pytest.raises(ValueError, match="by 'rings' is not known; choose from ring, tree"):
            group.allreduce(x, algorithm="rings")
        with pytest.raises(ValueError, match="root= from 0 to 1, got 2"):
            group.broadcast(x, root=2)
        with pytest.raises(ValueError, match="root= from 0 to 1, got -1"):
            group.reduce(x, root=-1)
        with pytest.raises(ValueError, match=r"leading axis of length 2 .* got shape \(4,\)"):
            group.reduce_scatter(x)
        with pytest.raises(ValueError, match=r"out= of shape \(2, 4\)"):
            group.allgather(x, out=np.ones(8))
        with pytest.raises(ValueError, match=r"out= of shape \(4,\) .* another dtype"):
            group.allreduce(x, out=np.ones(4, "float32"))
        with pytest.raises(ValueError, match="overlaps x"):
            whole = np.ones(6)
            group.allreduce(whole[:4], out=whole[2:])
        with pytest.raises(ValueError, match=r"to=0, which is this one|to=1, which is this one"):
            group.send(x, to=group.rank)
        return float(group.allreduce(x)[0])

    assert ranks(2).values(work) == [2.0, 2.0]


TWINS = {"allreduce": "one-shot", "broadcast": "shared"}


@pytest.mark.parametrize("call", TWINS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_kernels_give_the_bits_of_their_twin_plans(ranks, rng, call, size):
    """What fits beside the flag, what just does not, what just fits a line; each root, each op."""
    for length, op in itertools.product((0, 1, 2, 6, 7, 333, 4096), ARITHMETIC):
        values = rng.standard_normal((size, length)).astype("float32")
        options = {"op": op} if call == "allreduce" else {"root": int(rng.integers(size))}

        def work(group: Group, v: Any = values, o: Any = options) -> list[bytes]:
            by = ("line", TWINS[call], None)
            return [
                getattr(group, call)(v[group.rank].copy(), algorithm=name, **o).tobytes()
                for name in by
            ]

        results = ranks(size).values(work)
        assert len({bits for found in results for bits in found}) == 1


def test_a_line_holds_so_much(ranks):
    """A larger array is refused by name and size, on each rank, before anything is sent."""

    def work(group: Group) -> str:
        with pytest.raises(ValueError, match="up to 16384 bytes, got 16388; leave algorithm out"):
            group.allreduce(np.ones(4097, "float32"), algorithm="line")
        return str(group.allreduce(np.ones(4097, "float32"))[0])

    assert ranks(3).values(work) == ["3.0"] * 3


def test_barriers_by_kernel_and_by_plan_hold(ranks):
    """Nobody leaves a barrier before all have entered it, whatever else is called in between."""
    entered = [0] * 5

    def work(group: Group) -> None:
        for number in range(200):
            entered[group.rank] = number
            if number % 3 == 0:
                group.broadcast(np.zeros(2), root=number % 5)
            group.barrier()
            assert min(entered) >= number
            group.barrier()

    ranks(5).values(work)


def test_one_shot_goes_through_the_executor(ranks):
    """put, signal, wait and reduce_many run on outboxes: no message travels, results are right."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((4, 200_003)).astype("float32")
    group_of = ranks(4)
    before = [group._runner.engine.messages for group in group_of.groups]
    results = group_of.values(
        lambda group: group.allreduce(values[group.rank].copy(), algorithm="one-shot")
    )
    after = [group._runner.engine.messages for group in group_of.groups]
    group_of.values(lambda group: group.allreduce(values[group.rank].copy(), algorithm="ring"))
    ringed = [group._runner.engine.messages for group in group_of.groups]

    assert {r.tobytes() for r in results} == {fold("sum", list(values)).tobytes()}
    assert after == before
    assert all(now > then for now, then in zip(ringed, after, strict=True))
    assert group_of.groups[0].records()[0]["algorithm"] == "one-shot"
