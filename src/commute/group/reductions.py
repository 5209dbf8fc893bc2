# SPDX-License-Identifier: Apache-2.0
"""What a reduction is: its code in the core, and the dtypes it makes sense for.

By name, as in NumPy: the sum of bools is whether any is true, their product whether all are;
complex numbers have no smallest; only integers and bools have bits. One difference: there is no
mean of integers or bools, because a result has the dtype of the input.

Or the caller's own, of two elements, commutative and associative: a ufunc, which the core calls
back with pieces of the arrays, or the address of a compiled function. A ufunc that raises ends the
operation on all ranks; what it raised is kept here for the rank on which it did.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from commute import _core
from commute._arrays import CODES, COMPLEX, FLOATS, Buffer

# The core's reductions (core/dtype.h); a mean is a sum, divided at the end.
OPS: Final = {"sum": 0, "mean": 0, "prod": 1, "min": 2, "max": 3, "and": 4, "or": 5, "xor": 6}
CUSTOM: Final = 7
_ORDERED: Final = ("min", "max")
_BITWISE: Final = ("and", "or", "xor")
_NAMES: Final = {code: name for name, code in CODES.items()}


class _Pieces:
    """Applies a ufunc where the core says, and remembers what it raised."""

    def __init__(self, ufunc: np.ufunc, dtype: np.dtype[Any], *, by_objects: bool) -> None:
        self._ufunc = ufunc
        self._dtype = dtype
        # A function of Python gives objects; they are cast to the dtype as numpy.array would.
        self._options: Any = {"casting": "unsafe"} if by_objects else {}
        self.error: BaseException | None = None

    def __call__(self, a: memoryview, b: memoryview, out: memoryview) -> str:
        try:
            left, right, result = (np.frombuffer(view, self._dtype) for view in (a, b, out))
            self._ufunc(left, right, out=result, **self._options)
        except BaseException as error:  # also an interrupt: it is raised again where it belongs
            self.error = error
            return f"{self._ufunc.__name__} raised {type(error).__name__}: {error}"
        return ""


@dataclass(frozen=True)
class Reduction:
    """A reduction, checked for a dtype; the operation's caller keeps it until that has ended."""

    code: int = 0
    mean: bool = False
    combine: _core.Combine | None = None
    pieces: _Pieces | None = None

    def error(self) -> BaseException | None:
        """What the caller's own ufunc raised on this rank."""
        return None if self.pieces is None else self.pieces.error


SUM: Final = Reduction()
OpLike: TypeAlias = str | int | np.ufunc  # a name, an address, a ufunc


def reduction(op: OpLike, x: Buffer, call: str) -> Reduction:
    """The reduction that op= names, or is; raises unless it exists for elements like those of x."""
    if isinstance(op, np.ufunc):
        return _by_ufunc(op, _dtype_of(x), call)
    if isinstance(op, int) and not isinstance(op, bool):
        if op <= 0:
            raise ValueError(f"{call} expected op= the address of a compiled function, got {op}")
        return Reduction(CUSTOM, combine=_core.CompiledCombine(op))
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(
            f"{call} expected op= one of {', '.join(OPS)}, a NumPy ufunc or the address of a"
            f" compiled function, got {op!r}"
        )
    _check_name(op, x.dtype, call)
    return Reduction(OPS[op], op == "mean")


def _check_name(op: str, dtype: int, call: str) -> None:
    name = _NAMES[dtype]
    if op == "mean" and dtype not in FLOATS | COMPLEX:
        kind = "bools; use op='or', or" if name == "bool" else "integers; use op='sum' or"
        raise TypeError(f"{call} cannot give the mean of {kind} cast to float")
    if op in _ORDERED and dtype in COMPLEX:
        raise TypeError(
            f"{call} cannot give the {op} of {name}, which has no order; pass abs(x), x.real or"
            " x.imag"
        )
    if op in _BITWISE and dtype in FLOATS | COMPLEX:
        raise TypeError(f"{call} by {op!r} expected integers or bool, got {name}; cast first")


def _by_ufunc(ufunc: np.ufunc, dtype: np.dtype[Any], call: str) -> Reduction:
    name = ufunc.__name__
    if (ufunc.nin, ufunc.nout) != (2, 1):
        raise TypeError(
            f"{call} expected a ufunc of two arguments and one result, got {name} with {ufunc.nin}"
            f" and {ufunc.nout}"
        )
    try:
        result = ufunc.resolve_dtypes((dtype, dtype, None))[-1]
    except TypeError as error:
        raise TypeError(f"{call} by {name} does not take {dtype}; cast first") from error
    if result not in (dtype, np.dtype(object)):
        raise TypeError(
            f"{call} by {name} expected a result of {dtype} as its arguments, got {result}"
        )
    pieces = _Pieces(ufunc, dtype, by_objects=result == np.dtype(object))
    combine = _core.PythonCombine(pieces, dtype.itemsize, zlib.crc32(name.encode()))
    return Reduction(CUSTOM, combine=combine, pieces=pieces)


def _dtype_of(x: Buffer) -> np.dtype[Any]:
    if isinstance(x.owner, np.ndarray):
        return np.dtype(x.owner.dtype)
    name = _NAMES[x.dtype]
    if name != "bfloat16":
        return np.dtype(name)
    if "ml_dtypes" not in sys.modules:
        raise TypeError("a ufunc takes bfloat16 only where ml_dtypes is; import it first")
    found: np.dtype[Any] = np.dtype(sys.modules["ml_dtypes"].bfloat16)
    return found
