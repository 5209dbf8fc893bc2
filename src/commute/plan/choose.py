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

# Thresholds between algorithms over links, measured by `python -m benchmarks.thresholds` on a host
# of 2 cores: "loopback" with 2 to 16 ranks, "tcp" with 2 to 16 hosts (namespaces) at 1 Gbit/s.
#
# Up to so many bytes an allreduce is a matter of messages. On one host all of them cost the same
# cores, and the two steps through one rank have the fewest: 1 KB between 8 ranks took 263 us
# against the 287 of recursive doubling, 64 KB between 16 took 1.18 ms against the 1.46 of halving
# and doubling. Between 2 ranks recursive doubling has one step only: 1 KB took 22 us against 26.
SMALL_BYTES = 64 << 10
# On a wire one rank's link is soon full, and bytes count earlier: up to so many in all and for each
# rank the few steps of recursive doubling are the quickest. 8 KB between 4 hosts took 124 us, 186
# through one rank, 191 by halving and doubling; 16 KB took more than 250, 402 and 194.
TINY_BYTES = 16 << 10
TINY_BLOCK_BYTES = 2 << 10
# On a wire the ring's waves hide its steps, if these are long enough: with blocks of 8 KB an
# allgather between 8 hosts took 0.59 ms on the circulant graph against the ring's 1.13, with 32 KB
# 1.87 against 1.91, with 128 KB 12.6 against 7.9; between 4 hosts both took 1.32 with 64 KB.
RING_STEP_BYTES = 64 << 10
# Where bytes count a chain, in parts, is the quickest of all broadcasts and reductions on a wire:
# 1 MB between 8 hosts took 10 ms, 15 by double trees, 22 by scatter and allgather, 27 by a binomial
# tree. More ranks than these were not measured; there two trees are filled sooner than a chain.
CHAIN_RANKS = 16
# A reduction goes along it from 64 KB on, and with as much as this for each rank: between 16 hosts
# 64 KB took 1.8 ms against the 5.4 of a binomial tree, between 4 0.65 against 2.4, 32 KB 0.33
# against 0.19.
CHAIN_STEP_BYTES = 4 << 10
# With many ranks, the p-1 messages at the root of a scatter, or of an all-to-all, cost more than it
# costs to carry blocks of so many bytes log2 p times: an alltoall took 0.49 ms against 0.58 with
# 8 KB of 8 ranks, 1.2 against 1.5 with 4 KB of 16; a scatter of these 0.74 against 0.83. With 16 KB
# neither was quicker. Those of a gather do not: 4 KB of 16 ranks took 0.37 ms against 0.54.
MANY_RANKS = 8
SHORT_BLOCK_BYTES = 8 << 10
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
# A gather, of which only the root reads, lies between: 16 MB took 0.94 ms against 1.01 (AMD EPYC).
ROOTS_TILE_BYTES = {2: 512 << 10}
# Of a direct plan a tile only bounds how long a rank works without looking up.
DIRECT_TILE_BYTES = 64 << 20
# From here on blocks are fetched where that can be: a system call for each costs more than copying
# a little twice. An alltoall of 64 KB took 79 us against 69 between 4 ranks, 256 KB 132 against 143
# and 34 against 42 between 2, 1 MB 114 against 150.
FETCHED_BYTES = 128 << 10
_BYTES_MAX = (1 << 63) - 1
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
        if plan.collective is Collective.GATHER:
            tile = ROOTS_TILE_BYTES.get(plan.ranks, tile)
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
        return _ring_or_circulant(nbytes, place)
    if collective is Collective.REDUCE_SCATTER:
        return _ring_or_circulant(block, place)
    if collective is Collective.REDUCE:
        return _quickest_reduce(ranks, nbytes, place)
    carried = ranks >= MANY_RANKS and block <= SHORT_BLOCK_BYTES
    if collective is Collective.ALLTOALL:
        return "bruck" if carried else "pairwise"
    if collective is Collective.SCATTER:
        return "binomial" if carried else "linear"
    return names[0]


def _quickest_allreduce(ranks: int, nbytes: int, place: str) -> str:
    if ranks == 2 and nbytes <= SMALL_BYTES:
        return "recursive-doubling"
    if place == "loopback" and nbytes <= SMALL_BYTES:
        return "gather-to-root"
    if nbytes <= min(TINY_BYTES, ranks * TINY_BLOCK_BYTES):
        return "recursive-doubling"
    if place == "tcp" and nbytes >= ranks * RING_STEP_BYTES:
        return "ring"
    # On a host that its ranks outnumber, each step is a change of process, and halving and doubling
    # has fewer: 64 MB between 4 ranks on 2 cores took 53 ms against the ring's 100. Where ranks are
    # no power of two it moves more bytes than the ring, which the circulant graph does not.
    return "halving-doubling" if ranks.bit_count() == 1 else "circulant"


def _quickest_broadcast(ranks: int, nbytes: int, place: str) -> str:
    # On one host a byte costs the same whoever copies it, and a binomial tree copies the fewest.
    if nbytes <= SMALL_BYTES or ranks == 2 or place == "loopback":
        return "binomial"
    return "chain" if ranks <= CHAIN_RANKS else "double-tree"


def _quickest_reduce(ranks: int, nbytes: int, place: str) -> str:
    worth_filling = nbytes >= max(SMALL_BYTES, ranks * CHAIN_STEP_BYTES)
    return "chain" if place == "tcp" and ranks > 2 and worth_filling else "binomial"


def _ring_or_circulant(block: int, place: str) -> str:
    """Both move as few bytes as can be; the ring in more steps, each to the same neighbour."""
    return "ring" if place == "tcp" and block >= RING_STEP_BYTES else "circulant"


def _quickest_shared(collective: Collective, nbytes: int, names: tuple[str, ...]) -> str:
    small = nbytes <= LINE_BYTES
    if FETCH in names and nbytes >= FETCHED_BYTES:
        return FETCH
    if collective is Collective.ALLREDUCE:
        return "line" if small else "two-shot"
    has_kernel = collective in (Collective.BROADCAST, Collective.BARRIER)
    return "line" if small and has_kernel else "shared"


def shared_bounds(collective: Collective, fetches: bool) -> list[int]:
    """Up to how many bytes `choose` has the same answer in shared memory; the last is no bound."""
    names = candidates(collective, "memory", fetches)
    lines, fetched = LINE_BYTES, FETCHED_BYTES - 1
    bounds = [lines] * ("line" in names) + [fetched] * (FETCH in names)
    return [*bounds, _BYTES_MAX]


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
