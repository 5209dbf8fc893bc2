# SPDX-License-Identifier: Apache-2.0
"""`world.empty`: what its arrays are, who reaches them, and when their memory is used again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import commute
from commute import Group

LARGE = 100_003  # beyond what travels in a line


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def used(group: Group) -> str:
    return str(group.records()[-1]["algorithm"])


def test_large_ones_are_reduced_where_they_are(ranks):
    """Without asking for it; the whole array, a part of it, and with out= naming itself."""

    def work(group: Group) -> list[Any]:
        x = group.empty((7, LARGE))
        x[:] = group.rank + 1
        seen = [group.allreduce(x) is x, used(group), float(x.sum())]
        part = x[2:5]
        group.allreduce(part, "max")
        seen += [used(group), float(x.sum())]
        group.allreduce(x, out=x)
        return [*seen, used(group), float(x[0, 0])]

    for seen in ranks(3).values(work):
        assert seen == [True, "direct", 6.0 * 7 * LARGE, "direct", 6.0 * 7 * LARGE, "direct", 18.0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_random_parts_of_several_arrays(ranks, rng, seed, size):
    """Sums and broadcasts of parts, each as NumPy has it; what is beside a part stays as it was."""
    count, length = 40, 50_000
    begins = rng.integers(0, length // 2, count)
    ends = begins + rng.integers(1, length // 2, count)
    which, roots = rng.integers(0, 3, count), rng.integers(0, size, count)
    sums = rng.random(count) < 0.6
    values = rng.integers(-4, 5, (size, 3, length)).astype(np.float64)

    def work(group: Group) -> np.ndarray:
        arrays = [group.empty(length, "float64") for _ in range(3)]
        for array, value in zip(arrays, values[group.rank], strict=True):
            array[:] = value
        for i in range(count):
            part = arrays[which[i]][begins[i] : ends[i]]
            if sums[i]:
                group.allreduce(part, "max")
            else:
                group.broadcast(part, root=int(roots[i]))
        return np.stack(arrays)

    model = values.copy()
    for i in range(count):
        part = model[:, which[i], begins[i] : ends[i]]
        part[:] = part.max(0) if sums[i] else part[roots[i]]
    for rank, got in enumerate(ranks(size).values(work)):
        np.testing.assert_array_equal(got, model[rank], err_msg=f"seed {seed}, rank {rank}")


def test_small_parts_and_other_calls_treat_it_as_any_array(ranks):
    def work(group: Group) -> list[Any]:
        x = group.empty(LARGE)
        x[:] = group.rank
        group.allreduce(x[:10])
        seen = [used(group)]
        gathered = group.allgather(x[:3])
        group.allreduce(x, out=np.empty(LARGE, "float32"))
        return [*seen, used(group), gathered.tolist()]

    for seen in ranks(2).values(work):
        assert seen == ["line", "two-shot", [[1.0] * 3, [1.0] * 3]]


def test_another_array_or_another_part_is_a_mismatch(ranks):
    """Nothing is written where a peer does not expect it."""

    def work(group: Group) -> Any:
        a, b = group.empty(LARGE), group.empty(LARGE)
        a[:], b[:] = 1, 2
        try:
            group.barrier()  # the others may have failed before this one has left it
            group.allreduce(a if group.rank == 0 else b)
        except commute.MismatchError as error:
            return str(error), float(a.sum()), float(b.sum())
        return None

    for text, first, second in ranks(2).values(work):
        assert "another array of empty()" in text and "same array" in text
        assert (first, second) == (1.0 * LARGE, 2.0 * LARGE)

    def parts(group: Group) -> Any:
        with pytest.raises(commute.MismatchError):
            a = group.empty(2 * LARGE)
            group.allreduce(a[group.rank : LARGE + group.rank])

    ranks(2).values(parts)


def test_an_ordinary_array_on_one_rank_is_a_mismatch(ranks):
    def work(group: Group) -> Any:
        with pytest.raises(commute.MismatchError, match="empty"):
            shared = group.empty(LARGE)  # the others may have failed before this one has it
            group.allreduce(shared if group.rank == 0 else np.zeros(LARGE, "float32"))

    ranks(3).values(work)


def test_memory_is_used_again_when_the_last_view_has_gone(ranks):
    def work(group: Group) -> list[bool]:
        x = group.empty(LARGE)
        begin = address(x)
        view = x[5:].reshape(2, -1)
        del x
        gc.collect()
        other = group.empty(LARGE)
        kept_apart = address(other) != begin
        view[:] = 3
        del view
        gc.collect()
        again = group.empty(LARGE)
        again[:] = group.rank
        group.allreduce(again)
        return [kept_apart, address(again) == begin, bool((again == 1).all())]

    assert ranks(2).values(work) == [[True, True, True]] * 2


def test_ranks_may_drop_their_arrays_at_different_times(ranks, rng, seed):
    """A rank's memory is its own: what others still hold is not touched by its next array."""
    keeps = rng.random((3, 30)) < 0.5

    def work(group: Group) -> bool:
        held, fine = [], True
        for number in range(30):
            x = group.empty(LARGE + number % 2, "int32")
            x[:] = group.rank + number
            group.allreduce(x)
            held.append((x, 3 * number + 3))
            if not keeps[group.rank, number]:
                held.pop(number % len(held))
            fine &= all(bool((array == value).all()) for array, value in held)
        return fine

    assert ranks(3).values(work) == [True] * 3, f"seed {seed}"


def test_it_outlives_its_group(ranks):
    def work(group: Group) -> np.ndarray:
        x = group.empty(LARGE)
        x[:] = 7
        group.allreduce(x)
        group.close()
        x[0] += 1
        return x

    for x in ranks(2).values(work):
        assert (x[0], x[1]) == (15, 14)


def test_different_sizes_are_refused_on_all_ranks(ranks):
    def work(group: Group) -> str:
        with pytest.raises(ValueError, match="same shape and dtype") as refused:
            group.empty(1000 + group.rank)
        x = group.empty(LARGE)  # and the group goes on
        x[:] = 1
        group.allreduce(x)
        return f"{refused.value} {x[0]}"

    for text in ranks(2).values(work):
        assert "rank 0 asked for 4000 bytes, rank 1 for 4004" in text and text.endswith(" 2.0")


def test_more_than_there_is_is_refused_on_all_ranks(ranks):
    """And the group goes on."""

    def work(group: Group) -> Any:
        too_much = 1 << 50
        with pytest.raises(MemoryError):
            group.empty(too_much, "uint8")
        x = group.empty(LARGE)
        x[:] = 1
        return float(group.allreduce(x)[0]), used(group)

    assert ranks(2).values(work) == [(2.0, "direct")] * 2


def test_none_and_scalars(ranks):
    def work(group: Group) -> list[Any]:
        shapes = [group.empty(shape).shape for shape in (0, (3, 0), (), 5, np.int64(2))]
        return [*shapes, group.empty((), "complex128").dtype.name]

    assert ranks(2).values(work)[0] == [(0,), (3, 0), (), (5,), (2,), "complex128"]


def test_torch_views_it(ranks):
    torch = pytest.importorskip("torch")

    def work(group: Group) -> list[Any]:
        tensor = torch.from_numpy(group.empty((4, LARGE)))
        gc.collect()
        tensor.fill_(group.rank + 1)
        group.allreduce(tensor)
        seen = [used(group), float(tensor.sum())]
        group.allreduce(tensor[1:3], "mean")
        return [*seen, used(group), float(tensor[1, 0])]

    assert ranks(2).values(work) == [["direct", 12.0 * LARGE, "direct", 3.0]] * 2


def test_in_the_background(ranks):
    def work(group: Group) -> list[float]:
        arrays = [group.empty(LARGE) for _ in range(4)]
        for number, array in enumerate(arrays):
            array[:] = number
        handles = [group.allreduce_async(array) for array in arrays]
        return [float(handle.wait()[0]) for handle in handles]

    assert ranks(3).values(work) == [[0.0, 3.0, 6.0, 9.0]] * 3


def test_forcing_it_elsewhere_is_refused(ranks):
    def work(group: Group) -> None:
        with pytest.raises(ValueError, match=r"'direct' needs arrays of empty\(\)"):
            group.allreduce(np.zeros(LARGE), algorithm="direct")

    ranks(2).values(work)


def test_a_group_has_arrays_of_its_own(ranks):
    """The world's are ordinary ones for it, and its own for the world."""

    def work(group: Group) -> list[Any]:
        team = group.group([0, 2])
        if group.rank == 1:
            return []
        x = team.empty(LARGE)
        x[:] = group.rank + 1
        team.allreduce(x)
        return [used(team), float(x[0])]

    assert ranks(3).values(work) == [["direct", 4.0], [], ["direct", 4.0]]


def test_own_reductions_and_persistent_operations(ranks):
    def work(group: Group) -> list[Any]:
        x = group.empty(LARGE, "int64")
        x[:] = 6 * (group.rank + 2)
        group.allreduce(x, np.gcd)
        seen = [used(group), int(x[-1])]
        total = group.allreduce_init(x)
        for _ in range(3):
            total.start()
            total.wait()
        return [*seen, used(group), int(x[0])]

    assert ranks(2).values(work) == [["direct", 6, "direct", 48]] * 2
