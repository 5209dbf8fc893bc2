# SPDX-License-Identifier: Apache-2.0
"""Whole jobs against the coordinator's real logic, on a virtual clock, from one seed.

Processes join one or two worlds, leave, fail, die, are stopped and report losses; every message
takes a while and keeps its order within its connection; the coordinator stalls now and then. What
must hold is checked at the end, over everything that every process was told.
"""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from commute.cluster.control import Frame, Hello, Kind, Leave, Refused, Welcome
from commute.cluster.coordinator import (
    FIRST_BEAT_SECONDS,
    Close,
    Closed,
    Coordinator,
    Event,
    Failed,
    Joined,
    Received,
    Send,
    Tick,
)

TICK = 0.2
DELAY_MAX = 0.2
JOBS = 150
END = 120.0


@dataclass
class Process:
    """One process and its connection, and all it was told."""

    connection: int
    hello: Hello
    joined_at: float = 0.0
    epoch: int = 0
    told: list[tuple[float, Frame]] = field(default_factory=list)
    refused_at: float | None = None
    fate: str = "lives"  # lives, left, failed, died, stopped
    fate_at: float = END
    accused: set[int] = field(default_factory=set)  # by the processes of these connections
    heard_until: float = 0.0  # its messages keep their order
    closed: bool = False

    @property
    def world(self) -> tuple[str, int]:
        return (self.hello.name, self.epoch)

    @property
    def there(self) -> bool:
        return self.epoch > 0 and self.fate == "lives"


class Simulation:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.coordinator = Coordinator()
        self.processes: dict[int, Process] = {}
        self.failed: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.first_told: dict[tuple[str, int], int] = {}
        self.stalls = 0
        self.stalled = 0.0
        self._stalled_until = 0.0
        self._stalls_left = self.rng.choice([0, 0, 1, 3])
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def run(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2])):
            self.start_world(f"world{self.rng.randrange(2)}", self.rng.randint(1, 6))
        self.at(TICK, self.tick)
        while self._agenda and self._agenda[0][0] <= END:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def start_world(self, name: str, size: int) -> None:
        timeout = self.rng.choice([1.0, 2.0, 5.0])
        for rank in range(size):
            # Somebody may not come at all; the others must not wait for ever.
            if self.rng.random() < 0.97:
                self.at(
                    self.now + self.rng.uniform(0, 12),
                    lambda rank=rank: self.start(name, rank, size, timeout),  # type: ignore[misc]
                )

    def start(self, name: str, rank: int, size: int, timeout: float) -> None:
        connection = len(self.processes)
        hello = Hello(
            name=name,
            rank=rank,
            size=size,
            host="hosta",
            pid=connection,
            addresses=(("127.0.0.1", 1),),
            commute_version="1",
            python_version="3",
            peer_timeout=timeout,
            join_timeout=self.rng.choice([15.0, 30.0]),
        )
        process = self.processes[connection] = Process(connection, hello, joined_at=self.now)
        self.deliver(process, Joined(connection, hello))
        if self.rng.random() < 0.05:
            self.at(self.now + self.rng.uniform(0, 15), lambda: self.end(process, "died"))

    def deliver(self, process: Process, event: Event) -> None:
        """The coordinator gets the event a while later, when it is awake."""
        delay = self.rng.uniform(0, DELAY_MAX)
        process.heard_until = max(process.heard_until, self.now + delay)
        self.at(process.heard_until, lambda: self.step(event))

    def step(self, event: Event) -> None:
        if self.now < self._stalled_until:
            self.at(self._stalled_until, lambda: self.step(event))
            return
        if isinstance(event, Closed):
            self.processes[event.connection].closed = True
        for effect in self.coordinator.step(event, self.now):
            if isinstance(effect, Send):
                assert not self.processes[effect.connection].closed, "sent to a closed connection"
                self.receive(self.processes[effect.connection], effect)
            elif isinstance(effect, Close):
                self.processes[effect.connection].closed = True
            elif isinstance(effect, Failed):
                self.failed[(effect.world, effect.epoch)].append(effect.failure.rank)

    def tick(self) -> None:
        if self._stalls_left and self.rng.random() < 0.01:
            self._stalls_left -= 1
            self.stalls += 1
            length = self.rng.uniform(1, 8)
            self.stalled += length
            self._stalled_until = self.now + length
            self.at(self._stalled_until, self.tick)
            return
        self.step(Tick())
        self.at(self.now + TICK, self.tick)

    def receive(self, process: Process, effect: Send) -> None:
        match effect.message:
            case Welcome(epoch=epoch):
                assert process.epoch == 0, "welcomed twice"
                process.epoch = epoch
                self.live(process)
            case Refused():
                process.refused_at = self.now
                process.closed = True
            case Frame() as frame if frame.kind is not Kind.BEAT:
                process.told.append((self.now, frame))
                if frame.kind is Kind.LOST or frame.code == Leave.FAILED:
                    self.first_told.setdefault(process.world, frame.rank)

    def live(self, process: Process) -> None:
        # Stalls shorter than half a peer_timeout (2.5 s) are not forgiven.
        first = self.rng.uniform(0, FIRST_BEAT_SECONDS - 3)
        self.at(self.now + first, lambda: self.beat(process))
        fate = self.rng.choice(["left", "left", "left", "failed", "died", "stopped", "accuses"])
        when = self.now + self.rng.uniform(0, 40)
        if fate == "accuses":
            self.at(when, lambda: self.accuse(process))
            self.at(when + 10, lambda: self.end(process, "left"))
        else:
            self.at(when, lambda: self.end(process, fate))
        if self.rng.random() < 0.15 and process.hello.rank == 0:
            self.at(when + 1, lambda: self.start_world(process.hello.name, process.hello.size))

    def beat(self, process: Process) -> None:
        if process.there:
            self.deliver(process, Received(process.connection, Frame(Kind.BEAT)))
            self.at(self.now + process.hello.peer_timeout / 4, lambda: self.beat(process))

    def accuse(self, process: Process) -> None:
        others = [
            p for p in self.processes.values() if p.world == process.world and p is not process
        ]
        if process.there and others:
            other = self.rng.choice(others)
            other.accused.add(process.connection)
            rank = process.hello.rank
            report = Frame(Kind.LOST, rank=other.hello.rank, by=rank, text="link broke")
            self.deliver(process, Received(process.connection, report))

    def end(self, process: Process, fate: str) -> None:
        if process.fate != "lives" or process.refused_at is not None:
            return
        if process.epoch == 0 and fate != "died":
            return
        process.fate, process.fate_at = fate, self.now
        rank = process.hello.rank
        if fate in ("left", "failed"):
            code = Leave.FAILED if fate == "failed" else Leave.FINISHED
            leave = Frame(Kind.LEAVE, code, rank=rank, by=rank, text=fate)
            self.deliver(process, Received(process.connection, leave))
        if fate != "stopped":
            self.deliver(process, Closed(process.connection))


def check_welcomes(simulation: Simulation) -> None:
    """A world has every rank exactly once, and its name's epochs count from 1 without a gap."""
    worlds = defaultdict(list)
    for process in simulation.processes.values():
        if process.epoch:
            worlds[process.world].append(process.hello)
    for hellos in worlds.values():
        assert sorted(hello.rank for hello in hellos) == list(range(hellos[0].size))
    for name in {name for name, _ in worlds}:
        epochs = sorted(epoch for other, epoch in worlds if other == name)
        assert epochs == list(range(1, len(epochs) + 1))


def check_patience(simulation: Simulation) -> None:
    """Nobody waits for a world longer than it wanted to."""
    for process in simulation.processes.values():
        answered = process.epoch or process.closed or process.refused_at is not None
        patience = process.hello.join_timeout + simulation.stalled + 2 * TICK + DELAY_MAX
        if process.refused_at is not None:
            assert process.refused_at <= process.joined_at + patience
        assert answered or process.joined_at + patience > END


def check_told_once(simulation: Simulation) -> None:
    """Of each member either its leaving or its loss is told, once."""
    for process in simulation.processes.values():
        ranks = [frame.rank for _, frame in process.told]
        assert len(ranks) == len(set(ranks))
    verdicts = defaultdict(set)
    for process in simulation.processes.values():
        for _, frame in process.told:
            verdicts[(process.world, frame.rank)].add(frame.kind)
    assert all(len(kinds) == 1 for kinds in verdicts.values())


def check_verdicts(simulation: Simulation) -> None:
    """Whoever lives and was not accused is never lost; whoever dies or stops is, in time."""
    for process in simulation.processes.values():
        if not process.epoch:
            continue
        peers = [p for p in simulation.processes.values() if p.world == process.world]
        peers.remove(process)
        told = {
            p.connection: [(t, f) for t, f in p.told if f.rank == process.hello.rank] for p in peers
        }
        kinds = {frame.kind for verdicts in told.values() for _, frame in verdicts}
        if process.fate in ("lives", "left", "failed") and not process.accused:
            assert Kind.LOST not in kinds
        if process.fate == "lives":
            continue
        late = process.fate_at + simulation.stalled + 3 * TICK + DELAY_MAX
        if process.fate == "stopped":
            limit = max(process.hello.peer_timeout, FIRST_BEAT_SECONDS)
            late += limit * (1 + simulation.stalls)  # after each stall it starts afresh
        for peer in peers:
            # Whoever was itself declared lost, or went, is told nothing more; an accuser knows.
            knows = peer.connection in process.accused
            if peer.fate_at > late and not peer.accused and not knows:
                assert told[peer.connection], f"{peer} does not know of {process}"
                assert told[peer.connection][0][0] <= late


def check_failures(simulation: Simulation) -> None:
    """Each world that lost or failed somebody names one, the first of all it told about."""
    for world, ranks in simulation.failed.items():
        assert ranks == [simulation.first_told.get(world, ranks[0])]
        assert simulation.coordinator.failures[world].rank == ranks[0]
    assert simulation.first_told.keys() <= simulation.failed.keys()


def test_jobs_under_faults(seed: int) -> None:
    """Many jobs, each from its own seed."""
    formed = lost = 0
    for number in range(JOBS):
        print(f"job of seed {seed + number}")
        simulation = Simulation(seed + number)
        simulation.run()
        check_welcomes(simulation)
        check_patience(simulation)
        check_told_once(simulation)
        check_verdicts(simulation)
        check_failures(simulation)
        formed += any(p.epoch for p in simulation.processes.values())
        lost += bool(simulation.failed)

    assert formed > JOBS / 2, "the simulation must form worlds to say anything about them"
    assert lost > JOBS / 8


def test_a_seed_replays_its_job(seed: int) -> None:
    """The seed alone decides what happens."""
    runs = [Simulation(seed), Simulation(seed)]
    for simulation in runs:
        simulation.run()

    assert runs[0].processes == runs[1].processes
