# SPDX-License-Identifier: Apache-2.0
"""A call of a collective on its way from the public method to the core."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from commute._arrays import Buffer
from commute.plan import Collective

NOTHING: Final = Buffer(0, 0, 1, (), 0, None)


class Call(NamedTuple):
    """A collective with its arguments checked."""

    collective: Collective
    source: Buffer
    target: Buffer
    elements: int  # per block
    result: Any
    op: str = "sum"
    root: int = 0
