# SPDX-License-Identifier: Apache-2.0
"""What may be passed as an array, and what is refused, with which words."""

from __future__ import annotations

import array
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from commute import Group
from commute.testing import run_threads


def together(work: Callable[[Group], Any]) -> list[Any]:
    return run_threads(2, work)


class OnlyDlpack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


class OnADevice:
    """What a CUDA array of some library looks like from here."""

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("nobody may ask for the memory of a device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


# ---- what works ----


def test_torch_tensors():
    """CPU tensors of every dtype, in place, and results are tensors of the same dtype."""
    names = "int8 uint8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"

    def work(group: Group) -> None:
        for name in names.split():
            x = torch.full((3, 2), group.rank + 1).to(getattr(torch, name))
            gathered = group.allgather(x)
            assert isinstance(gathered, torch.Tensor) and gathered.dtype == x.dtype
            assert gathered.shape == (2, 3, 2)
            assert group.allreduce(x) is x
            assert x.double().eq(3).all(), name
            out = torch.empty_like(x)
            assert group.allreduce(x, op="max", out=out) is out
            part = group.reduce_scatter(gathered)
            assert part.dtype == x.dtype and part.double().eq(2.0 * group.rank + 2).all()

    together(work)


def test_torch_and_numpy_halves_are_the_same_type():
    """One rank brings ml_dtypes' bfloat16, the other torch's."""

    def work(group: Group) -> float:
        if group.rank == 0:
            x = group.allreduce(np.full(5, 1.5, ml_dtypes.bfloat16))
            return float(x[4])
        return float(group.allreduce(torch.full((5,), 2.0, dtype=torch.bfloat16))[4])

    assert together(work) == [3.5, 3.5]


def test_parameters_and_gradients():
    """Parameters (leaves that require grad) and their .grad, with and without no_grad."""

    def work(group: Group) -> None:
        layer = torch.nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(float(group.rank))
        for parameter in layer.parameters():
            assert group.broadcast(parameter, root=1) is parameter
            assert parameter.eq(1).all()
        layer(torch.full((3, 4), group.rank + 1.0)).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                group.allreduce(parameter.grad, op="mean")
                group.allreduce(parameter)
        assert layer.weight.grad.eq(4.5).all() and layer.bias.grad.eq(3.0).all()
        assert layer.weight.eq(2).all() and layer.weight.requires_grad
        torch.optim.SGD(layer.parameters(), lr=0.1).step()  # still an ordinary module
        handle = group.allreduce_async(layer.weight.grad)
        assert handle.wait() is layer.weight.grad

    together(work)


def test_a_tensor_that_autograd_needs_is_refused():
    def work(group: Group) -> None:
        x = torch.ones(3, requires_grad=True) * 2
        with pytest.raises(ValueError, match=re.escape("autograd still needs; pass x.detach()")):
            group.allreduce(x)
        y = group.allgather(x)  # reading is fine
        assert y.shape == (2, 3) and not y.requires_grad
        assert group.allreduce(x.detach()).eq(4).all()

    together(work)


def test_the_buffer_protocol():
    """bytearray, memoryview and array.array, in place."""

    def work(group: Group) -> None:
        numbers = array.array("d", [1.0, 2.0])
        assert group.allreduce(numbers) is numbers
        assert numbers.tolist() == [2.0, 4.0]
        raw = bytearray([1, 2, group.rank])
        group.allreduce(raw)
        assert raw == bytes([2, 4, 1])
        view = memoryview(array.array("i", [group.rank + 1] * 6)).cast("B").cast("i", [2, 3])
        group.allreduce(view, op="prod")
        assert view.tolist() == [[2, 2, 2]] * 2
        gathered = group.allgather(b"ab"[group.rank : group.rank + 1])  # bytes can only be read
        assert gathered.tobytes() == b"ab"
        if group.rank == 0:
            group.send(b"hello", to=1)
        else:
            out = bytearray(5)
            assert group.recv(out, source=0) is out and out == b"hello"

    together(work)


def test_dlpack():
    """An object that has nothing but DLPack, without a copy."""

    def work(group: Group) -> float:
        memory = np.full(4, group.rank + 1.0, "float32")
        wrapped = OnlyDlpack(memory)
        assert group.allreduce(wrapped) is wrapped
        assert group.allgather(wrapped).shape == (2, 4)
        return float(memory[3])

    assert together(work) == [3.0, 3.0]


def test_shapes_without_elements_or_axes():
    """0-d and empty arrays, and axes of length one."""

    def work(group: Group) -> None:
        scalar = np.array(group.rank + 1.0)
        assert group.allreduce(scalar) is scalar and float(scalar) == 3.0
        np.testing.assert_array_equal(group.allgather(np.array(group.rank)), [0, 1])
        assert float(group.reduce_scatter(np.array([1.0, 2.0]))) == 2.0 * (group.rank + 1)
        for shape in ((0,), (0, 5), (3, 0, 2)):
            empty = np.empty(shape)
            assert group.allreduce(empty, op="mean") is empty
            assert group.allgather(empty).shape == (2, *shape)
            group.broadcast(torch.empty(shape))
        assert group.reduce_scatter(np.empty((2, 0))).shape == (0,)
        zero_d = torch.tensor(group.rank + 1.0)
        assert group.allreduce(zero_d).item() == 3.0

    together(work)


def test_strided_input_that_is_only_read():
    """Every other element, a transpose, a reversal: copied, and the result is right."""

    def work(group: Group) -> None:
        base = np.arange(24.0).reshape(4, 6) + group.rank
        both = [np.arange(24.0).reshape(4, 6) + rank for rank in range(2)]
        for cut in (np.s_[:, ::2], np.s_[::-1], np.s_[1:3, 1:3]):
            np.testing.assert_array_equal(group.allgather(base[cut]), [b[cut] for b in both])
        np.testing.assert_array_equal(group.allgather(base.T), [b.T for b in both])
        out = np.empty((6, 4))
        group.allreduce(base.T, out=out)
        np.testing.assert_array_equal(out, both[0].T + both[1].T)
        strided = torch.arange(10.0)[::2]
        assert group.allgather(strided)[1].tolist() == strided.tolist()
        column = base[:, 0]
        if group.rank == 0:
            group.send(column, to=1)
            group.reduce(column, root=1)
        else:
            np.testing.assert_array_equal(group.recv(np.empty(4), source=0), both[0][:, 0])
            np.testing.assert_array_equal(
                group.reduce(column.copy(), root=1), both[0][:, 0] + both[1][:, 0]
            )

    together(work)


# ---- what is refused: on this rank, before anything is sent, and the group goes on ----

NOT_WRITABLE = np.ones(4)
NOT_WRITABLE.flags.writeable = False
UNALIGNED = np.zeros(33, "uint8")[1:].view("float64")

REFUSED = {
    "strided": (np.ones(8)[::2], ValueError, r"allreduce writes .* \(4,\) .* not contiguous"),
    "Fortran order": (
        np.asfortranarray(np.ones((2, 3))),
        ValueError,
        r"not contiguous in C order; pass numpy.ascontiguousarray\(x\) and copy the result back",
    ),
    "strided tensor": (torch.ones(2, 3).T, ValueError, r"pass x.contiguous\(\) and copy"),
    "expanded tensor": (torch.ones(1).expand(4), ValueError, r"not contiguous"),
    "read-only": (NOT_WRITABLE, ValueError, r"read-only one; pass x.copy\(\) or out="),
    "bytes": (b"abc", ValueError, r"read-only one"),
    "unaligned": (UNALIGNED, ValueError, r"aligned to its elements; pass x.copy\(\)"),
    "byte-swapped": (np.ones(4, ">f8"), TypeError, r"got >f8; cast before calling"),
    "small float": (torch.zeros(2, dtype=torch.float8_e5m2), TypeError, r"got float8_e5m2; cast"),
    "conjugate view": (
        torch.ones(2, dtype=torch.complex64).conj(),
        TypeError,
        r"got a conjugate view of a tensor; pass x.resolve_conj\(\)",
    ),
    "long complex": (np.ones(4, "clongdouble"), TypeError, r"expected one of int8, .* got c"),
    "long double": (np.ones(4, "longdouble"), TypeError, r"got float128|got longdouble"),
    "text": (np.array(["a"]), TypeError, r"got <U1; cast"),
    "objects": (np.array([None]), TypeError, r"got object; cast"),
    "dates": (np.zeros(2, "datetime64[s]"), TypeError, r"got datetime64\[s\]; cast"),
    "float8": (np.zeros(2, ml_dtypes.float8_e5m2), TypeError, r"got float8_e5m2; cast"),
    "records": (np.zeros(2, [("a", "f4")]), TypeError, r"cast before calling"),
    "list": ([1.0, 2.0], TypeError, r"got list; pass numpy.asarray\(x\)"),
    "number": (1.0, TypeError, r"got float; pass numpy.asarray\(x\)"),
    "NumPy scalar": (np.float64(1.0), (TypeError, ValueError), r"got numpy.float64|read-only"),
    "None": (None, TypeError, r"got NoneType"),
    "device": (OnADevice(), TypeError, r"works on CPU memory, got .*OnADevice on a device; .*cpu"),
    "meta tensor": (torch.ones(3, device="meta"), TypeError, r"on meta; pass x.cpu\(\)"),
    "sparse tensor": (torch.eye(3).to_sparse(), TypeError, r"plain dense tensor"),
    "negative view": (
        torch._neg_view(torch.ones(3)),
        TypeError,
        r"plain dense tensor",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    x, kind, words = REFUSED[what]

    def work(group: Group) -> float:
        with pytest.raises(kind, match=words):
            group.allreduce(x)
        with pytest.raises(kind, match=words.replace("allreduce", "broadcast")):
            group.broadcast_async(x)
        return float(group.allreduce(np.ones(1))[0])

    assert together(work) == [2.0, 2.0]


@pytest.mark.parametrize(
    "what", ["long complex", "conjugate view", "list", "device", "byte-swapped", "None"]
)
def test_refused_where_it_is_only_read(what):
    x, kind, words = REFUSED[what]

    def work(group: Group) -> None:
        with pytest.raises(kind, match=words):
            group.allgather(x)
        with pytest.raises(kind, match=words):
            group.send(x, to=1 - group.rank)
        group.barrier()

    together(work)


def test_out_is_checked_like_any_array_that_is_written():
    def work(group: Group) -> None:
        x = np.ones(4)
        with pytest.raises(ValueError, match="read-only"):
            group.allreduce(x, out=NOT_WRITABLE)
        with pytest.raises(ValueError, match="not contiguous"):
            group.allgather(x, out=np.ones((4, 2)).T)
        with pytest.raises(ValueError, match="read-only"):
            group.recv(NOT_WRITABLE, source=1 - group.rank)
        group.barrier()

    together(work)
