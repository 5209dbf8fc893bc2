# SPDX-License-Identifier: Apache-2.0
"""All algorithms by name. Each is one page, and says in its first lines how it works.

A page is read when its first plan is built: of some thirty a job needs few.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from ..instructions import Collective
from ..plan import Plan

# Where a plan is written: page.function, of the number of ranks, and of the root if it has one.
_PAGES: dict[Collective, dict[str, str]] = {
    Collective.BARRIER: {
        "dissemination": "barrier.barrier",
        "token-ring": "token_ring.token_ring",
        "shared": "shared.shared_barrier",
        "line": "line.line_barrier",
    },
    Collective.ALLREDUCE: {
        "ring": "ring.ring",
        "tree": "tree.tree",
        "halving-doubling": "halving_doubling.halving_doubling",
        "gather-to-root": "gather_to_root.gather_to_root",
        "bidirectional-ring": "bidirectional_ring.bidirectional_ring",
        "bidirectional-ring-meeting": "meeting_ring.meeting_ring",
        "double-tree": "double_tree.double_tree",
        "recursive-doubling": "recursive_doubling.recursive_doubling",
        "circulant": "circulant.circulant",
        "chain": "reduction_chain.chain_allreduce",
        "one-shot": "one_shot.one_shot",
        "two-shot": "two_shot.two_shot",
        "line": "line.line_allreduce",
        "direct": "direct.direct_allreduce",
    },
    Collective.ALLGATHER: {
        "ring": "allgather.allgather",
        "circulant": "circulant_allgather.circulant_allgather",
        "shared": "shared.shared_allgather",
    },
    Collective.REDUCE_SCATTER: {
        "ring": "reduce_scatter.reduce_scatter",
        "circulant": "circulant_reduce_scatter.circulant_reduce_scatter",
        "chain": "reduction_chain.chain_reduce_scatter",
        "shared": "shared.shared_reduce_scatter",
    },
    Collective.ALLTOALL: {
        "pairwise": "pairwise.pairwise",
        "bruck": "bruck.bruck",
        "shared": "shared.shared_alltoall",
        "fetch": "fetch.fetched_alltoall",
    },
    Collective.BROADCAST: {
        "binomial": "broadcast.broadcast",
        "scatter-allgather": "scatter_allgather.scatter_allgather",
        "chain": "chain.chain",
        "double-tree": "double_tree_broadcast.double_tree_broadcast",
        "shared": "shared.shared_broadcast",
        "line": "line.line_broadcast",
        "direct": "direct.direct_broadcast",
    },
    Collective.REDUCE: {
        "binomial": "reduce.reduce",
        "chain": "reduction_chain.chain_reduce",
        "shared": "shared.shared_reduce",
    },
    Collective.GATHER: {
        "linear": "linear.linear_gather",
        "binomial": "binomial_gather.binomial_gather",
        "shared": "shared.shared_gather",
    },
    Collective.SCATTER: {
        "linear": "linear.linear_scatter",
        "binomial": "binomial_gather.binomial_scatter",
        "shared": "shared.shared_scatter",
        "fetch": "fetch.fetched_scatter",
    },
}


def algorithms(collective: Collective | str) -> tuple[str, ...]:
    """The names of the algorithms that can do this collective."""
    return tuple(_PAGES[Collective.named(collective)])


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
    if root and not found.rooted:
        raise ValueError(f"{found.label} has no root, got root {root}; leave it out")
    page, function = _PAGES[found][algorithm].split(".")
    written: Any = getattr(import_module(f".{page}", __name__), function)
    plan: Plan = written(ranks, root) if found.rooted else written(ranks)
    return plan


__all__ = ["algorithms", "build"]
