# SPDX-License-Identifier: Apache-2.0
"""Who observes a server: the coordinator of `commute serve`, without socket, clock or thread.

An observer is a client that came by `commute.connect`. It is a member of nothing: nobody waits for
it, and its end is no loss to anybody. `step(event, now)` returns the effects that the driver (see
reception) must carry out, in order.

    Arrived --> in --LEAVE, closed, silent, or broke the protocol--> gone

Invariants:
    1. Numbers rise from 1 and are never given out twice: the server itself is 0.
    2. Came is before the Admitted of the same observer, and followed by exactly one Gone.
    3. Silence is judged only from ticks, and only against time this process was awake for.
"""

from __future__ import annotations

from typing import Final

import msgspec

from commute._version import __version__
from commute.cluster.control import Admitted, Frame, Kind, Leave, Observe, Refused
from commute.cluster.coordinator import Close, Closed, Received, Send, Tick

__all__ = ["SERVER", "Arrived", "Came", "Gone", "Observer", "Observers", "Place", "Stop"]

SERVER: Final = 0  # the server's own number
# Nobody waits for an observer, so patience costs nothing but what the server keeps of it; a laptop
# may have been closed for a moment.
SILENCE_SECONDS: Final = 60.0
# Each has a connection, and a channel to every shard.
OBSERVERS_MAX: Final = 4096


class Place(msgspec.Struct, frozen=True):
    """This life of the server, as observers are told."""

    epoch: int
    world: str
    shards: int
    host: str
    pid: int


class Arrived(msgspec.Struct, frozen=True):
    """A process that passed the handshake wants to observe."""

    connection: int
    observe: Observe


class Stop(msgspec.Struct, frozen=True):
    """The server ends; the text tells why."""

    text: str


Event = Arrived | Received | Closed | Tick | Stop


class Observer(msgspec.Struct):
    """One that is in."""

    number: int
    connection: int
    host: str
    pid: int
    since: float
    heard: float

    def __str__(self) -> str:
        return f"client {self.number} (pid {self.pid} on {self.host})"


class Came(msgspec.Struct, frozen=True):
    """An observer is in."""

    observer: Observer


class Gone(msgspec.Struct, frozen=True):
    """An observer is out for good; why, as the rest of a sentence about it."""

    observer: Observer
    why: str


Effect = Send | Close | Came | Gone


class Observers:
    """All observers of one server."""

    def __init__(self, place: Place, *, silence_s: float = SILENCE_SECONDS) -> None:
        self._place = place
        self._silence = silence_s
        self._by_connection: dict[int, Observer] = {}
        self._last_number = SERVER
        self._last_tick: float | None = None

    @property
    def present(self) -> list[Observer]:
        """Who is in, in the order of coming."""
        return list(self._by_connection.values())

    def is_in(self, number: int) -> bool:
        return any(observer.number == number for observer in self._by_connection.values())

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` never goes back."""
        match event:
            case Arrived(connection, observe):
                return self._arrived(connection, observe, now)
            case Received(connection, frame):
                return self._received(connection, frame, now)
            case Closed(connection, cause):
                because = f": {cause}" if cause else ""
                return self._gone(connection, f"is gone without a goodbye{because}")
            case Tick():
                return self._tick(now)
            case Stop(text):
                return self._stop(text)

    def _arrived(self, connection: int, observe: Observe, now: float) -> list[Effect]:
        refused = ""
        if observe.commute_version != __version__:
            refused = (
                f"the server runs commute {__version__}, this client {observe.commute_version};"
                " install the same version for both"
            )
        elif len(self._by_connection) >= OBSERVERS_MAX:
            refused = f"the server has {OBSERVERS_MAX} clients, and takes no more"
        if refused:
            return [Send(connection, Refused(refused)), Close(connection)]
        self._last_number += 1
        observer = Observer(self._last_number, connection, observe.host, observe.pid, now, now)
        self._by_connection[connection] = observer
        place = self._place
        admitted = Admitted(
            observer.number, place.epoch, place.world, place.shards, place.host, place.pid
        )
        return [Came(observer), Send(connection, admitted)]

    def _received(self, connection: int, frame: Frame, now: float) -> list[Effect]:
        observer = self._by_connection.get(connection)
        if observer is None:
            return []
        observer.heard = now
        if frame.kind is Kind.BEAT:
            return [Send(connection, Frame(Kind.BEAT))]
        if frame.kind is Kind.LEAVE and frame.rank == observer.number:
            failed = frame.code == Leave.FAILED
            why = f"has failed: {frame.text}" if failed else "has left"
        else:
            why = f"broke the protocol by a frame of kind {frame.kind:d}"
        return [*self._gone(connection, why), Close(connection)]

    def _gone(self, connection: int, why: str) -> list[Effect]:
        observer = self._by_connection.pop(connection, None)
        return [] if observer is None else [Gone(observer, why)]

    def _tick(self, now: float) -> list[Effect]:
        gap = now - self._last_tick if self._last_tick is not None else 0.0
        self._last_tick = now
        effects: list[Effect] = []
        for observer in self.present:
            if gap > self._silence / 2:
                observer.heard = now
            silent = now - observer.heard
            if silent > self._silence:
                text = f"it was silent for {silent:.0f} s"
                lost = Frame(Kind.LOST, rank=observer.number, by=SERVER, text=text)
                effects.append(Send(observer.connection, lost))
                effects += self._gone(observer.connection, f"was silent for {silent:.0f} s")
                effects.append(Close(observer.connection))
        return effects

    def _stop(self, text: str) -> list[Effect]:
        leave = Frame(Kind.LEAVE, code=Leave.FAILED, rank=SERVER, by=SERVER, text=text)
        effects: list[Effect] = []
        for observer in self.present:
            effects.append(Send(observer.connection, leave))
            effects += self._gone(observer.connection, "is told that the server ends")
            effects.append(Close(observer.connection))
        return effects
