# SPDX-License-Identifier: Apache-2.0
"""All algorithms by name. Each is one page, and says in its first lines how it works."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..instructions import Collective
from ..plan import Plan
from .allgather import allgather
from .barrier import barrier
from .broadcast import broadcast
from .chain import chain_allreduce, chain_reduce, chain_reduce_scatter
from .gather_to_root import gather_to_root
from .halving_doubling import halving_doubling
from .line import line_allreduce, line_barrier, line_broadcast
from .one_shot import one_shot
from .reduce import reduce
from .reduce_scatter import reduce_scatter
from .ring import ring
from .shared import (
    shared_allgather,
    shared_barrier,
    shared_broadcast,
    shared_reduce,
    shared_reduce_scatter,
)
from .tree import tree
from .two_shot import two_shot

_ROOTLESS: dict[Collective, dict[str, Callable[[int], Plan]]] = {
    Collective.BARRIER: {"dissemination": barrier, "shared": shared_barrier, "line": line_barrier},
    Collective.ALLREDUCE: {
        "ring": ring,
        "tree": tree,
        "halving-doubling": halving_doubling,
        "gather-to-root": gather_to_root,
        "chain": chain_allreduce,
        "one-shot": one_shot,
        "two-shot": two_shot,
        "line": line_allreduce,
    },
    Collective.ALLGATHER: {"ring": allgather, "shared": shared_allgather},
    Collective.REDUCE_SCATTER: {
        "ring": reduce_scatter,
        "chain": chain_reduce_scatter,
        "shared": shared_reduce_scatter,
    },
}
_ROOTED: dict[Collective, dict[str, Callable[[int, int], Plan]]] = {
    Collective.BROADCAST: {
        "binomial": broadcast,
        "shared": shared_broadcast,
        "line": line_broadcast,
    },
    Collective.REDUCE: {"binomial": reduce, "chain": chain_reduce, "shared": shared_reduce},
}


def algorithms(collective: Collective | str) -> tuple[str, ...]:
    """The names of the algorithms that can do this collective."""
    found = Collective.named(collective)
    return tuple(_ROOTED[found] if found.rooted else _ROOTLESS[found])


# A job uses few plans; the bound only keeps a program that walks through all roots from growing.
@lru_cache(maxsize=64)
def build(collective: Collective | str, algorithm: str, ranks: int, root: int = 0) -> Plan:
    """The plan, as it is executed. The same object for the same arguments."""
    found = Collective.named(collective)
    if algorithm not in algorithms(found):
        known = ", ".join(algorithms(found))
        raise ValueError(f"{found.label} has no algorithm {algorithm!r}; known are {known}")
    if ranks < 1:
        raise ValueError(f"a plan needs at least 1 rank, got {ranks}")
    if not 0 <= root < ranks:
        raise ValueError(f"root must be a rank from 0 to {ranks - 1}, got {root}")
    if found.rooted:
        return _ROOTED[found][algorithm](ranks, root)
    if root:
        raise ValueError(f"{found.label} has no root, got root {root}; leave it out")
    return _ROOTLESS[found][algorithm](ranks)


__all__ = ["algorithms", "build"]
