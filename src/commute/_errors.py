# SPDX-License-Identifier: Apache-2.0
"""Every error that commute raises on purpose, in one tree.

    CommuteError
    ├── JoinError               this process could not become a member of the world
    ├── AuthenticationError     the two ends do not share a token, or a token is unusable
    ├── MismatchError           the ranks called different operations, or with different arrays
    ├── PeerLostError           another rank is gone, or was declared gone
    ├── OperationTimeoutError   the deadline passed (also a TimeoutError)
    ├── AbandonedError          another rank gave up the operation this one waits in
    ├── ClosedError             the group, or what belongs to it, was closed before
    ├── ArrayError              an array that does not fit (also a ValueError and a TypeError)
    ├── SettingError            a setting that cannot be (also a ValueError)
    ├── DataError               data to learn from that cannot be read (also a ValueError)
    ├── UnknownTableError       the store has no such table (also a LookupError)
    ├── CheckpointError         a saved store that cannot be written, or is not whole
    ├── SlotLostError           a server is gone, and with it a part of a store
    └── ForkedError             the group was made before a fork and is used after it

What the message says is also on the exception as attributes. They are keyword-only, and every
error survives being copied to another process (a pool of workers does that with exceptions).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AbandonedError",
    "ArrayError",
    "AuthenticationError",
    "CheckpointError",
    "ClosedError",
    "CommuteError",
    "DataError",
    "ForkedError",
    "JoinError",
    "MismatchError",
    "OperationTimeoutError",
    "PeerLostError",
    "SettingError",
    "SlotLostError",
    "UnknownTableError",
]


def _rebuild(
    kind: type[CommuteError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> CommuteError:
    error = kind.__new__(kind, *args)
    error.args = args  # TimeoutError is an OSError, which sets them in __init__ only
    error.__dict__.update(attributes)
    return error


class CommuteError(Exception):
    """The root of all errors of commute."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with `args` alone and lose the keyword-only attributes.
        return _rebuild, (type(self), self.args, self.__dict__)


class JoinError(CommuteError):
    """This process could not become a member of the world.

    Attributes:
        roster: who had joined and who had not, as text; empty when nobody knows.
    """

    def __init__(self, message: str, *, roster: str = "") -> None:
        super().__init__(message)
        self.roster = roster


class AuthenticationError(CommuteError):
    """The two ends of a connection do not share a token, or a token is unusable."""


class MismatchError(CommuteError):
    """The ranks called different operations, or the same one with different arrays."""


class PeerLostError(CommuteError):
    """Another rank is gone: its process died, its link broke, or it fell silent.

    Without a message one is made from the attributes.

    Attributes:
        rank, host, pid: who is gone; host is "" and pid 0 where not known.
        last_operation: what this rank was doing when it noticed; "" for nothing.
        cause: how the loss was noticed.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int,
        host: str = "",
        pid: int = 0,
        last_operation: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(message or _lost(rank, host, pid, last_operation, cause))
        self.rank = rank
        self.host = host
        self.pid = pid
        self.last_operation = last_operation
        self.cause = cause


def _lost(rank: int, host: str, pid: int, last_operation: str, cause: str) -> str:
    where = ", ".join([f"pid {pid}"] * bool(pid) + [f"host {host}"] * bool(host))
    during = f" during {last_operation}" if last_operation else ""
    because = f": {cause}" if cause else ""
    return f"rank {rank}{f' ({where})' if where else ''} was lost{during}{because}"


class OperationTimeoutError(CommuteError, TimeoutError):
    """The deadline of an operation passed; the message names what is missing."""


class AbandonedError(CommuteError):
    """Another rank gave up the operation this rank waits in.

    Attributes:
        rank: who gave up.
        operation: what was given up.
        cause: why, in the words of the rank that gave up.
    """

    def __init__(
        self, message: str = "", *, rank: int, operation: str = "", cause: str = ""
    ) -> None:
        because = f": {cause}" if cause else ""
        super().__init__(message or f"rank {rank} gave up {operation or 'an operation'}{because}")
        self.rank = rank
        self.operation = operation
        self.cause = cause


class ClosedError(CommuteError):
    """The group, or what belongs to it, was closed before this call."""


class ForkedError(CommuteError):
    """The group was made before a fork and is used in the child process."""


class ArrayError(CommuteError, ValueError, TypeError):
    """An array of the wrong kind, shape, dtype or length, or with contents that are refused."""


class SettingError(CommuteError, ValueError):
    """A setting that cannot be: an unknown update, a number out of range."""


class DataError(CommuteError, ValueError):
    """Data to learn from that cannot be read, with the lines that say why."""


class UnknownTableError(CommuteError, LookupError):
    """The store has no table of this name."""


class CheckpointError(CommuteError):
    """A saved store that cannot be written, or that is missing, damaged, foreign or of others."""


class SlotLostError(CommuteError):
    """A server is gone, and with it the slots it held; nothing is made up in their place."""
