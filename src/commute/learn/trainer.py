# SPDX-License-Identifier: Apache-2.0
"""What a worker does: rounds of pull, score, push, until every worker's data is used up.

    round:  a batch of each of my streams
            pull the weights of its features (the shards keep the list: a ticket)
            score every example before it is learned from: progressive validation
            push the gradients, and let the shards forget the list

Free workers (staleness None) that have a server ask for the next round's weights before they learn
from this one's, so that neither waits for the other: what they learn from lacks one batch more.
Not from the first: see AHEAD_FROM.

States of a worker, and what leads to the next:

    reading    rounds with data
    finished   its data is used up, or Ctrl-C came; in step it goes on with empty rounds, for the
               others wait for it at every round. It learns that all have finished from the table
               `finished`, to which each adds 1 once. Free workers (staleness None) need no rounds.
    ended      all have finished. Clocks are made equal by empty rounds; then the test is scored
               and the model saved.

Saving in between (`save_every`) happens at the same round on all workers. Then all go on with
empty rounds until they meet, and count there who has finished: by the table some would see it a
few rounds before others, and no longer come to where these wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from commute.group import Group
from commute.learn.cache import Block, cached
from commute.learn.forecast import Forecast
from commute.learn.linear import learn, scores
from commute.learn.metrics import Metrics
from commute.learn.model import WEIGHTS, declare
from commute.learn.progress import Progress
from commute.learn.reader import BadLines, Batch, Parsed, Stream, ahead
from commute.learn.settings import BATCH_MAX, Plan
from commute.learn.sources import deal
from commute.store.dense import DenseTable
from commute.store.sparse import Ticket

if TYPE_CHECKING:
    from commute._handle import Handle

__all__ = ["Trainer"]

Array = np.ndarray[Any, Any]
TESTED_AT_ONCE = 1000  # examples
AHEAD_FROM = 64_000  # examples of a stream: before, each batch tells much that the next should know


class Ordered(msgspec.Struct, frozen=True):
    """A batch, its distinct features as they travel, and which of them is at each of its places."""

    batch: Batch
    ticket: Ticket
    index: Array


class Asked(msgspec.Struct, frozen=True):
    """A batch, and room for its weights; they are there when `coming` is done, if there is one."""

    it: Ordered
    weights: Array
    coming: Handle | None


class Trainer:
    """A worker's part of a plan."""

    def __init__(self, world: Group, plan: Plan) -> None:
        self._world, self._plan, self._training = world, plan, plan.training
        training = plan.training
        self._store = world.store(
            "learn",
            staleness=training.staleness,
            deterministic=training.deterministic,
        )
        self.table = declare(self._store, training)
        self._finished = None if self._save_rounds else _finished_table(world, training.staleness)
        self._progress = Progress(world, plan, self.table)
        self.bad = BadLines(training.bad_lines)
        self.notes: list[str] = []
        self._read: list[Stream] = []
        self._streams = [_Place(batches) for batches in self._passes()]
        self._rooms: dict[int, Array] = {}
        self._turn = False  # which half of the rooms is next
        # Whether this worker forecasts for all. A model that is loaded has its room.
        self._forecasts = world.rank == 0 and plan.start_from is None
        self._forecast = Forecast()
        self.stopping = False  # set by Ctrl-C
        self.save: Callable[[], object] = lambda: None  # the model, in between
        self.rounds = 0
        self._learned = 0  # examples
        self._course = [0]  # the same, after each round, while it forecasts
        self.seconds = self._begin = 0.0

    def train(self) -> None:
        """All passes; the clocks of the workers are equal afterwards."""
        if self._plan.start_from is not None:
            self._store.load(Path(self._plan.start_from) / WEIGHTS, strict=False)
        self._world.barrier()
        self._begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            for place in self._streams:
                stack.callback(place.close)
            self._rounds()
        self._store.flush()
        self._progress.report(self.rounds, self._passes_done(), last=True)
        self._meet()
        self.seconds = time.monotonic() - self._begin

    def evaluate(self) -> Metrics | None:
        """Scores of the test data; every worker scores a share. None without test data."""
        plan = self._plan
        if not plan.test:
            return None
        pieces = deal(plan.test, self._world.size)[self._world.rank]
        found = Metrics()
        stream = Stream(plan.recipe, pieces, size=lambda _: TESTED_AT_ONCE, bad=self.bad)
        for batch in ahead(iter(stream)):
            ticket, index = self.table.distinct(batch.keys)
            weights = self._space(0, len(ticket))
            self.table.pull(ticket, out=weights[:, None])
            scored = scores(batch, index, weights)
            found.add(scored, batch.labels, batch.weights, self._training.loss)
        return Metrics.of(self._world.allreduce(found.array))

    def save_weights(self, path: str) -> None:
        """All workers, at equal clocks."""
        self._store.save(Path(path) / WEIGHTS)

    @property
    def progress(self) -> Progress:
        return self._progress

    # ---- rounds ----

    def _rounds(self) -> None:
        in_step = self._finished is not None
        finished = False
        following: list[Asked] | None = None
        while True:
            asked = self._ask_next(ahead=False) if following is None else following
            newly = not finished and (not asked or self.stopping)
            finished |= newly
            if finished and not in_step and not self._save_rounds:
                _await(asked)  # their rooms are used again
                break
            if not finished:
                following = self._ask_next(ahead=True) if self._asks_ahead else None
                self._learn(asked)
            else:
                following = []
            self.rounds += 1
            self._store.tick()  # counts where nothing was pushed in this round, and only there
            if in_step and self._all_finished(newly):
                break
            self._progress.report(self.rounds, self._passes_done())
            self._make_room()
            if self._meets_here() and self._count(finished) == self._world.size:
                break

    @property
    def _asks_ahead(self) -> bool:
        """In the beginning every batch tells much that the next one should know."""
        training = self._training
        free = training.staleness is None and training.servers > 0 and not self._save_rounds
        return free and self._learned >= AHEAD_FROM * len(self._streams)

    def _ask_next(self, *, ahead: bool) -> list[Asked]:
        """The next batch of each stream that has one, with its weights; `ahead` they are on their
        way, while those of the round before are in use."""
        batches = [batch for place in self._streams if (batch := place.next()) is not None]
        self._turn = not self._turn
        rooms = count(len(self._streams) * self._turn)
        asked = []
        for it, room in zip(batches, rooms, strict=False):
            weights = self._space(room, len(it.ticket))
            coming = None
            if ahead:
                coming = self.table.pull_async(it.ticket, out=weights[:, None], background=False)
            else:
                self.table.pull(it.ticket, out=weights[:, None])
            asked.append(Asked(it, weights, coming))
        return asked

    def _learn(self, asked: Sequence[Asked]) -> None:
        # All are pulled before any is pushed: together they are one contribution.
        _await(asked)
        for i, (it, weights) in enumerate((each.it, each.weights) for each in asked):
            learn(self._training.model, it.batch, it.index, weights, self._progress.new)
            self.table.push(it.ticket, weights, accumulate=i + 1 < len(asked), last=True)
            self._learned += it.batch.count

    def _space(self, room: int, keys: int) -> Array:
        """Room for weights that is used again: new memory costs as much as filling it."""
        if room not in self._rooms or len(self._rooms[room]) < keys:
            self._rooms[room] = np.empty(keys + keys // 4, np.float32)
        return self._rooms[room][:keys]

    def _make_room(self) -> None:
        """For the features to come."""
        if not self._forecasts:
            return
        self._course.append(self._learned)
        # Some examples that were read are not learned from yet: their features do not count.
        read = sum(stream.examples for stream in self._read)
        share = self._passes_done() * self._learned / max(read, 1)
        if not self._forecast.is_due(share):
            return
        # Others are not where this worker is. Their streams are as long, and so are their rounds.
        course = [self._learned_after(clock) for clock in self.table.clocks().values()]
        share *= sum(course) / len(course) / self._learned
        if self._forecast.is_due(share) and (
            rows := self._forecast.after(share, self.table.count())
        ):
            self.table.reserve(rows)
        self._forecasts = not self._forecast.is_over

    def _learned_after(self, rounds: int) -> int:
        """The examples of so many rounds; of those that are to come, as of the last one."""
        course = self._course
        to_come = max(0, rounds + 1 - len(course))
        return course[rounds - to_come] + to_come * (course[-1] - course[-2])

    def _all_finished(self, newly: bool) -> bool:
        assert self._finished is not None
        count = self._finished.push_pull(np.array([float(newly)]))
        return int(count[0]) == self._world.size

    # ---- meeting ----

    @property
    def _save_rounds(self) -> int:
        """A model is saved every so many rounds; 0: at the end only."""
        training = self._training
        if not training.save_every or self._plan.save is None:
            return 0
        batch = training.batch or BATCH_MAX
        return max(1, training.save_every // (batch * self._stream_count))

    @property
    def _stream_count(self) -> int:
        return self._training.streams or self._training.workers

    def _meets_here(self) -> bool:
        if not self._save_rounds or self.rounds % self._save_rounds:
            return False
        assert self._plan.save is not None
        self.seconds = time.monotonic() - self._begin
        self.save()
        return True

    def _count(self, finished: bool) -> int:
        return int(self._world.allreduce(np.array([float(finished)]))[0])

    def _meet(self) -> None:
        most = int(self._world.allreduce(np.array([self.rounds]), op="max")[0])
        while self.rounds < most:
            self._store.tick()
            self.rounds += 1
        self._store.flush()
        self._world.barrier()

    # ---- data ----

    def _passes(self) -> list[Iterator[Ordered]]:
        """The batches of each of my streams, pass after pass, put in order by a thread ahead."""
        dealt = deal(self._plan.data, self._stream_count)
        each = self._stream_count // self._world.size
        mine = range(self._world.rank * each, (self._world.rank + 1) * each)
        return [ahead(self._stream(dealt[i], i)) for i in mine]

    def _in_order(self, batch: Parsed) -> Ordered:
        return Ordered(batch, *self.table.distinct(batch.keys))

    def _from_cache(self, block: Block) -> Ordered:
        return Ordered(block, self.table.ticket(block.keys), block.index)

    def _passes_done(self) -> float:
        return sum(stream.passes for stream in self._read) / len(self._read)

    def _stream(self, pieces: Any, number: int) -> Iterator[Ordered]:
        training = self._training
        once = Stream(self._plan.recipe, pieces, size=training.batch_after, bad=self.bad)
        self._read.append(once)
        if not training.cache:
            return map(self._in_order, chain.from_iterable(repeat(once, training.epochs)))
        blocks = cached(self._plan, once, number, self._stream_count, self.notes.append)
        return map(self._from_cache, blocks)


def _await(asked: Sequence[Asked]) -> None:
    for each in asked:
        if each.coming is not None:
            each.coming.wait()


def _finished_table(world: Group, staleness: int | None) -> DenseTable | None:
    """How many have finished, in a store of its own: it is not part of the model."""
    if staleness is None or world.size == 1:
        return None
    return world.store("course", staleness=staleness).dense("finished", 1, "float64")


class _Place:
    """Where a stream is."""

    def __init__(self, batches: Iterator[Ordered]) -> None:
        self._batches = batches
        self._ended = False

    def next(self) -> Ordered | None:
        if self._ended:
            return None
        batch = next(self._batches, None)
        self._ended = batch is None
        return batch

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]
