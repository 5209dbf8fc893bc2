# SPDX-License-Identifier: Apache-2.0
"""The instructions of which plans are made: the bytes that Python writes and C++ executes.

An instruction is 32 bytes, little endian, in this order:

    op u1, lane u1, flags u1, dep_lane u1 (255: none), dep_step u4,
    peer i4 (-1: none), peer2 i4 (-1: none), src_space u1, dst_space u1 (255: none), count u2,
    src u4, dst u4, arg u4

A field that an op does not use holds zero, or none where there is a none. The table `FORMS` says
which op uses which field; the verifier refuses everything else.

How instructions run. A rank's program is sorted by lane. A lane runs its instructions in order,
one at a time, tile after tile; lanes do not wait for each other. The place of an instruction in
its lane is its step. An instruction begins when its lane has reached it and, if it names one, when
step `dep_step` of lane `dep_lane` has ended in the same tile.

    send              src -> peer, one message
    recv              dst = message from peer
    recv_reduce       dst = src (+) message from peer; src and dst may be the same chunks
    recv_reduce_send  the same, and what has been reduced goes on to peer2 while it arrives
                      FIRST (both): dst = message (+) src
    copy              dst = src; from OUTBOX, `peer` says whose (the own rank is allowed)
                      STREAMING: large arrays are stored past the caches
    reduce_many       dst = x0 (+) x1 (+) ..., always in rank order: of this rank its src, of each
                      other rank its outbox at chunk `arg`
                      BACK: stores also where it has read, into the outboxes of all other ranks
    put               own outbox at dst = src
                      KEEP: also OUT at chunk `arg` = src; STREAMING is about that
    signal            own counter `arg` += 1, seen by all ranks that share memory
    wait              until peer's counter (arg & 0xffff) has reached, with lag = arg >> 16,
                      (tile - lag) * (signals of that counter per tile) + src;
                      the own rank is allowed: so a lane waits for another one's earlier tile

Messages from rank a to rank b are matched by order: the k-th one sent in a tile is the k-th one
received. That order is static because each direction a -> b has one lane on either side.

Operands are runs of `count` chunks of a space, see chunk.py. IN is the user's input and is never
written. OUT is the user's output, or the array worked on in place. SCRATCH is private and is
reused by every tile; its blocks lie side by side, so that there, and only there, a run may go on
from one block into the next, and several blocks travel as one message. OUTBOX is a rank's memory
that ranks on the same host can read, and write with BACK; it has `SLOTS` slots, and tile t uses
slot t % SLOTS. Tiles are numbered across calls. Calls may run different plans, so a lag that
reaches into an earlier call is not looked up: there the executor's own rule holds, which refills a
slot only when all ranks have finished the call that filled it, or when that call's plan is proved
to leave the outbox alone once its rank has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

Program = NDArray[np.void]

INSTRUCTION = np.dtype(
    [
        ("op", "u1"),
        ("lane", "u1"),
        ("flags", "u1"),
        ("dep_lane", "u1"),
        ("dep_step", "<u4"),
        ("peer", "<i4"),
        ("peer2", "<i4"),
        ("src_space", "u1"),
        ("dst_space", "u1"),
        ("count", "<u2"),
        ("src", "<u4"),
        ("dst", "<u4"),
        ("arg", "<u4"),
    ]
)

NO_LANE = 255
NO_PEER = -1
SLOTS = 2  # of an outbox
COUNTERS = 7  # of a rank, for plans; the executor has one more of its own


class Op(IntEnum):
    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    RECV_REDUCE_SEND = 3
    COPY = 4
    REDUCE_MANY = 5
    PUT = 6
    SIGNAL = 7
    WAIT = 8


class Space(IntEnum):
    IN = 0
    OUT = 1
    SCRATCH = 2
    OUTBOX = 3
    NONE = 255


class Flag(IntFlag):
    BACK = 1
    KEEP = 2
    STREAMING = 4
    FIRST = 8


class Collective(IntEnum):
    BARRIER = 0
    BROADCAST = 1
    REDUCE = 2
    ALLREDUCE = 3
    ALLGATHER = 4
    REDUCE_SCATTER = 5
    GATHER = 8  # 6 and 7 are the core's send and recv
    SCATTER = 9
    ALLTOALL = 10

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def rooted(self) -> bool:
        return self in _ROOTED

    @classmethod
    def named(cls, name: Collective | str) -> Collective:
        """The collective of this name, for callers that hold either."""
        if isinstance(name, Collective):
            return name
        for member in cls:
            if member.label == name:
                return member
        known = ", ".join(member.label for member in cls)
        raise ValueError(f"collective {name!r} has no plans; known are {known}")


_ROOTED = frozenset(
    (Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER)
)


@dataclass(frozen=True)
class Form:
    """Which fields an op uses, and with which values."""

    src: tuple[Space, ...] = ()
    dst: tuple[Space, ...] = ()
    sends: bool = False
    receives: bool = False
    flags: int = 0


_PRIVATE = (Space.IN, Space.OUT, Space.SCRATCH)
_WRITABLE = (Space.OUT, Space.SCRATCH)

FORMS: dict[Op, Form] = {
    Op.SEND: Form(src=_PRIVATE, sends=True),
    Op.RECV: Form(dst=_WRITABLE, receives=True),
    Op.RECV_REDUCE: Form(src=_PRIVATE, dst=_WRITABLE, receives=True, flags=int(Flag.FIRST)),
    Op.RECV_REDUCE_SEND: Form(
        src=_PRIVATE, dst=_WRITABLE, sends=True, receives=True, flags=int(Flag.FIRST)
    ),
    Op.COPY: Form(src=(*_PRIVATE, Space.OUTBOX), dst=_WRITABLE, flags=int(Flag.STREAMING)),
    Op.REDUCE_MANY: Form(src=_PRIVATE, dst=_WRITABLE, flags=int(Flag.BACK)),
    Op.PUT: Form(src=_PRIVATE, dst=(Space.OUTBOX,), flags=int(Flag.KEEP | Flag.STREAMING)),
    Op.SIGNAL: Form(),
    Op.WAIT: Form(),
}


def describe(instruction: Any) -> str:
    """One instruction in words, as it appears in `show` and in the verifier's errors."""
    if int(instruction["op"]) not in Op._value2member_map_:
        return f"op {int(instruction['op'])}"
    op = Op(int(instruction["op"]))
    peer, peer2 = int(instruction["peer"]), int(instruction["peer2"])
    arg = int(instruction["arg"])
    src = _run(instruction, "src")
    dst = _run(instruction, "dst")
    if op is Op.SEND:
        return f"send {src} -> {peer}"
    if op is Op.RECV:
        return f"recv {dst} <- {peer}"
    if op in (Op.RECV_REDUCE, Op.RECV_REDUCE_SEND):
        into = dst if src == dst else f"{dst} = {src} +"
        sum_ = f"{into} <- {peer}"
        if int(instruction["flags"]) & Flag.FIRST:
            sum_ = f"{dst} = <- {peer} + {src}"
        return f"{op.name.lower()} {sum_}" + (f" -> {peer2}" if peer2 != NO_PEER else "")
    if op is Op.COPY:
        whose = f" of {peer}" if peer != NO_PEER else ""
        return f"copy {dst} = {src}{whose}"
    if op is Op.REDUCE_MANY:
        theirs = (
            f"OUTBOX[{arg}]"
            if (n := int(instruction["count"])) == 1
            else f"OUTBOX[{arg}:{arg + n}]"
        )
        back = ", and back" if int(instruction["flags"]) & Flag.BACK else ""
        return f"reduce_many {dst} = {src} + {theirs} of all others{back}"
    if op is Op.PUT:
        keep = f" and OUT[{arg}]" if int(instruction["flags"]) & Flag.KEEP else ""
        return f"put {dst}{keep} = {src}"
    if op is Op.SIGNAL:
        return f"signal {arg}"
    lag = f", {arg >> 16} tiles ago" if arg >> 16 else ""
    return f"wait for signal {arg & 0xFFFF} #{int(instruction['src'])} of {peer}{lag}"


def _run(instruction: Any, side: str) -> str:
    space, first = int(instruction[f"{side}_space"]), int(instruction[side])
    count = int(instruction["count"])
    name = Space(space).name if space in Space._value2member_map_ else f"space {space}"
    return f"{name}[{first}]" if count == 1 else f"{name}[{first}:{first + count}]"
