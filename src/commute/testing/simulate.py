# SPDX-License-Identifier: Apache-2.0
"""Whole stores under a seed: the shipped shard and client machines on a simulated network.

    python -m commute.testing.simulate --seed 7 --seeds 50000

Links deliver in order but at any time. They break before, during and after delivery, come back, and
what was on its way on the old one may still arrive beside the new one. Workers die and come back
as a new incarnation, leave, or are lost for good, by the word of the coordinator's real logic.
There are two dense tables and a sparse one (simulated_rows.py), which may have other bounds.
Nothing is random but by the seed, so a seed replays. Every run is checked:

    exactly once   worker w adds 2^k to element w with its k-th push: a value tells which it holds
    staleness      a pull at clock n holds all contributions up to n - s; with s = 0 exactly those
    monotone       what a worker has read never goes back
    own writes     a pull holds the caller's pushes (a cached one may lack the last s)
    atomic         of a push that was under way when its worker died, a slot has all or nothing;
                   what was committed stays
    cuts           at s = 0 all parts of a pull are of one round
    replay         the recorded ops make the same slots again, byte for byte
    live           with faults healed everything comes to its end
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from commute import _core
from commute.cluster.control import Frame, Hello, Kind
from commute.cluster.coordinator import Closed, Coordinator, Joined, Received, Send
from commute.testing.simulated_rows import SLOTS, Broken, SimulatedRows

__all__ = ["PLANTED", "Broken", "Simulation", "main"]

# The test-only switches (core/store/planted.h): bugs that the checks must find.
PLANTED: Final = (
    "none",
    "no de-duplication",
    "early close",
    "lost tick",
    "wrong minimum",
    "stale cache",
    "half a slot",
)
_INT64: Final = 6  # core/dtype.h
_SUM: Final = 0
_TABLES: Final = ("store/a", "store/b")
_ROWS: Final = len(_TABLES)  # the sparse table's number among them
_TURNS: Final = 10  # iterations
_EVENTS_MAX: Final = 200_000


@dataclass
class _Link:
    """One connection between a worker and a shard."""

    number: int
    worker: int
    shard: int
    forth: deque[bytes] = field(default_factory=deque)
    back: deque[bytes] = field(default_factory=deque)
    old: bool = False  # the worker has given it up; what it sent may still arrive


@dataclass
class _Worker:
    """One life after the other of a worker, and what it must find."""

    client: _core.ClientMachine
    incarnation: int = 1
    steps: int = 0
    waiting: int = 0  # call
    reading: int = -1  # table
    declaring: list[int] = field(default_factory=list)
    stage: int = 0  # of declaring
    left: bool = False
    lost: bool = False
    died: bool = False


class Simulation:
    """One store and its job; `run` raises Broken."""

    def __init__(self, seed: int, planted: int = 0, *, dense: bool = True) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.workers = 1 + seed % 4
        self.shards = 1 + seed % 3
        self.staleness = (0, 0, 1, 3, -1)[seed % 5]
        self.faults = seed % 2 == 1
        self.continues = pick.random() < 0.5
        self.planted = planted
        # Parts of 64 KB would be slow: a table is as large as two of them by its element count.
        self.parts = 2
        self.width = self.workers
        self.count = 8192 + self.width  # the first chunk is 64 KB, the second small
        self.rows = SimulatedRows(seed, pick, self.workers, self.staleness)
        # Tables in the order in which all workers push them.
        self.order = [0, _ROWS, 1] if seed % 7 < 2 else [0, 1, _ROWS]
        self.order = self.order if dense else [_ROWS]
        self.phases = 2 * len(self.order) + 1  # of an iteration: pushes, a tick, pulls
        self.steps = _TURNS * self.phases
        self.replay = _core.Replay()
        remembered = self.rows.remembered_max
        self.machines = [
            _core.ShardMachine(
                self.workers, index, self.shards, SLOTS, planted, self.replay, remembered
            )
            for index in range(self.shards)
        ]
        self.links: dict[int, _Link] = {}
        self.current: dict[tuple[int, int], int] = {}  # the link in use, by worker and shard
        self.count_links = 0
        self.coordinator = Coordinator()
        self.now = 0.0
        self.lives = [_Worker(self._born(w, 1)) for w in range(self.workers)]
        self.numbers = [-1] * (_ROWS + 1)
        self.slots: list[list[int]] = []
        # What worker w has contributed to table t up to each clock, as bits.
        self.history = [[[0] for _ in _TABLES] for _ in range(self.workers)]
        self.pushes: dict[tuple[int, int], int] = defaultdict(int)
        self.since_tick: dict[tuple[int, int], int] = defaultdict(int)
        self.under_way: list[list[tuple[int, int, int]]] = [[] for _ in range(self.workers)]
        self.committed: dict[tuple[int, int], int] = defaultdict(int)
        self.seen = np.zeros((self.workers, len(_TABLES), self.parts * self.width), dtype=np.int64)
        self.out = np.zeros((self.workers, len(_TABLES), self.count), dtype=np.int64)
        self.deaths = 0

    # ---- the job ----

    def run(self) -> None:
        self._form()
        for worker in range(self.workers):
            for shard in range(self.shards):
                self._connect(worker, shard)
            self._declare(worker)
        self._settle()
        for _ in range(_EVENTS_MAX):
            if self._all_stopped():
                break
            self._event()
        self._settle()
        if not self._all_stopped():
            raise Broken("with faults healed, something waits for ever")
        self._settle()
        self._check_end()

    def _event(self) -> None:
        pick, chance = self.random, self.random.random()
        worker, shard = pick.randrange(self.workers), pick.randrange(self.shards)
        if self.faults and chance < 0.001 and self.deaths < 2:
            self._die(worker)
        elif self.faults and chance < 0.01:
            self._break(worker, shard)
        elif chance < 0.2:
            self._restore(worker, shard)
            self._step(worker)
        elif self.links:
            self._deliver(self.links[pick.choice(list(self.links))])

    def _form(self) -> None:
        """Workers and one server join; the coordinator's word is what loses a worker."""
        for rank in range(self.workers + 1):
            hello = Hello("w/store", rank, self.workers + 1, "h", 1, (), "0", "3", 5.0, 60.0)
            self._told(Joined(rank, hello))

    def _told(self, event: Joined | Closed | Received) -> None:
        self.now += 0.01
        for effect in self.coordinator.step(event, self.now):
            match effect:
                case Send(connection, Frame(kind=Kind.LOST, rank=rank)) if (
                    connection == self.workers
                ):
                    for machine in self.machines:
                        machine.on_lost(rank)
                case Send(connection, Frame(kind=Kind.LEAVE, rank=rank)) if (
                    connection == self.workers
                ):
                    for machine in self.machines:
                        machine.on_left(rank)

    def _born(self, worker: int, incarnation: int) -> _core.ClientMachine:
        small = self.rows.message_bytes
        return _core.ClientMachine(worker, incarnation, self.shards, self.planted, SLOTS, small)

    # ---- links ----

    def _connect(self, worker: int, shard: int) -> None:
        self.count_links += 1
        self.links[self.count_links] = _Link(self.count_links, worker, shard)
        self.current[worker, shard] = self.count_links
        self.lives[worker].client.on_link(shard, True)

    def _break(self, worker: int, shard: int) -> None:
        """The worker loses its link; what it sent arrives whole, in part, or not at all."""
        number = self.current.pop((worker, shard), None)
        if number is None:
            return
        link = self.links[number]
        arrives = self.random.choice(("nothing", "some", "all"))
        keep = {"nothing": 0, "some": self.random.randrange(len(link.forth) + 1)}
        while len(link.forth) > keep.get(arrives, len(link.forth)):
            link.forth.pop()
        link.back.clear()
        link.old = True
        self.lives[worker].client.on_link(shard, False)
        if not link.forth:
            self._forget(link)

    def _forget(self, link: _Link) -> None:
        self.machines[link.shard].on_link_down(link.number)
        del self.links[link.number]

    def _restore(self, worker: int, shard: int) -> None:
        if (worker, shard) not in self.current and not self.lives[worker].lost:
            self._connect(worker, shard)

    def _deliver(self, link: _Link) -> bool:
        """One message, one way or the other."""
        machine, client = self.machines[link.shard], self.lives[link.worker].client
        if not link.old:
            while (message := client.next(link.shard)) is not None:
                client.sent(link.shard)
                link.forth.append(message)
        while not link.old and (answer := machine.next(link.number)) is not None:
            machine.sent(link.number)
            link.back.append(answer)
        if link.forth and (not link.back or self.random.random() < 0.5):
            if not machine.wants(link.number):
                return False
            machine.on_message(link.number, link.forth.popleft())
        elif link.back:
            client.on_message(link.shard, link.back.popleft())
        else:
            if link.old:
                self._forget(link)
            return False
        return True

    def _settle(self) -> None:
        """Nothing but delivery until all is quiet."""
        delivered = 0
        for worker in range(self.workers):
            for shard in range(self.shards):
                self._restore(worker, shard)
        moved = True
        while moved:
            moved = False
            for worker, life in enumerate(self.lives):
                self._declared(worker, life)
            for link in list(self.links.values()):
                while link.number in self.links and self._deliver(link):
                    moved = True
                    delivered += 1
                    if delivered > _EVENTS_MAX:
                        raise Broken("messages go to and fro for ever")

    # ---- workers ----

    def _declare(self, worker: int) -> None:
        life = self.lives[worker]
        life.stage = 1
        life.declaring = [
            life.client.declare_table(self._name(table), self._spec(table), "two")
            for table in self.order
        ]

    def _name(self, table: int) -> str:
        return SimulatedRows.NAME if table == _ROWS else _TABLES[table]

    def _spec(self, table: int) -> _core.TableSpec:
        if table == _ROWS:
            return self.rows.spec(self.continues)
        update = _core.Update(_SUM)
        return _core.TableSpec(_INT64, self.count, update, self.staleness, continues=self.continues)

    def _declared(self, worker: int, life: _Worker) -> bool:
        if life.stage == 0:
            return True
        if not all(life.client.done(call) for call in life.declaring):
            return False
        if life.stage == 1:
            life.stage = 2
            for table in self.order:
                self.numbers[table] = life.client.table_of(self._name(table))
            self.slots = [life.client.slots_of(name) for name in _TABLES]
            life.declaring = [
                life.client.declare(self._name(table), self._spec(table), 0, 0)
                for table in self.order
            ]
            return False
        # The iteration in which it died ends here, on all tables alike.
        numbers = [self.numbers[table] for table in self.order]
        clock = max(life.client.clock(number) for number in numbers)
        for number in numbers:
            if life.client.clock(number) < clock:
                life.client.catch_up(number, clock)
        life.stage = 0
        return True

    def _die(self, worker: int) -> None:
        """A worker dies, and comes back at the beginning of its next iteration, or is lost."""
        life = self.lives[worker]
        if life.left or life.lost or life.stage:
            return
        self.deaths += 1
        for shard in range(self.shards):
            self._break(worker, shard)
        for call, table, bit in self.under_way[worker]:
            if life.client.done(call):
                self.committed[worker, table] |= bit
        self.under_way[worker].clear()
        self.rows.died(worker, life.client)
        life.died, life.waiting = True, 0
        life.incarnation += 1
        life.client = self._born(worker, life.incarnation)
        for table in self.order:
            self.since_tick[worker, table] = 0
        if self.continues and self.random.random() < 0.5:
            life.lost, life.steps = True, self.steps
            self._told(Closed(worker))
            return
        life.steps = min(self.steps, (life.steps // self.phases + 1) * self.phases)
        for shard in range(self.shards):
            life.client.on_link(shard, False)
        self._declare(worker)

    def _step(self, worker: int) -> None:
        """An iteration: for each table in order a contribution or none; a tick; some pulls.

        Workers that wait for each other in different orders would wait for ever, in any store.
        """
        life = self.lives[worker]
        if life.lost or not self._declared(worker, life):
            return
        if life.waiting and not life.client.done(life.waiting):
            return
        if life.waiting:
            self._check_read(worker)
        life.waiting = 0
        if life.steps >= self.steps or life.client.kept_bytes() > 1 << 20:
            return
        phase, tables = life.steps % self.phases, len(self.order)
        life.steps += 1
        if phase < tables:
            self._contribute(worker, self.order[phase])
        elif phase == tables:
            self._tick(worker)
        elif self.random.random() < 0.5:
            self._pull(worker, self.order[phase - tables - 1])

    def _contribute(self, worker: int, table: int) -> None:
        # Who waits owes nobody anything: only the last table's push may wait for an answer.
        kind = self.random.randrange(4 if table == self.order[-1] else 3)
        if table == _ROWS:
            return self._contribute_rows(worker, kind)
        if kind == 0:
            return
        bits = self._push(worker, table, piece=True)[1] if kind == 1 else 0
        call, bit = self._push(worker, table, pull=kind == 3)
        # Pieces of a contribution that is never completed do not count.
        self.under_way[worker].append((call, table, bits | bit))
        self._made(worker, table, bits | bit)

    def _contribute_rows(self, worker: int, kind: int) -> None:
        life, number = self.lives[worker], self.numbers[_ROWS]
        turn = life.steps // self.phases
        self.rows.may_drop(life.client, number, worker)
        if kind == 0:
            return
        call = self.rows.contribute(life.client, number, worker, turn, kind)
        if kind == 3:
            life.reading, life.waiting = _ROWS, call
        self.since_tick[worker, _ROWS] += 1

    def _push(
        self, worker: int, table: int, *, piece: bool = False, pull: bool = False
    ) -> tuple[int, int]:
        """Returns the call, and the bit it adds."""
        life = self.lives[worker]
        bit = 1 << self.pushes[worker, table]
        self.pushes[worker, table] += 1
        gradient = np.zeros(self.count, dtype=np.int64)
        gradient[self._places(worker)] = bit
        number = self.numbers[table]
        if pull:
            target = self.out[worker, table]
            call = life.client.push_pull(number, gradient.tobytes(), target.ctypes.data)
            life.reading, life.waiting = table, call
        else:
            call = life.client.push(number, gradient.tobytes(), piece)
        return call, bit

    def _places(self, worker: int) -> list[int]:
        """The elements of a worker: one in each part."""
        return [worker, 8192 + worker]

    def _tick(self, worker: int) -> None:
        for table in self.order:
            if self.since_tick[worker, table] == 0 and table == _ROWS:
                self.rows.contributed(worker, 0, [])
            elif self.since_tick[worker, table] == 0:
                self._made(worker, table, 0)
            self.since_tick[worker, table] = 0
            self.lives[worker].client.tick(self.numbers[table])

    def _made(self, worker: int, table: int, bits: int) -> None:
        history = self.history[worker][table]
        history.append(history[-1] | bits)
        self.since_tick[worker, table] += bits != 0

    def _pull(self, worker: int, table: int) -> None:
        life = self.lives[worker]
        life.reading = table
        if table == _ROWS:
            self.rows.may_drop(life.client, self.numbers[table], worker)
            life.waiting = self.rows.pull(life.client, self.numbers[table], worker)
            return
        target = self.out[worker, table].ctypes.data
        life.waiting = life.client.pull(self.numbers[table], target, self.random.random() < 0.25)
        if life.waiting == 0:
            self._check_read(worker)  # from the cache

    def _all_stopped(self) -> bool:
        """A worker that has done all its steps would hold up the others: it leaves."""
        stopped = True
        for worker, life in enumerate(self.lives):
            if life.lost:
                continue
            idle = (
                self._declared(worker, life)
                and life.steps >= self.steps
                and (life.waiting == 0 or life.client.done(life.waiting))
                and life.client.flushed()
            )
            if idle and not life.left:
                if life.waiting:
                    self._check_read(worker)
                life.waiting, life.left = 0, True
                life.client.leave("store")
            stopped = stopped and idle
        return stopped

    # ---- checks ----

    def _check_read(self, worker: int) -> None:
        life, table = self.lives[worker], self.lives[worker].reading
        mine = life.client.clock(self.numbers[table])
        if table == _ROWS:
            died, left = [each.died for each in self.lives], [each.left for each in self.lives]
            return self.rows.check_read(worker, mine, died, left)
        for other in range(self.workers):
            history = self.history[other][table]
            got = [int(self.out[worker, table, place]) for place in self._places(other)]
            for part, value in enumerate(got):
                index = part * self.width + other
                before = int(self.seen[worker, table, index])
                self.seen[worker, table, index] = value
                self._expect(value & before == before, "a read went back", worker, table)
                self._expect(
                    value & history[-1] == value,
                    "a push counted twice, or never made",
                    worker,
                    table,
                )
            if self.lives[other].died:
                continue
            if self.staleness == 0:
                self._expect(got[0] == got[1], "a pull is no consistent cut", worker, table)
            for value in got:
                self._check_bound(worker, table, other, mine, value)

    def _check_bound(self, worker: int, table: int, other: int, mine: int, value: int) -> None:
        history = self.history[other][table]
        if self.staleness < 0:
            own = other != worker or value == history[-1]
            self._expect(own, "a pull lacks the caller's own push", worker, table)
            return
        bound = max(0, mine - self.staleness)
        if not self.lives[other].left:
            self._expect(len(history) > bound, "a pull did not wait", worker, table)
        needed = history[min(bound, len(history) - 1)]
        self._expect(value & needed == needed, "a pull is too stale", worker, table)
        if self.staleness == 0:
            exact = history[min(mine, len(history) - 1)]
            self._expect(value == exact, "a pull holds another round", worker, table)

    def _expect(self, kept: bool, promise: str, worker: int, table: int) -> None:
        if not kept:
            raise Broken(f"{promise} (worker {worker}, table {_TABLES[table]!r})")

    def _check_end(self) -> None:
        for machine in self.machines:
            machine.compare(self.replay)
        if not self.replay.report().endswith("equal"):
            raise Broken(f"replaying the ops gives other slots: {self.replay.report()}")
        died = [life.died for life in self.lives]
        self.rows.check_end(self.machines, self.numbers[_ROWS], died)
        for table in self.order:
            if table == _ROWS:
                continue
            for part, slot in enumerate(self.slots[table]):
                machine = self.machines[slot % self.shards]
                value = np.frombuffer(machine.value(slot, self.numbers[table]), dtype=np.int64)
                for worker, life in enumerate(self.lives):
                    got, made = int(value[worker]), self.history[worker][table][-1]
                    whole = self.committed[worker, table] if life.died else made
                    self._expect(got & made == got, "a push counted twice", worker, table)
                    where = f"a committed push is not in part {part}"
                    self._expect(got & whole == whole, where, worker, table)
        for worker, life in enumerate(self.lives):
            if not life.lost and not (life.client.flushed() and life.client.quiet()):
                raise Broken(f"worker {worker} has calls that were never answered")


def first_broken(seed: int, planted: int = 0, *, dense: bool = True) -> str:
    """Why this seed breaks a promise; empty when it keeps them all. `dense`: beside the rows."""
    try:
        Simulation(seed, planted, dense=dense).run()
    except Broken as broken:
        return str(broken)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"a machine raised {error!r}"
    return ""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m commute.testing.simulate",
        description="Runs stores on a simulated network under seeds, and checks every promise.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from there on (default 1)")
    parser.add_argument(
        "--planted",
        choices=PLANTED,
        default="none",
        help="plant a bug in the machines, to see that it is found",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when all seeds keep all promises, 1 at the first that does not."""
    given = _arguments(argv)
    planted = PLANTED.index(given.planted)
    begun = next_line = time.monotonic()
    for done, seed in enumerate(range(given.seed, given.seed + given.seeds), start=1):
        if broken := first_broken(seed, planted):
            print(f"seed {seed}: {broken}; --seed {seed} replays it", flush=True)
            return 1
        if time.monotonic() > next_line + 5:
            next_line = time.monotonic()
            rate = done / (next_line - begun)
            print(
                f"{done} of {given.seeds} seeds, {rate:.0f} a second", file=sys.stderr, flush=True
            )
    seconds = time.monotonic() - begun
    print(f"{given.seeds} seeds kept all promises, in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
