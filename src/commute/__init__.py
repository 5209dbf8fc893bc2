# SPDX-License-Identifier: Apache-2.0
"""commute keeps the parameters of distributed training in step.

The map, from what you call to what moves bytes:

    _init      commute.init(): which job is this process part of, and joining it
    group/     Group: ranks and collectives; groups of groups; arrays that all ranks reach
    store/     Store: tables, push, pull, clocks; servers
    plan/      algorithms as data, proved before they run (pure)
    cluster/   launching, joining, the coordinator
    watch/     what happened: the recorder
    _core      the compiled core: links, executor, kernels, health (C++, in core/)
    learn/     sparse linear models from text files; `commute.learn` is imported when it is used
    cli/       the `commute` command
    testing    groups whose ranks are threads, for tests
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from commute import learn as learn
    from commute._errors import (
        AbandonedError,
        ArrayError,
        AuthenticationError,
        CheckpointError,
        ClosedError,
        CommuteError,
        DataError,
        ForkedError,
        JoinError,
        MismatchError,
        OperationTimeoutError,
        PeerLostError,
        SettingError,
        SlotLostError,
        UnknownTableError,
    )
    from commute._handle import Handle
    from commute._init import init
    from commute._version import __version__
    from commute.group import Group
    from commute.store.connection import Connection, connect
    from commute.store.dense import DenseTable
    from commute.store.initial import Normal, Uniform
    from commute.store.sparse import SparseTable
    from commute.store.store import Store
    from commute.store.table import TableInfo
    from commute.store.updates import FTRL, SGD, Adagrad, Adam, Momentum, Semiring

__all__ = [
    "FTRL",
    "SGD",
    "AbandonedError",
    "Adagrad",
    "Adam",
    "ArrayError",
    "AuthenticationError",
    "CheckpointError",
    "ClosedError",
    "CommuteError",
    "Connection",
    "DataError",
    "DenseTable",
    "ForkedError",
    "Group",
    "Handle",
    "JoinError",
    "MismatchError",
    "Momentum",
    "Normal",
    "OperationTimeoutError",
    "PeerLostError",
    "Semiring",
    "SettingError",
    "SlotLostError",
    "SparseTable",
    "Store",
    "TableInfo",
    "Uniform",
    "UnknownTableError",
    "__version__",
    "connect",
    "init",
]

# Where these names are, the quickest to import first.
_HOMES = (
    *("_version", "_errors", "_handle", "_init", "group"),
    *("store.updates", "store.initial", "store.table", "store.dense", "store.sparse"),
    *("store.store", "store.connection"),
)


def __getattr__(name: str) -> object:
    """Names are imported at their first use: the command needs few of them, and no NumPy."""
    if name == "learn":
        return importlib.import_module("commute.learn")
    for home in _HOMES if name in __all__ else ():
        found = vars(importlib.import_module(f"commute.{home}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module 'commute' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
