# SPDX-License-Identifier: Apache-2.0
"""Who is a member of which world: the coordinator's logic, without socket, clock or thread.

`step(event, now)` takes one event and returns the effects the driver (see serve) must carry out,
in order. Connections are numbers that the driver gives out and never uses twice.

A world is one generation of a name; its epoch counts the generations that were formed, from 1:

    forming --every rank said Hello--> formed --every member left or is lost--> ended
       \\--deadline, or members that cannot fit together--> given up

A member of it:

    joining --world formed--> in --LEAVE--> left
       \\--connection closed--> (forgotten)  \\--closed, silent, or reported by another--> lost

Invariants:
    1. A Welcome goes to every rank of a world in one step, with the same members.
    2. left and lost are final; of a member, either one LEAVE or one LOST is relayed, once, to
       every other member that is still in. Whoever is declared lost is told so itself. A LEAVE of
       one group of the world changes nobody's state; it is only relayed.
    3. A member that left is never declared lost afterwards.
    4. Silence is judged only from ticks, and only against time this process was awake for: after
       a gap between ticks of more than half a world's shortest timeout, all its members start
       afresh.
    5. Nobody waits in a forming world past the shortest join_timeout of those who wait. Ranks
       that arrive too late for a world that was given up are told why, instead of waiting alone.
    6. The first failure of a world (LOST, or LEAVE with code 1) is kept, for the launchers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from commute.cluster import roster
from commute.cluster.control import Admitted, Frame, Hello, Kind, Leave, Member, Refused, Welcome

__all__ = [
    "Close",
    "Closed",
    "Coordinator",
    "Effect",
    "Event",
    "Failed",
    "Failure",
    "Joined",
    "Notice",
    "Received",
    "Send",
    "Tick",
    "Watched",
]

ROSTER_SECONDS: Final = 10.0
# A member's heartbeat begins when its health thread does, some time after the Welcome: on a
# loaded machine later than a short peer_timeout.
FIRST_BEAT_SECONDS: Final = 10.0
# How long ranks that come too late for a world that was given up are told so.
GIVEN_UP_SECONDS: Final = 30.0
# A member remembers this many operations it abandoned, to relay each once.
_ABANDONED_MAX: Final = 1024


class Joined(msgspec.Struct, frozen=True):
    """A process that passed the handshake says Hello."""

    connection: int
    hello: Hello


class Watched(msgspec.Struct, frozen=True):
    """A launcher connected: it hears of failures, and may report those of its processes."""

    connection: int


class Received(msgspec.Struct, frozen=True):
    """A control frame arrived."""

    connection: int
    frame: Frame


class Closed(msgspec.Struct, frozen=True):
    """A connection is gone; the cause is "" for a plain close."""

    connection: int
    cause: str = ""


class Tick(msgspec.Struct, frozen=True):
    """Time passed; several times a second."""


Event = Joined | Watched | Received | Closed | Tick


class Send(msgspec.Struct, frozen=True):
    connection: int
    message: Welcome | Admitted | Refused | Frame


class Close(msgspec.Struct, frozen=True):
    """Close the connection once what was sent before is out; no Closed event is expected."""

    connection: int


class Notice(msgspec.Struct, frozen=True):
    """One line for the user's terminal."""

    text: str


class Failure(msgspec.Struct, frozen=True):
    """The first failure of a world; by is who says so, -1 for the coordinator."""

    rank: int
    text: str
    by: int


class Failed(msgspec.Struct, frozen=True):
    """A world has its first failure."""

    world: str
    epoch: int
    failure: Failure


Effect = Send | Close | Notice | Failed


class _State(enum.Enum):
    JOINING = "joining"
    IN = "in"
    LEFT = "left"
    LOST = "lost"


class _Member(msgspec.Struct):
    connection: int
    hello: Hello
    heard: float
    state: _State = _State.JOINING
    silence_max: float = 0.0  # more generous until the first beat
    abandoned: set[tuple[int, int]] = msgspec.field(default_factory=set)  # group and operation


class _World(msgspec.Struct):
    name: str
    size: int
    began: float
    deadline: float
    next_roster: float
    epoch: int = 0  # 0 while forming
    members: dict[int, _Member] = msgspec.field(default_factory=dict)  # by rank
    gone: dict[int, str] = msgspec.field(
        default_factory=dict
    )  # ranks that joined and went, and from where

    def present(self) -> Iterator[_Member]:
        return (member for member in self.members.values() if member.state is _State.IN)

    def hellos(self) -> list[Hello]:
        return [self.members[rank].hello for rank in sorted(self.members)]


class _GivenUp(msgspec.Struct, frozen=True):
    """Why a world of this name did not come about, for the ranks that do not know it yet."""

    refused: Refused
    told: set[int]
    until: float


class Coordinator:
    """The state of all worlds of a job."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, int], Failure] = {}
        self.ever_joined = False
        self._forming: dict[str, _World] = {}
        self._formed: list[_World] = []
        self._generations: dict[str, int] = {}
        self._given_up: dict[str, _GivenUp] = {}
        self._connections: dict[int, tuple[_World, _Member]] = {}
        self._launchers: dict[int, None] = {}
        self._reported: list[Frame] = []
        self._last_tick: float | None = None

    @property
    def populated(self) -> bool:
        """Whether anybody waits in, or is a member of, any world."""
        return bool(self._forming or self._formed)

    @property
    def launchers(self) -> frozenset[int]:
        """The connections of the launchers."""
        return frozenset(self._launchers)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` never goes back."""
        match event:
            case Joined(connection, hello):
                return self._joined(connection, hello, now)
            case Watched(connection):
                self._launchers[connection] = None
                return [Send(connection, frame) for frame in self._reported]
            case Received(connection, frame):
                return self._received(connection, frame, now)
            case Closed(connection, cause):
                return self._closed(connection, cause)
            case Tick():
                return self._tick(now)

    # Joining

    def _joined(self, connection: int, hello: Hello, now: float) -> list[Effect]:
        self.ever_joined = True
        if hello.rank >= hello.size:
            reason = f"rank {hello.rank} is not below size {hello.size}; ranks count from 0"
            return _refuse([connection], Refused(reason))
        world = self._forming.get(hello.name)
        if world is None:
            if (late := self._too_late(hello, now)) is not None:
                return _refuse([connection], late)
            world = self._begin(hello, now)
        if (already := world.members.get(hello.rank)) is not None:
            reason = (
                f"rank {hello.rank} of world {world.name!r} joined already, from"
                f" {roster.place(already.hello)}, and again from {roster.place(hello)}; give every"
                " process a rank of its own"
            )
            return _refuse([connection], Refused(reason))
        member = _Member(connection, hello, heard=now)
        world.members[hello.rank] = member
        world.gone.pop(hello.rank, None)
        world.deadline = min(world.deadline, now + hello.join_timeout)
        self._connections[connection] = (world, member)
        if (misfit := roster.misfit(world.name, world.hellos())) is not None:
            return self._give_up(world, Refused(misfit), now)
        if len(world.members) == world.size:
            return self._form(world, now)
        return []

    def _begin(self, hello: Hello, now: float) -> _World:
        world = _World(
            name=hello.name,
            size=hello.size,
            began=now,
            deadline=now + hello.join_timeout,
            next_roster=now + ROSTER_SECONDS,
        )
        self._forming[hello.name] = world
        self._given_up.pop(hello.name, None)
        return world

    def _too_late(self, hello: Hello, now: float) -> Refused | None:
        given_up = self._given_up.get(hello.name)
        if given_up is None or now >= given_up.until or hello.rank in given_up.told:
            return None
        given_up.told.add(hello.rank)
        return given_up.refused

    def _form(self, world: _World, now: float) -> list[Effect]:
        del self._forming[world.name]
        self._formed.append(world)
        world.epoch = self._generations.get(world.name, 0) + 1
        self._generations[world.name] = world.epoch
        ranked = [world.members[rank] for rank in range(world.size)]
        members = tuple(
            Member(m.hello.rank, m.hello.host, m.hello.pid, m.hello.addresses) for m in ranked
        )
        for member in ranked:
            member.state = _State.IN
            member.heard = now
            member.silence_max = max(member.hello.peer_timeout, FIRST_BEAT_SECONDS)
        return [Send(m.connection, Welcome(world.epoch, members)) for m in ranked]

    def _give_up(self, world: _World, refused: Refused, now: float) -> list[Effect]:
        del self._forming[world.name]
        self._given_up[world.name] = _GivenUp(refused, set(world.members), now + GIVEN_UP_SECONDS)
        waiting = [member.connection for member in world.members.values()]
        for connection in waiting:
            del self._connections[connection]
        return _refuse(waiting, refused)

    # Frames

    def _received(self, connection: int, frame: Frame, now: float) -> list[Effect]:
        if connection in self._launchers:
            return self._received_from_launcher(connection, frame)
        if connection not in self._connections:
            return []
        world, member = self._connections[connection]
        if member.state is _State.JOINING:
            return [*self._closed(connection, ""), Close(connection)]
        member.heard = now
        if (broken := _broken_rule(world, member, frame)) is not None:
            return [
                *self._closed(connection, f"it broke the protocol: {broken}"),
                Close(connection),
            ]
        match frame.kind:
            case Kind.BEAT:
                member.silence_max = member.hello.peer_timeout
                return [Send(connection, Frame(Kind.BEAT))]
            case Kind.LEAVE:
                return self._left(world, member, frame)
            case Kind.LOST:
                return self._reported_lost(world, member, frame)
            case Kind.ABANDON:
                return self._abandoned(world, member, frame)

    def _received_from_launcher(self, connection: int, frame: Frame) -> list[Effect]:
        if frame.kind is Kind.BEAT:
            return [Send(connection, frame)]
        if _is_failure(frame):
            # A process may fail before it joins anything; then only its launcher knows.
            return self._tell_launchers(frame, but=connection)
        return []

    def _left(self, world: _World, member: _Member, frame: Frame) -> list[Effect]:
        if frame.group:
            return self._left_group(world, member, frame)
        rank = member.hello.rank
        failed = frame.code == Leave.FAILED
        effects: list[Effect] = []
        if member.state is _State.IN:
            member.state = _State.LEFT
            effects += _relay(world.present(), frame)
            if failed:
                effects += self._failed(world, frame)
        elif member.state is _State.LOST and failed:
            # A peer saw the link break before the member could say why. Its own words are better.
            known = self.failures[(world.name, world.epoch)]
            if known.rank == rank:
                self.failures[(world.name, world.epoch)] = msgspec.structs.replace(
                    known, text=frame.text, by=rank
                )
            effects += self._tell_launchers(frame)
        self._end_if_empty(world)
        return effects

    def _left_group(self, world: _World, member: _Member, frame: Frame) -> list[Effect]:
        if member.state is not _State.IN:
            return []
        return _relay((m for m in world.present() if m is not member), frame)

    def _reported_lost(self, world: _World, member: _Member, frame: Frame) -> list[Effect]:
        if member.state is not _State.IN:
            return []
        return self._lost(world, world.members[frame.rank], frame)

    def _abandoned(self, world: _World, member: _Member, frame: Frame) -> list[Effect]:
        if member.state is not _State.IN or (frame.group, frame.op) in member.abandoned:
            return []
        if len(member.abandoned) >= _ABANDONED_MAX:
            member.abandoned.clear()
        member.abandoned.add((frame.group, frame.op))
        return _relay((m for m in world.present() if m is not member), frame)

    # Losses

    def _closed(self, connection: int, cause: str) -> list[Effect]:
        self._launchers.pop(connection, None)
        if connection not in self._connections:
            return []
        world, member = self._connections.pop(connection)
        if member.state is _State.JOINING:
            del world.members[member.hello.rank]
            world.gone[member.hello.rank] = roster.place(member.hello)
            if not world.members:
                del self._forming[world.name]
            return []
        text = "its connection to the coordinator closed before it left"
        frame = Frame(Kind.LOST, rank=member.hello.rank, text=f"{text}: {cause}" if cause else text)
        return self._lost(world, member, frame)

    def _lost(self, world: _World, member: _Member, frame: Frame) -> list[Effect]:
        if member.state is not _State.IN:
            return []
        member.state = _State.LOST
        told = [m for m in world.present() if m.hello.rank != frame.by]
        if member.connection in self._connections:
            told.append(member)
        effects = [*_relay(told, frame), *self._failed(world, frame)]
        self._end_if_empty(world)
        return effects

    def _failed(self, world: _World, frame: Frame) -> list[Effect]:
        effects = self._tell_launchers(frame)
        key = (world.name, world.epoch)
        if key not in self.failures:
            self.failures[key] = Failure(frame.rank, frame.text, frame.by)
            effects.append(Failed(world.name, world.epoch, self.failures[key]))
        return effects

    def _tell_launchers(self, frame: Frame, *, but: int | None = None) -> list[Effect]:
        # A launcher that connects later hears what came before; the first of them matters most.
        if len(self._reported) < 64:
            self._reported.append(frame)
        return [Send(launcher, frame) for launcher in self._launchers if launcher != but]

    def _end_if_empty(self, world: _World) -> None:
        if world in self._formed and not any(world.present()):
            self._formed.remove(world)

    # Time

    def _tick(self, now: float) -> list[Effect]:
        gap = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        effects: list[Effect] = []
        for world in list(self._formed):
            effects += self._judge_silence(world, now, gap)
        for world in list(self._forming.values()):
            effects += self._wait_for_members(world, now)
        return effects

    def _judge_silence(self, world: _World, now: float, gap: float) -> list[Effect]:
        present = list(world.present())
        if gap > min(member.hello.peer_timeout for member in present) / 2:
            for member in present:
                member.heard = now
            return []
        effects: list[Effect] = []
        for member in present:
            silent = now - member.heard
            if silent > member.silence_max:
                limit = member.hello.peer_timeout
                text = f"it was silent for {silent:.1f} s (peer_timeout {limit:g} s)"
                lost = Frame(Kind.LOST, rank=member.hello.rank, text=text)
                effects += self._lost(world, member, lost)
        return effects

    def _wait_for_members(self, world: _World, now: float) -> list[Effect]:
        waiting = roster.waiting(world.name, world.size, world.hellos(), world.gone)
        if now >= world.deadline:
            reason = (
                f"world {world.name!r} was not complete after {now - world.began:.0f} s: {waiting};"
                " start the missing ranks, or raise join_timeout"
            )
            return self._give_up(world, Refused(reason, waiting), now)
        if now < world.next_roster:
            return []
        world.next_roster = now + ROSTER_SECONDS
        left = math.ceil(world.deadline - now)
        return [Notice(f"{waiting}; {left} s left")]


def _refuse(connections: Iterable[int], refused: Refused) -> list[Effect]:
    return [
        effect
        for connection in connections
        for effect in (Send(connection, refused), Close(connection))
    ]


def _relay(members: Iterable[_Member], frame: Frame) -> list[Effect]:
    return [Send(member.connection, frame) for member in members]


def _is_failure(frame: Frame) -> bool:
    return frame.kind is Kind.LOST or (frame.kind is Kind.LEAVE and frame.code == Leave.FAILED)


def _broken_rule(world: _World, member: _Member, frame: Frame) -> str | None:
    """Which rule a member's frame breaks: nobody may speak for another, or about nobody."""
    rank = member.hello.rank
    if frame.kind is Kind.LEAVE and frame.rank != rank:
        return f"it sent a LEAVE of rank {frame.rank}"
    if frame.kind in (Kind.LOST, Kind.ABANDON) and frame.by != rank:
        return f"it spoke as rank {frame.by}"
    if frame.kind is Kind.LOST and (frame.rank not in world.members or frame.rank == rank):
        return f"it reported the loss of rank {frame.rank}"
    return None
