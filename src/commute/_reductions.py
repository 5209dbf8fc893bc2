# SPDX-License-Identifier: Apache-2.0
"""What a reduction is: its name, its code in the core, and the dtypes it makes sense for.

As in NumPy: the sum of bools is whether any is true, their product whether all are; complex
numbers have no smallest; only integers and bools have bits. One difference: there is no mean of
integers or bools, because a result has the dtype of the input.
"""

from __future__ import annotations

from typing import Final

from commute._arrays import CODES, COMPLEX, FLOATS

# The core's reductions (core/dtype.h); a mean is a sum, divided at the end.
OPS: Final = {"sum": 0, "mean": 0, "prod": 1, "min": 2, "max": 3, "and": 4, "or": 5, "xor": 6}
_ORDERED: Final = ("min", "max")
_BITWISE: Final = ("and", "or", "xor")
_NAMES: Final = {code: name for name, code in CODES.items()}


def check_op(op: str, dtype: int, call: str) -> None:
    """Raise unless this reduction exists for elements of this dtype."""
    if op not in OPS:
        raise ValueError(f"{call} expected op= one of {', '.join(OPS)}, got {op!r}")
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
