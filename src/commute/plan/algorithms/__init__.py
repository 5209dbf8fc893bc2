# SPDX-License-Identifier: Apache-2.0
"""All algorithms by name. Each is one page, and says in its first lines how it works."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..instructions import Collective
from ..plan import Plan
from .allgather import allgather
from .barrier import barrier
from .bidirectional_ring import bidirectional_ring
from .binomial_gather import binomial_gather, binomial_scatter
from .broadcast import broadcast
from .bruck import bruck
from .chain import chain
from .circulant import circulant
from .circulant_allgather import circulant_allgather
from .circulant_reduce_scatter import circulant_reduce_scatter
from .double_tree import double_tree
from .double_tree_broadcast import double_tree_broadcast
from .gather_to_root import gather_to_root
from .halving_doubling import halving_doubling
from .line import line_allreduce, line_barrier, line_broadcast
from .linear import linear_gather, linear_scatter
from .meeting_ring import meeting_ring
from .one_shot import one_shot
from .pairwise import pairwise
from .recursive_doubling import recursive_doubling
from .reduce import reduce
from .reduce_scatter import reduce_scatter
from .ring import ring
from .scatter_allgather import scatter_allgather
from .shared import (
    shared_allgather,
    shared_alltoall,
    shared_barrier,
    shared_broadcast,
    shared_gather,
    shared_reduce,
    shared_reduce_scatter,
    shared_scatter,
)
from .token_ring import token_ring
from .tree import tree
from .two_shot import two_shot

_ROOTLESS: dict[Collective, dict[str, Callable[[int], Plan]]] = {
    Collective.BARRIER: {
        "dissemination": barrier,
        "token-ring": token_ring,
        "shared": shared_barrier,
        "line": line_barrier,
    },
    Collective.ALLREDUCE: {
        "ring": ring,
        "tree": tree,
        "halving-doubling": halving_doubling,
        "gather-to-root": gather_to_root,
        "bidirectional-ring": bidirectional_ring,
        "bidirectional-ring-meeting": meeting_ring,
        "double-tree": double_tree,
        "recursive-doubling": recursive_doubling,
        "circulant": circulant,
        "one-shot": one_shot,
        "two-shot": two_shot,
        "line": line_allreduce,
    },
    Collective.ALLGATHER: {
        "ring": allgather,
        "circulant": circulant_allgather,
        "shared": shared_allgather,
    },
    Collective.REDUCE_SCATTER: {
        "ring": reduce_scatter,
        "circulant": circulant_reduce_scatter,
        "shared": shared_reduce_scatter,
    },
    Collective.ALLTOALL: {"pairwise": pairwise, "bruck": bruck, "shared": shared_alltoall},
}
_ROOTED: dict[Collective, dict[str, Callable[[int, int], Plan]]] = {
    Collective.BROADCAST: {
        "binomial": broadcast,
        "scatter-allgather": scatter_allgather,
        "chain": chain,
        "double-tree": double_tree_broadcast,
        "shared": shared_broadcast,
        "line": line_broadcast,
    },
    Collective.REDUCE: {"binomial": reduce, "shared": shared_reduce},
    Collective.GATHER: {
        "linear": linear_gather,
        "binomial": binomial_gather,
        "shared": shared_gather,
    },
    Collective.SCATTER: {
        "linear": linear_scatter,
        "binomial": binomial_scatter,
        "shared": shared_scatter,
    },
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
