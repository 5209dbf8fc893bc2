# SPDX-License-Identifier: Apache-2.0
"""Reductions of the caller's own: ufuncs and compiled functions, by every plan, and failing."""

from __future__ import annotations

import ctypes
import functools
import gc
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commute import AbandonedError, Group, MismatchError, plan

LENGTHS = (0, 1, 7, 1023, 100_003)  # the last one: tiles, and messages that a link cannot hold
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)
SOURCE = """
#include <stddef.h>
#include <stdint.h>
/* The larger magnitude of each pair of int32. */
void farther(const void* a, const void* b, void* out, size_t count) {
  const int32_t *x = a, *y = b;
  for (size_t i = 0; i < count; ++i) {
    const int64_t u = x[i] < 0 ? -(int64_t)x[i] : x[i], v = y[i] < 0 ? -(int64_t)y[i] : y[i];
    ((int32_t*)out)[i] = u > v || (u == v && x[i] > y[i]) ? x[i] : y[i];
  }
}
"""


def every_plan() -> list[tuple[str, str]]:
    return [(call, name) for call in REDUCTIONS for name in plan.candidates(call, "memory")]


def reduced(group: Group, call: str, values: np.ndarray, **options: Any) -> Any:
    """What this rank gets, of values that have one row per rank, or per rank and block."""
    mine = values[group.rank]
    if call == "reduce_scatter":
        mine = np.stack([mine + block for block in range(group.size)]).astype(values.dtype)
    elif call == "reduce":
        options["root"] = group.size - 1
    return getattr(group, call)(mine.copy(), **options)


def wanted(call: str, ufunc: Any, values: np.ndarray, rank: int) -> np.ndarray:
    if call == "reduce" and rank != len(values) - 1:
        return values[rank]
    added = rank if call == "reduce_scatter" else 0
    return functools.reduce(ufunc, [(row + added).astype(values.dtype) for row in values])


@pytest.mark.parametrize(("call", "algorithm"), every_plan())
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_ufunc_by_every_plan(ranks, rng, size, call, algorithm):
    """np.gcd, which no kernel knows, over links and in shared memory, any length."""
    group_of = ranks(size)
    for length in LENGTHS:
        if algorithm == "line" and length > 2000:
            continue
        values = rng.integers(1, 1000, (size, length)).astype("int64") * 6
        options = {"op": np.gcd, "algorithm": algorithm}
        found = group_of.values(lambda group, v=values, o=options: reduced(group, call, v, **o))
        for rank, got in enumerate(found):
            np.testing.assert_array_equal(got, wanted(call, np.gcd, values, rank))


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float64", "complex128", "bool"])
def test_ufuncs_of_many_dtypes(ranks, rng, dtype):
    """Elements of 1 to 16 bytes; NumPy's own answer, in rank order where it is asked for."""
    values = (rng.standard_normal((4, 3001)) * 4).astype(dtype)
    ufunc = np.logical_or if dtype == "bool" else np.multiply

    def work(group: Group) -> list[bytes]:
        found = [reduced(group, call, values, op=ufunc, deterministic=True)
                 for call in ("allreduce", "reduce")]  # fmt: skip
        return [x.tobytes() for x in found]

    for rank, found in enumerate(ranks(4).values(work)):
        rows = [wanted(call, ufunc, values, rank) for call in ("allreduce", "reduce")]
        assert found == [row.tobytes() for row in rows]


def test_bfloat16_and_tensors(ranks):
    torch = pytest.importorskip("torch")

    def work(group: Group) -> list[float]:
        x = np.array([1, 5], ml_dtypes.bfloat16) + group.rank
        t = torch.tensor([1.0, 5.0], dtype=torch.bfloat16) - group.rank
        group.allreduce(x, np.maximum)
        group.allreduce(t, np.minimum)
        return [*map(float, x), *t.tolist()]

    assert ranks(3).values(work) == [[3.0, 7.0, -1.0, 3.0]] * 3


def test_a_function_of_python(ranks):
    """numpy.frompyfunc makes a ufunc of it; what it returns is cast to the dtype."""
    longer = np.frompyfunc(lambda a, b: a if abs(a) >= abs(b) else b, 2, 1)

    def work(group: Group) -> list[float]:
        x = np.array([-3.0 * group.rank, 1.0, float(group.rank == 1)])
        return group.allreduce(x, longer, algorithm="ring").tolist()

    assert ranks(3).values(work) == [[-6.0, 1.0, 1.0]] * 3


@pytest.fixture(scope="module")
def farther(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A compiled function, in a library of its own."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("compiled")
    (folder / "farther.c").write_text(SOURCE)
    library = folder / "farther.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, folder / "farther.c"],
                   check=True, timeout=60)  # fmt: skip
    return ctypes.CDLL(str(library)).farther


def address_of(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


@pytest.mark.parametrize(("call", "algorithm"), every_plan())
def test_a_compiled_function_by_every_plan(ranks, rng, farther, call, algorithm):
    """By its address: pieces of any length, the result into one of the operands."""
    larger = np.frompyfunc(lambda a, b: max(a, b, key=lambda x: (abs(x), x)), 2, 1)
    group_of = ranks(4)
    for length in (0, 5, 4001) if algorithm == "line" else (*LENGTHS[:-1], 20_011):
        values = rng.integers(-(1 << 20), 1 << 20, (4, length)).astype("int32")
        options = {"op": address_of(farther), "algorithm": algorithm}
        found = group_of.values(lambda group, v=values, o=options: reduced(group, call, v, **o))
        for rank, got in enumerate(found):
            np.testing.assert_array_equal(got, wanted(call, larger, values, rank).astype("int32"))


def test_a_callback_of_ctypes(ranks):
    """Whatever has the signature will do, also a function of Python that ctypes has wrapped."""

    def add(a: int, b: int, out: int, count: int) -> None:
        x, y, into = (
            np.ctypeslib.as_array((ctypes.c_double * count).from_address(at)) for at in (a, b, out)
        )
        np.add(x, y, out=into)

    callback = SIGNATURE(add)

    def work(group: Group) -> float:
        return float(group.allreduce(np.ones(10), address_of(callback))[3])

    assert ranks(3).values(work) == [3.0] * 3


def test_mixed_with_other_calls(ranks, rng):
    """Asynchronous calls in flight by names, ufuncs and messages keep their order."""

    def work(group: Group) -> None:
        other = 1 - group.rank
        handles = []
        for number in range(40):
            x = np.full(100 * number, group.rank + number + 1)
            op: Any = (np.lcm, "sum", np.bitwise_xor)[number % 3]
            handles.append((number, group.allreduce_async(x, op)))
        swapped = group.sendrecv(np.full(5, group.rank), to=other, source=other)
        assert swapped.tolist() == [other] * 5
        for number, handle in handles:
            a, b = number + 1, number + 2
            value = (np.lcm(a, b), a + b, a ^ b)[number % 3]
            np.testing.assert_array_equal(handle.wait(timeout=10), np.full(100 * number, value))

    ranks(2).values(work)


REFUSED: dict[str, tuple[Any, str, type[Exception], str]] = {
    "one argument": (np.negative, "float64", TypeError, "of two arguments .* got negative with 1"),
    "two results": (np.divmod, "float64", TypeError, "got divmod with 2 and 2"),
    "another dtype": (np.greater, "float64", TypeError, "expected a result of float64 .* got bool"),
    "a wider dtype": (np.true_divide, "int32", TypeError, "of int32 as its arguments, got float64"),
    "no loop": (np.gcd, "float32", TypeError, "by gcd does not take float32; cast first"),
    "null": (0, "float32", ValueError, "the address of a compiled function, got 0"),
    "a truth": (True, "float32", ValueError, "a NumPy ufunc or the address .* got True"),
    "a function": (max, "float32", ValueError, "a NumPy ufunc or the address .* got <built-in"),
    "nothing": (None, "float32", ValueError, "got None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_sent(ranks, what):
    op, dtype, kind, words = REFUSED[what]

    def work(group: Group) -> None:
        for call in (group.allreduce, group.reduce, group.reduce_scatter, group.allreduce_async):
            with pytest.raises(kind, match=words):
                call(np.ones((2, 4), dtype), op=op)
        group.barrier()

    ranks(2).values(work)


class Boom(Exception):
    """Of a ufunc."""


def sum_that(fails: bool) -> np.ufunc:
    def add(a: float, b: float) -> float:
        if fails:
            raise Boom("no sum today")
        return a + b

    return np.frompyfunc(add, 2, 1)


def adding_rank(call: str, algorithm: str) -> int:
    """Of three ranks, one that adds up something; in a reduce the last one is the root."""
    root = 2 if call == "reduce" else 0
    adds = [plan.Op.RECV_REDUCE, plan.Op.RECV_REDUCE_SEND, plan.Op.REDUCE_MANY]
    programs = plan.build(call, algorithm, 3, root).programs
    return next(rank for rank, code in enumerate(programs) if np.isin(code["op"], adds).any())


@pytest.mark.parametrize("length", [1000, 100_003])  # no chunk is empty
@pytest.mark.parametrize(("call", "algorithm"), every_plan())
def test_what_a_ufunc_raises_surfaces_on_its_rank(ranks, call, algorithm, length):
    """The rank hears what it was, nobody hangs, and the others are told who gave up what."""
    guilty = adding_rank(call, algorithm)
    length = min(length, 2000) if algorithm == "line" else length

    def work(group: Group) -> None:
        op = sum_that(fails=group.rank == guilty)
        reduced(group, call, np.ones((3, length)), op=op, algorithm=algorithm)
        group.barrier()  # for those whose part was done before

    ended = ranks(3)(work)
    others = [error for rank, error in enumerate(ended) if rank != guilty]

    assert isinstance(ended[guilty], Boom), ended
    assert isinstance(ended[guilty].__cause__, AbandonedError)
    assert all(isinstance(error, AbandonedError) and error.rank == guilty for error in others)
    gave_up = f"rank {guilty} gave up {call} of"
    assert all(gave_up in str(e) and "raised Boom: no sum today" in str(e) for e in others)


def test_what_a_ufunc_raises_surfaces_at_wait(ranks):
    """Of an asynchronous call, also on the progress thread."""

    def work(group: Group) -> None:
        handle = group.allreduce_async(np.ones(9), sum_that(fails=group.rank == 0))
        handle.wait(timeout=10)
        group.barrier()

    ended = ranks(2)(work)

    assert isinstance(ended[0], Boom) and isinstance(ended[1], AbandonedError)


def test_ranks_that_pass_different_ufuncs_are_told(ranks):
    """The names are compared; the addresses of compiled functions cannot be."""

    def work(group: Group) -> None:
        op = np.maximum if group.rank == 0 else np.minimum
        group.allreduce(np.ones(1000), op, algorithm="ring")

    ended = ranks(2)(work)

    assert all(isinstance(error, MismatchError) for error in ended)
    assert "by another op or plan; pass the same op= and algorithm= on all ranks" in str(ended[0])


def test_ufuncs_are_let_go_of(ranks):
    """An operation that has ended keeps neither its ufunc nor its array alive."""
    seen: list[Callable[[], Any]] = []

    def work(group: Group) -> None:
        def function(a: float, b: float) -> float:
            return a + b

        seen.append(weakref.ref(function))
        group.allreduce_async(np.ones(4), np.frompyfunc(function, 2, 1)).wait()
        del function
        for _ in range(2):
            group.barrier()

    ranks(2).values(work)
    gc.collect()

    assert [watched() for watched in seen] == [None, None]
