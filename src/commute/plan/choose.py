# SPDX-License-Identifier: Apache-2.0
"""Which algorithm: the one place where it is chosen, by size and by place.

The place is what the ranks of a group have between them: "tcp" (a network), "loopback" (all on one
host, but links that carry messages), "memory" (all on one host, and able to read each other's
outboxes) or "arrays" (that, and the arrays of the call are of `world.empty`, so that all reach all
of them).

`fetches` says of the last two that ranks can read each other's memory, wherever it is.

All ranks choose alike, because the choice depends on nothing that only one of them knows.
"""

from __future__ import annotations

from functools import lru_cache

from .algorithms import algorithms, build
from .instructions import Collective, Space
from .plan import Plan

PLACES = ("tcp", "loopback", "memory", "arrays")

DIRECT, FETCH = "direct", "fetch"

# Thresholds between algorithms over links. Those without a figure follow from their costs, with p
# ranks, n bytes, a latency a per message and b seconds per byte, where a/b is some 16 KB: 20 us at
# 1 GB/s, or 100 us at 1 Gbit/s.
#
# Up to so many bytes and ranks the two steps through one rank are the quickest; beyond, that rank
# is a bottleneck, and steps between pairs are better. With 4 ranks on loopback 1 KB takes 59 us
# through one rank and 82 by halving and doubling, 64 KB takes 133 and 121. With more ranks, so few
# bytes are best exchanged whole in log2 p steps: halving takes twice as many, and saves less than
# n log2 p of bytes.
TINY_BYTES = 16 << 10
FEW_RANKS = 4
# Below this an allreduce is a matter of steps, above it of bytes.
SMALL_BYTES = 64 << 10
# A ring sends n/p in each of its 2(p-1) steps: a step must carry as much as its latency costs.
RING_STEP_BYTES = 16 << 10
# A broadcast of so many bytes goes in parts along a chain, in little more than n b, if p parts are
# few against all; with more ranks two trees are filled sooner than a chain.
LONG_BYTES = 2 << 20
MANY_RANKS = 8
# With many ranks, the n-1 messages at the root, or of an all-to-all, cost more than it costs to
# carry blocks of so many bytes log2 p times, copying them.
TREE_BLOCK_BYTES = 4 << 10
BRUCK_BLOCK_BYTES = 1 << 10
# A message is one chunk; this size keeps a link busy while its neighbour chunk is being reduced.
CHUNK_BYTES = 256 << 10
# SCRATCH of a plan is at most so large; plans with many blocks of it have smaller tiles.
SCRATCH_BYTES = 16 << 20
# One slot of an outbox, and how much of it a tile fills. The tiles of all ranks together should
# stay in the L2 caches: of 32 KB to 1 MB, 256 KB was best between 2 ranks, 128 KB between 4.
SLOT_BYTES = 2 << 20
TILE_BYTES = {2: 256 << 10}
TILE_BYTES_MANY = 128 << 10
# Between 2 ranks an allgather, which stores past the caches, is best when its tiles leave the L2
# cache too: a peer reads them quicker from the L3 cache. 16 MB took 1.30 ms against 1.44.
GATHERED_TILE_BYTES = {2: 2 << 20}
# So is an alltoall, which has a block for each rank in a slot, whatever their number: 16 MB took
# 2.26 ms against 2.47 between 2 ranks, 6.3 against 6.8 between 4.
# Of a direct plan a tile only bounds how long a rank works without looking up.
DIRECT_TILE_BYTES = 64 << 20
# From here on blocks are fetched where that can be: a system call for each costs more than copying
# a little twice.
FETCHED_BYTES = 128 << 10
# What fits the lines of the kernels (core/outbox.h); up to there they are the quickest.
LINE_BYTES = 16 << 10


def tile_bytes(plan: Plan) -> int:
    """How much of each block one tile covers."""
    if plan.direct:
        return DIRECT_TILE_BYTES
    blocks = plan.blocks[Space.OUTBOX]
    if blocks:
        tile = TILE_BYTES.get(plan.ranks, TILE_BYTES_MANY)
        if plan.collective is Collective.ALLGATHER:
            tile = GATHERED_TILE_BYTES.get(plan.ranks, tile)
        if plan.collective is Collective.ALLTOALL:
            tile = SLOT_BYTES
        return min(SLOT_BYTES // blocks, tile)
    return min(plan.chunks * CHUNK_BYTES, SCRATCH_BYTES // max(1, plan.blocks[Space.SCRATCH]))


@lru_cache(maxsize=64)  # asked on every call
def candidates(collective: Collective | str, place: str, fetches: bool = False) -> tuple[str, ...]:
    """The algorithms that work between ranks at this place."""
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    names = algorithms(collective)
    if place not in ("memory", "arrays"):
        return tuple(name for name in names if not _needs_memory(collective, name))
    lacking = {*(() if place == "arrays" else (DIRECT,)), *(() if fetches else (FETCH,))}
    return tuple(name for name in names if name not in lacking)


@lru_cache(maxsize=64)
def _needs_memory(collective: Collective | str, algorithm: str) -> bool:
    # The blocks of a plan do not depend on how many ranks it is for.
    return build(collective, algorithm, 2).blocks[Space.OUTBOX] > 0


@lru_cache(maxsize=256)
def in_rank_order(collective: Collective | str, algorithm: str, ranks: int, root: int = 0) -> bool:
    """Whether the verifier proves that this plan adds up in rank order."""
    from .verifier import verify  # the verifier is larger than all the rest, and seldom needed here

    return verify(build(collective, algorithm, ranks, root)).rank_order


def choose(
    collective: Collective | str,
    ranks: int,
    nbytes: int,
    place: str,
    deterministic: bool = False,
    *,
    halves: bool = False,
    algorithm: str | None = None,
    root: int = 0,
    fetches: bool = False,
) -> str:
    """The name of the algorithm to run.

    Args:
        nbytes: bytes of the array that goes in, all of its blocks; of a scatter, of the root's.
        deterministic: only plans that are proved to add up in rank order.
        halves: elements are of 16 bits, and are rounded whenever a sum is stored.
        algorithm: the one that the user asks for; it is returned if it can be had.
        fetches: ranks can read each other's memory, wherever it is.

    Raises:
        ValueError: there is no such algorithm, or not here, or it is not deterministic.
    """
    found = Collective.named(collective)
    names = candidates(found, place, fetches)
    if algorithm is not None:
        return _forced(found, ranks, nbytes, names, algorithm, deterministic, root)
    # In shared memory all plans add up in rank order, but store a sum once, where messages store it
    # hop by hop: halves would get other bits than in another place.
    if not deterministic or (place in ("memory", "arrays") and not halves):
        return _quickest(found, ranks, nbytes, place, names)
    # These two first: they store sums hop by hop in any place, and every reduction has one.
    preferred = ("gather-to-root", "chain") if nbytes <= SMALL_BYTES else ("chain",)
    ordered = [name for name in preferred if name in names] + list(names)
    return next(name for name in ordered if in_rank_order(found, name, ranks, root))


def _quickest(
    collective: Collective, ranks: int, nbytes: int, place: str, names: tuple[str, ...]
) -> str:
    if place == "arrays" and DIRECT in names and nbytes > LINE_BYTES:
        return DIRECT
    if place in ("memory", "arrays"):
        return _quickest_shared(collective, nbytes, names)
    block = nbytes // ranks
    if collective is Collective.ALLREDUCE:
        return _quickest_allreduce(ranks, nbytes, place)
    if collective is Collective.BROADCAST:
        return _quickest_broadcast(ranks, nbytes, place)
    if collective is Collective.ALLGATHER:
        return _ring_or_circulant(ranks, nbytes, place)
    if collective is Collective.REDUCE_SCATTER:
        return _ring_or_circulant(ranks, block, place)
    many = ranks > MANY_RANKS
    if collective is Collective.ALLTOALL:
        return "bruck" if many and block <= BRUCK_BLOCK_BYTES else "pairwise"
    if collective in (Collective.GATHER, Collective.SCATTER):
        block = nbytes if collective is Collective.GATHER else block
        return "binomial" if many and block <= TREE_BLOCK_BYTES else "linear"
    return names[0]


def _quickest_allreduce(ranks: int, nbytes: int, place: str) -> str:
    if nbytes <= TINY_BYTES:
        return "gather-to-root" if ranks <= FEW_RANKS else "recursive-doubling"
    # On a host that its ranks outnumber, each step is a change of process, and halving and doubling
    # has fewer: 64 MB between 4 ranks on 2 cores took 53 ms against the ring's 100. Where ranks are
    # no power of two it moves more bytes than the ring, which the circulant graph does not. On a
    # wire the ring's waves hide the steps, if these are long enough.
    even = ranks.bit_count() == 1
    steps_count = nbytes <= SMALL_BYTES or nbytes < ranks * RING_STEP_BYTES
    if steps_count or place == "loopback":
        return "halving-doubling" if even else "circulant"
    return "ring"


def _quickest_broadcast(ranks: int, nbytes: int, place: str) -> str:
    # On one host a byte costs the same whoever copies it, and a binomial tree copies the fewest.
    if nbytes <= SMALL_BYTES or ranks == 2 or place == "loopback":
        return "binomial"
    if nbytes < LONG_BYTES:
        return "scatter-allgather"
    return "chain" if ranks <= MANY_RANKS else "double-tree"


def _ring_or_circulant(ranks: int, block: int, place: str) -> str:
    """Both move as few bytes as can be; the ring in more steps, each to the same neighbour."""
    fewer_steps = block < RING_STEP_BYTES or place == "loopback"
    return "circulant" if fewer_steps and ranks > 2 else "ring"


def _quickest_shared(collective: Collective, nbytes: int, names: tuple[str, ...]) -> str:
    small = nbytes <= LINE_BYTES
    if FETCH in names and nbytes >= FETCHED_BYTES:
        return FETCH
    if collective is Collective.ALLREDUCE:
        return "line" if small else "two-shot"
    has_kernel = collective in (Collective.BROADCAST, Collective.BARRIER)
    return "line" if small and has_kernel else "shared"


def _forced(
    collective: Collective,
    ranks: int,
    nbytes: int,
    names: tuple[str, ...],
    algorithm: str,
    deterministic: bool,
    root: int,
) -> str:
    if algorithm not in names:
        elsewhere = algorithm in algorithms(collective)
        needs = {
            DIRECT: "arrays of empty()",
            FETCH: "shared memory between all ranks, who may also read each other's processes",
        }.get(algorithm, "shared memory between all ranks")
        problem = f"needs {needs}" if elsewhere else "is not known"
        known = ", ".join(names)
        raise ValueError(f"{collective.label} by {algorithm!r} {problem}; choose from {known}")
    if algorithm == "line" and nbytes > LINE_BYTES:
        raise ValueError(
            f"{collective.label} by 'line' takes arrays of up to {LINE_BYTES} bytes, got {nbytes};"
            " leave algorithm out"
        )
    if deterministic and not in_rank_order(collective, algorithm, ranks, root):
        proved = [name for name in names if in_rank_order(collective, name, ranks, root)]
        raise ValueError(
            f"{collective.label} by {algorithm!r} on {ranks} ranks does not add up in rank order,"
            f" as deterministic asks; choose from {', '.join(proved)}"
        )
    return algorithm
