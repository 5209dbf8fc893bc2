# SPDX-License-Identifier: Apache-2.0
"""Which algorithm: the one place where it is chosen, by size and by place.

The place is what the ranks of a group have between them: "tcp" (a network), "loopback" (all on one
host, but links that carry messages) or "memory" (all on one host, and able to read each other's
outboxes).

All ranks choose alike, because the choice depends on nothing that only one of them knows.
"""

from __future__ import annotations

from functools import lru_cache

from .algorithms import algorithms, build
from .instructions import Collective, Space
from .plan import Plan

PLACES = ("tcp", "loopback", "memory")

# Up to so many bytes and ranks the two steps through one rank are the quickest; beyond, that rank
# is a bottleneck, and 2 log2 n steps between pairs are better. With 4 ranks on loopback 1 KB takes
# 59 us through one rank and 82 by halving and doubling, 64 KB takes 133 and 121.
TINY_BYTES = 16 << 10
FEW_RANKS = 4
# Below this an allreduce is a matter of steps, above it of bytes.
SMALL_BYTES = 64 << 10
# A message is one chunk; this size keeps a link busy while its neighbour chunk is being reduced.
CHUNK_BYTES = 256 << 10
# One slot of an outbox, and how much of it a tile fills. The tiles of all ranks together should
# stay in the L2 caches: of 32 KB to 1 MB, 256 KB was best between 2 ranks, 128 KB between 4.
SLOT_BYTES = 2 << 20
TILE_BYTES = {2: 256 << 10}
TILE_BYTES_MANY = 128 << 10
# Between 2 ranks an allgather, which stores past the caches, is best when its tiles leave the L2
# cache too: a peer reads them quicker from the L3 cache. 16 MB took 1.30 ms against 1.44.
GATHERED_TILE_BYTES = {2: 2 << 20}
# What fits the lines of the kernels (core/outbox.h); up to there they are the quickest.
LINE_BYTES = 16 << 10


def tile_bytes(plan: Plan) -> int:
    """How much of each block one tile covers."""
    blocks = plan.blocks[Space.OUTBOX]
    if blocks:
        tile = TILE_BYTES.get(plan.ranks, TILE_BYTES_MANY)
        if plan.collective is Collective.ALLGATHER:
            tile = GATHERED_TILE_BYTES.get(plan.ranks, tile)
        return min(SLOT_BYTES // blocks, tile)
    return plan.chunks * CHUNK_BYTES


@lru_cache(maxsize=64)  # asked on every call
def candidates(collective: Collective | str, place: str) -> tuple[str, ...]:
    """The algorithms that work between ranks at this place."""
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    names = algorithms(collective)
    if place == "memory":
        return names
    return tuple(name for name in names if not _needs_memory(collective, name))


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
) -> str:
    """The name of the algorithm to run.

    Args:
        nbytes: bytes of the array, or of one block where it has one per rank.
        deterministic: only plans that are proved to add up in rank order.
        halves: elements are of 16 bits, and are rounded whenever a sum is stored.
        algorithm: the one that the user asks for; it is returned if it can be had.

    Raises:
        ValueError: there is no such algorithm, or not here, or it is not deterministic.
    """
    found = Collective.named(collective)
    names = candidates(found, place)
    if algorithm is not None:
        return _forced(found, ranks, nbytes, names, algorithm, deterministic, root)
    # In shared memory all plans add up in rank order, but store a sum once, where messages store it
    # hop by hop: halves would get other bits than in another place.
    if not deterministic or (place == "memory" and not halves):
        return _quickest(found, ranks, nbytes, place, names)
    # These two first: they store sums hop by hop in any place, and every reduction has one.
    preferred = ("gather-to-root", "chain") if nbytes <= SMALL_BYTES else ("chain",)
    ordered = [name for name in preferred if name in names] + list(names)
    return next(name for name in ordered if in_rank_order(found, name, ranks, root))


def _quickest(
    collective: Collective, ranks: int, nbytes: int, place: str, names: tuple[str, ...]
) -> str:
    if place == "memory":
        return _quickest_shared(collective, nbytes)
    if collective is not Collective.ALLREDUCE:
        return names[0]
    if nbytes <= TINY_BYTES and ranks <= FEW_RANKS:
        return "gather-to-root"
    # On a host that its ranks outnumber, each step is a change of process, and halving and doubling
    # has fewer: 64 MB between 4 ranks on 2 cores took 53 ms against the ring's 100. Where ranks are
    # no power of two it moves more bytes than the ring; on a wire the ring's waves hide the steps.
    even = place == "loopback" and ranks.bit_count() == 1
    return "halving-doubling" if nbytes <= SMALL_BYTES or even else "ring"


def _quickest_shared(collective: Collective, nbytes: int) -> str:
    small = nbytes <= LINE_BYTES
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
        problem = "needs shared memory between all ranks" if elsewhere else "is not known"
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
