# SPDX-License-Identifier: Apache-2.0
"""The sparse table of a simulated store: what workers do to its rows, and what they must find.

Rows have an element for each worker. With its k-th push worker w adds 2^k to element w of some
rows, so a row tells whose pushes it holds. Keys are of three kinds, by the seed:

    plain     any worker pushes them: all promises of commute.testing.simulate are checked
    dropped   one worker pushes and drops them: it finds its pushes since the drop, and no others
    expiring  all, in some seeds: a push is found for a while; rows that rest are gone at the end

Lists of keys are unsorted, repeat themselves and come again, so that digests stand for them;
messages are cut small, so that a push is many; in some seeds there are enough keys for the rows of
a slot to move while they are known by their places, and in some servers remember hardly any list.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from commute import _core

__all__ = ["SLOTS", "Broken", "SimulatedRows"]

SLOTS: Final = 16  # as few as there can be rows in each of them
_INT64: Final = 6  # core/dtype.h
_SUM: Final = 0
_EXPIRY: Final = 3  # clocks
_TURNS: Final = 10  # iterations of a job

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Broken(Exception):
    """A promise that was not kept; the text says which."""


@dataclass
class _Contribution:
    """What a worker gave in one go: the bit and the rows of each of its pieces."""

    worker: int
    call: int  # of the worker's present life; 0: of one before
    pieces: list[tuple[int, Ints]]
    sure: bool = False  # it was committed when its worker died


@dataclass
class _Reading:
    """A pull under way: which rows, and where they will be."""

    which: Ints
    out: Ints = field(repr=False)


class SimulatedRows:
    """The table "store/rows" of one simulation."""

    NAME: Final = "store/rows"

    def __init__(self, seed: int, pick: random.Random, workers: int, staleness: int) -> None:
        self.random = pick
        self.workers = workers
        self.width = 6 if seed % 2 else workers  # wide rows never move
        # In every third seed it is free beside tables that have bounds.
        self.staleness = -1 if seed % 3 == 0 else staleness
        many = seed % 16 == 5
        self.message_bytes = 0 if many else pick.choice((0, 1, 100, 400))
        self.remembered_max = pick.choice((700, 16 << 20))
        self.expires = seed % 5 == 3
        self.drops = not self.expires and seed % 4 > 1
        self.count = 1600 if many else 40
        keys = [0, 2**64 - 1, *(pick.getrandbits(64) for _ in range(self.count - 2))]
        self.keys = np.array(keys, dtype=np.uint64)
        self.slots = _slot_of(self.keys)
        # Who alone pushes and drops a key; -1: anybody.
        self.owners = np.full(self.count, -1)
        if self.drops:
            self.owners[3::4] = np.arange(len(self.owners[3::4])) % workers
        self.lists = [[self._some(worker, turn) for turn in range(3)] for worker in range(workers)]
        # What each worker has contributed to each row up to each clock, as bits.
        self.made: list[list[Ints]] = [[np.zeros(self.count, np.int64)] for _ in range(workers)]
        self.since_drop = np.zeros((workers, self.count), np.int64)
        self.last_clock = np.zeros((workers, self.count), np.int64)
        self.contributions: list[_Contribution] = []
        self.pushes = [0] * workers
        self.seen = np.zeros((workers, self.count, workers), np.int64)
        self.readings: list[_Reading | None] = [None] * workers

    def spec(self, continues: bool) -> _core.TableSpec:
        update = _core.Update(_SUM)
        plain = _core.TableSpec(_INT64, self.width, update, self.staleness, continues=continues)
        expiry = _EXPIRY if self.expires else 0
        return plain.with_rows(_INT64, 0, 0.0, 0.0, 0, 1, expiry, SLOTS)

    # ---- what workers do ----

    def _some(self, worker: int, turn: int) -> Ints:
        """Rows that this worker may push: unsorted, some twice, perhaps none."""
        allowed = np.flatnonzero((self.owners == -1) | (self.owners == worker))
        if self.expires:  # what is talked about changes
            middle = self.count * turn // _TURNS
            allowed = allowed[abs(allowed - middle) < self.count // 8]
        size = self.random.randrange(len(allowed) // 2 + 1)
        return np.array(self.random.choices(allowed.tolist(), k=size), dtype=np.int64)

    def contribute(
        self, client: _core.ClientMachine, table: int, worker: int, turn: int, kind: int
    ) -> int:
        """One push, of kind 1 in two pieces, of kind 3 with an answer. Returns the call."""
        call, pieces = 0, []
        for last in (False, True) if kind == 1 else (True,):
            bit = 1 << self.pushes[worker]
            self.pushes[worker] += 1
            again = self.lists[worker][self.random.randrange(3)]
            new = self.expires or self.random.random() < 0.5
            which = self._some(worker, turn) if new else again
            rows = np.zeros((len(which), self.width), np.int64)
            distinct, first = np.unique(which, return_index=True)
            rows[first, worker] = bit  # what is pushed for a row in one call is added up
            target = self._read_into(worker, which) if kind == 3 else 0
            remember = self.random.choice((0, 0, 1, 2))
            keys = self.keys[which].tobytes()
            call = client.push_rows(table, keys, rows.tobytes(), target, not last, remember)
            pieces.append((bit, distinct))
        self.contributed(worker, call, pieces)
        return call

    def contributed(self, worker: int, call: int, pieces: list[tuple[int, Ints]]) -> None:
        """The worker's clock goes on; without pieces by a tick."""
        made = self.made[worker][-1].copy()
        for bit, which in pieces:
            made[which] |= bit
            self.since_drop[worker][which] |= bit
            self.last_clock[worker][which] = len(self.made[worker])
        self.made[worker].append(made)
        if pieces:
            self.contributions.append(_Contribution(worker, call, pieces))

    def pull(self, client: _core.ClientMachine, table: int, worker: int) -> int:
        everything = np.arange(self.count)
        which = self.lists[worker][self.random.randrange(3)]
        which = everything if self.random.random() < 0.25 else which
        target = self._read_into(worker, which)
        remember = self.random.random() < 0.7
        if self.random.random() < 0.1:
            client.reserve(table, self.random.randrange(8 * self.count))
        return client.pull_rows(table, self.keys[which].tobytes(), target, remember)

    def _read_into(self, worker: int, which: Ints) -> int:
        out = np.full((len(which), self.width), -1, np.int64)
        self.readings[worker] = _Reading(which, out)
        return out.ctypes.data if len(which) else 0

    def may_drop(self, client: _core.ClientMachine, table: int, worker: int) -> None:
        """The worker drops some rows that are its own, or none."""
        if not self.drops or self.random.random() < 0.7:
            return
        mine = np.flatnonzero(self.owners == worker)
        which = mine[[self.random.random() < 0.5 for _ in mine]]
        if len(which):
            client.drop_rows(table, self.keys[which].tobytes())
            self.since_drop[worker][which] = 0

    def died(self, worker: int, client: _core.ClientMachine) -> None:
        """What was committed until then is sure; of the rest a slot has all or nothing."""
        for each in self.contributions:
            if each.worker == worker and each.call:
                each.sure, each.call = client.done(each.call), 0
        self.readings[worker] = None

    # ---- what they must find ----

    def check_read(self, me: int, clock: int, died: list[bool], left: list[bool]) -> None:
        reading = self.readings[me]
        if reading is None:
            return
        which = reading.which
        for other in range(self.workers):
            got = reading.out[:, other]
            wrong = got & ~self.made[other][-1][which]
            self._expect(not wrong.any(), "a push counted twice, or never made", me)
            if self.expires and other == me and not died[me]:
                self._check_recent(me, clock, which, got)
            if self.expires:
                continue
            plain = self.owners[which] == -1
            before = self.seen[me, which, other]
            self._expect(not (before & ~got)[plain].any(), "a read went back", me)
            self.seen[me, which, other] = got
            if died[other]:
                continue
            if other == me:
                mine = self.owners[which] == me
                exact = (got == self.since_drop[me][which])[mine].all()
                self._expect(bool(exact), "a dropped row came back, or a new one is gone", me)
            self._check_bound(me, other, clock, which[plain], got[plain], left[other])

    def _check_bound(
        self, me: int, other: int, clock: int, which: Ints, got: Ints, left: bool
    ) -> None:
        made = self.made[other]
        if self.staleness < 0:
            own = other != me or bool((got == made[-1][which]).all())
            self._expect(own, "a pull lacks the caller's own push", me)
            return
        bound = max(0, clock - self.staleness)
        if len(which) and not left:
            self._expect(len(made) > bound, "a pull did not wait", me)
        needed = made[min(bound, len(made) - 1)][which]
        self._expect(not (needed & ~got).any(), "a pull is too stale", me)
        if self.staleness == 0:
            exact = made[min(clock, len(made) - 1)][which]
            self._expect(bool((got == exact).all()), "a pull holds another round", me)

    def _check_recent(self, me: int, clock: int, which: Ints, got: Ints) -> None:
        """What the caller pushed a short while ago is there; others' clocks may be behind."""
        if self.staleness < 0:
            return
        sure = clock - _EXPIRY + 1 + self.staleness + 1
        if sure <= clock:
            recent = self.made[me][-1] & ~self.made[me][max(0, min(sure, len(self.made[me]) - 1))]
            self._expect(not (recent[which] & ~got).any(), "a row has gone too early", me)

    def check_end(self, machines: list[_core.ShardMachine], table: int, died: list[bool]) -> None:
        value = np.zeros((self.count, self.width), np.int64)
        place = {int(key): i for i, key in enumerate(self.keys)}
        there = []
        for machine in machines:
            keys, rows = machine.rows(table)
            found = [place[int(key)] for key in np.frombuffer(keys, np.uint64)]
            value[found] = np.frombuffer(rows, np.int64).reshape(-1, self.width)
            there += found
        self._expect(len(there) == len(set(there)), "a row is there twice", 0)
        for worker in range(self.workers):
            extra = value[:, worker] & ~self.made[worker][-1]
            self._expect(not extra.any(), "a push counted twice", worker)
        if self.expires:
            self._check_gone(np.array(there, dtype=np.int64), died)
            return
        for each in self.contributions:
            self._check_whole(each, value[:, each.worker], died[each.worker])

    def _check_gone(self, there: Ints, died: list[bool]) -> None:
        if any(died):
            return  # whose clock stands still
        end = min(len(made) - 1 for made in self.made)
        old = self.last_clock.max(axis=0) + _EXPIRY + 1 < end
        self._expect(not old[there].any(), "a row that rests is still there", 0)

    def _check_whole(self, given: _Contribution, value: Ints, died: bool) -> None:
        """All of it, or of one that was under way when its worker died, per slot all or nothing."""
        has, where = [], []
        for bit, which in given.pieces:
            plain = which[self.owners[which] == -1]
            has.append((value[plain] & bit) != 0)
            where.append(self.slots[plain])
        found, slots = np.concatenate(has), np.concatenate(where)
        if not died or given.sure:
            self._expect(bool(found.all()), "a committed push is not there", given.worker)
        for slot in np.unique(slots[found]):
            whole = bool(found[slots == slot].all())
            self._expect(whole, "a slot has a part of a push", given.worker)

    def _expect(self, kept: bool, promise: str, worker: int) -> None:
        if not kept:
            raise Broken(f"{promise} (worker {worker}, table {self.NAME!r})")


def _slot_of(keys: Any) -> Any:
    """As `slot_of(hash_of(key))` of core/store/rows.h."""
    mixed = keys ^ keys >> np.uint64(30)
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(60)).astype(np.int64)
