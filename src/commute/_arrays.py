# SPDX-License-Identifier: Apache-2.0
"""How arrays come in: NumPy, torch on the CPU, and anything with the buffer protocol or DLPack.

Nothing is copied, except a non-contiguous array that is only read. What cannot be used as it is
(strided in-place arrays, read-only ones, device tensors, unknown dtypes) is refused with a
sentence that says what to pass instead. torch is never imported here: an object can be a tensor
only if its module is loaded already.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final, NamedTuple

import numpy as np

from commute._errors import ArrayError

# The codes of the core (core/dtype.h).
CODES: Final[dict[str, int]] = {
    "int8": 0,
    "uint8": 1,
    "int16": 2,
    "uint16": 3,
    "int32": 4,
    "uint32": 5,
    "int64": 6,
    "uint64": 7,
    "float16": 8,
    "bfloat16": 9,
    "float32": 10,
    "float64": 11,
    "bool": 12,
    "complex64": 13,
    "complex128": 14,
}
FLOATS: Final = frozenset({8, 9, 10, 11})
COMPLEX: Final = frozenset({13, 14})
# What tables of the store can be made of.
STORED: Final = {name: code for name, code in CODES.items() if code <= CODES["float64"]}
HALVES: Final = frozenset({8, 9})

_BY_NUMPY: dict[np.dtype[Any], int] = {
    np.dtype(name): code for name, code in CODES.items() if name != "bfloat16"
}
_CPU: Final = 1  # DLPack's device type


class Buffer(NamedTuple):
    """An array as the core sees it; `owner` keeps the memory alive.

    Attributes:
        copied: whether this is a copy, as the array was not contiguous; later changes are not seen.
    """

    address: int
    elements: int
    dtype: int
    shape: tuple[int, ...]
    nbytes: int
    owner: Any
    copied: bool = False


def reading(x: Any, call: str) -> Buffer:
    """The buffer of an array that is only read; a non-contiguous one is copied."""
    if type(x) is not np.ndarray and is_tensor(x):
        return _tensor(x, call, written=False)
    return _array(_as_numpy(x, call), call, written=False)


def writing(x: Any, call: str) -> Buffer:
    """The buffer of an array that the call writes into."""
    if type(x) is not np.ndarray and is_tensor(x):
        return _tensor(x, call, written=True)
    return _array(_as_numpy(x, call), call, written=True)


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same library and dtype as x."""
    if is_tensor(x):
        return sys.modules["torch"].empty(shape, dtype=x.dtype)
    return np.empty(shape, dtype=_as_numpy(x, "empty_like").dtype)


def copy_into(target: Buffer, source: Buffer) -> None:
    """Copy the bytes of one buffer into another of the same length."""
    ctypes.memmove(target.address, source.address, source.nbytes)


def empty_of(code: int, shape: tuple[int, ...], *, tensor: bool) -> Any:
    """A new array of a dtype of the core; a tensor if asked for and torch is loaded."""
    name = next(name for name, known in CODES.items() if known == code)
    torch = sys.modules.get("torch")
    if tensor and torch is not None:
        return torch.empty(shape, dtype=getattr(torch, name))
    try:
        return np.empty(shape, dtype=name)
    except TypeError:
        raise ArrayError(f"NumPy has no {name} here; import ml_dtypes or pass out=") from None


def overlap(a: Buffer, b: Buffer) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _tensor(x: Any, call: str, *, written: bool) -> Buffer:
    torch = sys.modules["torch"]
    if x.device.type != "cpu":
        raise ArrayError(f"{call} works on CPU memory, got a tensor on {x.device}; pass x.cpu()")
    name = str(x.dtype).removeprefix("torch.")
    if name not in CODES:
        raise ArrayError(_unknown(call, name))
    if x.layout != torch.strided or x.is_neg():
        raise ArrayError(
            f"{call} expected a plain dense tensor, got {x.layout}; make it dense first"
        )
    if x.is_conj():  # only marked so: its memory holds the numbers as they were
        raise ArrayError(f"{call} got a conjugate view of a tensor; pass x.resolve_conj()")
    if written and not x.is_leaf and x.requires_grad:
        raise ArrayError(
            f"{call} would overwrite a tensor that autograd still needs; pass x.detach()"
        )
    x = x.detach()
    copied = not x.is_contiguous()
    if copied:
        if written:
            raise ArrayError(_strided(call, tuple(x.shape), "x.contiguous()"))
        x = x.contiguous()
    count = x.numel()
    if count and not x.data_ptr():
        raise ArrayError(f"{call} expected a tensor with memory of its own, got one without")
    nbytes = count * x.element_size()
    return Buffer(x.data_ptr(), count, CODES[name], tuple(x.shape), nbytes, x, copied)


def _as_numpy(x: Any, call: str) -> np.ndarray[Any, Any]:
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
        if x.__dlpack_device__()[0] != _CPU:
            raise ArrayError(
                f"{call} works on CPU memory, got {_kind(x)} on a device; pass x.cpu()"
            )
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ArrayError(f"{call} cannot use this {_kind(x)} through DLPack: {error}") from None
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        raise ArrayError(
            f"{call} expected an array (NumPy, torch, buffer protocol or DLPack), got {_kind(x)};"
            " pass numpy.asarray(x)"
        ) from None


def _array(x: np.ndarray[Any, Any], call: str, *, written: bool) -> Buffer:
    code = _BY_NUMPY.get(x.dtype)
    if code is None:
        # ml_dtypes' bfloat16 is a user-defined dtype: it has a name, but no type number of its own.
        if x.dtype.name != "bfloat16" or x.dtype.itemsize != 2:
            raise ArrayError(_unknown(call, str(x.dtype)))
        code = CODES["bfloat16"]
    flags = x.flags
    copied = not flags.c_contiguous
    if copied:
        if written:
            raise ArrayError(_strided(call, x.shape, "numpy.ascontiguousarray(x)"))
        x = np.ascontiguousarray(x)
        flags = x.flags
    if written and not flags.writeable:
        raise ArrayError(
            f"{call} writes into its array, got a read-only one; pass x.copy() or out="
        )
    if not flags.aligned:
        raise ArrayError(f"{call} expected an array aligned to its elements; pass x.copy()")
    return Buffer(x.__array_interface__["data"][0], x.size, code, x.shape, x.nbytes, x, copied)


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def _unknown(call: str, dtype: str) -> str:
    return f"{call} expected one of {', '.join(CODES)}, got {dtype}; cast before calling"


def _strided(call: str, shape: tuple[int, ...], instead: str) -> str:
    return (
        f"{call} writes into its array, got one of shape {shape} that is not contiguous in C order;"
        f" pass {instead} and copy the result back"
    )
