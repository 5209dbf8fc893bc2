# SPDX-License-Identifier: Apache-2.0
"""Structs as JSON and back. JSON has no number for what does not exist: it is null there."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

__all__ = ["decoded", "encoded"]

T = TypeVar("T")


def encoded(struct: msgspec.Struct, *, indent: int | None = None) -> bytes:
    """As JSON: in one line, or for people."""
    made = msgspec.json.encode(struct)
    return made if indent is None else msgspec.json.format(made, indent=indent) + b"\n"


def decoded(text: bytes, type: type[T]) -> T:
    """A field that is null has its default; in a list null is what is not a number.

    Raises:
        msgspec.MsgspecError: it is something else.
    """
    return msgspec.convert(_with_defaults(msgspec.json.decode(text)), type)


def _with_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_defaults(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [math.nan if item is None else _with_defaults(item) for item in value]
    return value
