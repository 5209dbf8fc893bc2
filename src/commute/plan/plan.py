# SPDX-License-Identifier: Apache-2.0
"""A plan: one collective, for one number of ranks, as a program for each rank.

A plan knows no pointer, no length and no dtype: it works on chunks. It is immutable, the arrays
included, because it is shared by all calls; ranks compare its hash before they run it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .instructions import INSTRUCTION, NO_LANE, Collective, Flag, Op, Program, Space


class PlanError(ValueError):
    """A plan that must not be executed; the message names rank, lane, step and instruction."""


def user_blocks(collective: Collective, ranks: int) -> tuple[int, int]:
    """How many blocks the user's arrays have: those of IN, and those of OUT.

    allreduce, broadcast and barrier work in place in OUT; see `arrays_of` for who has what.
    """
    if collective in (Collective.ALLGATHER, Collective.GATHER):
        return 1, ranks
    if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        return ranks, 1
    if collective is Collective.ALLTOALL:
        return ranks, ranks
    return (1, 1) if collective is Collective.REDUCE else (0, 1)


def arrays_of(collective: Collective, is_root: bool) -> tuple[bool, bool]:
    """Whether a rank has IN, and whether it has OUT.

    reduce has OUT on the root, its own contribution already there, and IN on all others. Only the
    root of a gather has OUT, and only that of a scatter IN.
    """
    if collective is Collective.REDUCE:
        return not is_root, is_root
    return (
        collective is not Collective.SCATTER or is_root,
        collective is not Collective.GATHER or is_root,
    )


@dataclass(frozen=True, eq=False)
class Plan:
    collective: Collective
    algorithm: str
    ranks: int
    root: int
    chunks: int
    blocks: tuple[int, int, int, int]  # of IN, OUT, SCRATCH, OUTBOX
    programs: tuple[Program, ...]  # one per rank
    waves: int = 1
    direct: bool = False  # OUTBOX is OUT itself: for arrays that all ranks reach

    def __post_init__(self) -> None:
        for program in self.programs:
            program.flags.writeable = False

    def __repr__(self) -> str:
        return f"<Plan {self.collective.label} by {self.algorithm}, {self.ranks} ranks>"

    @cached_property
    def hash(self) -> int:
        """64 bits over everything that is executed; equal on two ranks only for equal plans."""
        import hashlib  # it loads OpenSSL, which `import commute` need not wait for

        digest = hashlib.blake2b(digest_size=8)
        name = self.algorithm.encode()
        what = (self.collective, self.ranks, self.root, self.chunks, *self.blocks)
        header = (*what, self.waves, self.direct)
        digest.update(struct.pack("<11q", *header, len(name)) + name)
        for program in self.programs:
            digest.update(struct.pack("<q", len(program)) + program.tobytes())
        return int.from_bytes(digest.digest(), "little")

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks with which this rank exchanges messages, in order."""
        program = self.programs[rank]
        received = program["peer"][np.isin(program["op"], _WITH_PEER)]
        passed_on = program["peer2"][program["op"] == Op.RECV_REDUCE_SEND]
        return tuple(sorted({*received.tolist(), *passed_on.tolist()}))

    def links(self) -> dict[tuple[int, int], int]:
        """Chunks sent in each direction (from, to) per tile; `chunks` of them are a block."""
        carried: dict[tuple[int, int], int] = {}
        for rank, program in enumerate(self.programs):
            for op, peer in ((Op.SEND, "peer"), (Op.RECV_REDUCE_SEND, "peer2")):
                sends = program[program["op"] == op]
                chunks = np.bincount(sends[peer], weights=sends["count"], minlength=self.ranks)
                for to in np.flatnonzero(chunks).tolist():
                    carried[rank, to] = carried.get((rank, to), 0) + int(chunks[to])
        return carried


_WITH_PEER = (Op.SEND, Op.RECV, Op.RECV_REDUCE, Op.RECV_REDUCE_SEND)


def pipelined(plan: Plan, waves: int) -> Plan:
    """The same plan with the tile cut into `waves` parts that are in flight together.

    Each instruction becomes `waves` consecutive ones, so that while one part is being reduced the
    next one is on the wire. Chunk c of wave w becomes chunk w * chunks + c of its block. A plan
    that hands SCRATCH on to the next tile chunk by chunk may not bear it; the verifier says so.

    Raises:
        ValueError: a message of several blocks cannot be cut, as its parts would not lie together.
    """
    if waves == 1:
        return plan
    if any((program["count"] > plan.chunks).any() for program in plan.programs):
        raise ValueError(f"{plan!r} sends several blocks as one message and has no waves")
    return replace(
        plan,
        chunks=plan.chunks * waves,
        waves=plan.waves * waves,
        programs=tuple(_lowered(program, plan.chunks, waves) for program in plan.programs),
    )


def _lowered(program: Program, chunks: int, waves: int) -> Program:
    lowered = np.repeat(program, waves)
    wave = np.tile(np.arange(waves, dtype=np.int64), len(program))

    def move(field: str, where: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        block, chunk = np.divmod(lowered[field].astype(np.int64), chunks)
        moved = (block * waves + wave) * chunks + chunk
        lowered[field] = np.where(where, moved, lowered[field])

    move("src", lowered["src_space"] != Space.NONE)
    move("dst", lowered["dst_space"] != Space.NONE)
    keeps = (lowered["op"] == Op.PUT) & (lowered["flags"] & Flag.KEEP != 0)
    move("arg", keeps | (lowered["op"] == Op.REDUCE_MANY))
    # Every signal is given once per wave too, and a wave waits for its own.
    waits = (lowered["op"] == Op.WAIT) & (lowered["src"] > 0)
    signals = (lowered["src"].astype(np.int64) - 1) * waves + wave + 1
    lowered["src"] = np.where(waits, signals, lowered["src"])
    steps = lowered["dep_step"].astype(np.int64) * waves + wave
    lowered["dep_step"] = np.where(lowered["dep_lane"] != NO_LANE, steps, 0)
    assert lowered.dtype == INSTRUCTION
    return lowered
