# SPDX-License-Identifier: Apache-2.0
"""Observers under a seed, with the shipped machines: they come, push, are cut off and killed.

Observer n adds 1 to element n of every part with each push, so a value tells how often each counts.
Links break before, during and after delivery; what an old one carried may still arrive beside the
new one. At the end everybody has gone, and one more comes and looks.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from commute import _core

INT64, SUM = 6, 0
PART = 8192  # elements of 64 KB
OBSERVERS = 12
COUNT = PART + OBSERVERS  # the second part is small
MOVES_MAX = 20_000


class Client:
    """One observer, with a link to each shard."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.machine = _core.ClientMachine(number, 1, len(world.shards), 0)
        self.links: list[int] = [world.link(number, shard) for shard in range(len(world.shards))]
        self.stage = 0
        self.call = self.place(-1)
        self.calls: list[int] = []

    def place(self, instead_of: int) -> int:
        return self.machine.declare_table("store/t", self.world.spec, "one", instead_of)

    def act(self) -> None:
        """The next step, if what it waits for is there."""
        if self.stage < 2 and not self.machine.done(self.call):
            return
        if self.stage == 0:
            self.stage, self.call = 1, self.machine.declare("store/t", self.world.spec, 0, 0)
        elif self.stage == 1:
            code, about, _, _ = self.machine.outcome(self.call)
            if code:
                self.stage, self.call = 0, self.place(about)
                return
            self.stage = 2
        else:
            gradient = np.zeros(COUNT, dtype=np.int64)
            gradient[[self.number, PART + self.number]] = 1
            table = self.machine.table_of("store/t")
            self.calls.append(self.machine.push(table, gradient.tobytes(), False))

    @property
    def committed(self) -> int:
        return sum(self.machine.done(call) for call in self.calls)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replay = _core.Replay()
        count = 1 + seed % 3
        self.shards = [_core.ShardMachine(0, i, count, 16, 0, self.replay) for i in range(count)]
        self.spec = _core.TableSpec(INT64, COUNT, _core.Update(SUM), -1, continues=True)
        self.forth: dict[int, tuple[int, int, deque[bytes]]] = {}  # by link: client, shard
        self.back: dict[int, deque[bytes]] = {}
        self.count = 0
        self.clients: dict[int, Client] = {}
        self.bounds: dict[int, tuple[int, int]] = {}  # how often those who went may count

    def link(self, client: int, shard: int) -> int:
        self.count += 1
        self.forth[self.count] = (client, shard, deque())
        self.back[self.count] = deque()
        return self.count

    def come(self, most: int = OBSERVERS - 1) -> None:
        number = len(self.clients) + len(self.bounds)
        if number < most:
            for shard in self.shards:
                shard.on_came(number)
            self.clients[number] = Client(self, number)

    def cut(self, client: Client, shard: int) -> None:
        """A new link; what travelled on the old one arrives in part."""
        old = client.links[shard]
        queue = self.forth[old][2]
        for _ in range(self.random.randrange(len(queue) + 1)):
            queue.pop()
        self.back[old].clear()
        client.machine.on_link(shard, False)
        client.links[shard] = self.link(client.number, shard)
        client.machine.on_link(shard, True)

    def go(self, client: Client, *, well: bool) -> None:
        """Killed, or after a flush; each shard hears of it by itself."""
        if well:
            self.settle()
        del self.clients[client.number]
        self.bounds[client.number] = (client.committed, len(client.calls))
        # A server closes the channels of an observer when it is told that it has gone.
        for link, (number, shard, _) in list(self.forth.items()):
            if number == client.number:
                self.drop(link, shard)
        for shard in self.shards:
            shard.on_gone(client.number)

    def drop(self, link: int, shard: int) -> None:
        self.shards[shard].on_link_down(link)
        del self.forth[link], self.back[link]

    def deliver(self, link: int) -> bool:
        number, at, queue = self.forth[link]
        shard, client = self.shards[at], self.clients[number]
        current = client.links[at] == link
        while current and (message := client.machine.next(at)) is not None:
            client.machine.sent(at)
            queue.append(message)
        while (answer := shard.next(link)) is not None:
            shard.sent(link)
            if current:
                self.back[link].append(answer)
        if queue and (not self.back[link] or self.random.random() < 0.5):
            shard.on_message(link, queue.popleft())
        elif self.back[link]:
            client.machine.on_message(at, self.back[link].popleft())
        else:
            if not current:
                self.drop(link, at)
            return False
        return True

    def settle(self) -> None:
        moved, moves = True, 0
        while moved:
            moved = False
            for client in self.clients.values():
                if client.stage < 2:
                    client.act()
            for link in list(self.forth):
                while link in self.forth and self.deliver(link):
                    moved, moves = True, moves + 1
                    assert moves < MOVES_MAX, "messages go back and forth without end"

    def event(self) -> None:
        chance = self.random.random()
        if chance < 0.01 or not self.clients:
            self.come()
            return
        client = self.random.choice(list(self.clients.values()))
        if chance < 0.016:
            self.go(client, well=self.random.random() < 0.3)
        elif chance < 0.08:
            self.cut(client, self.random.randrange(len(self.shards)))
        elif chance < 0.3:
            client.act()
        elif self.forth:
            self.deliver(self.random.choice(list(self.forth)))

    def values(self) -> list[np.ndarray]:
        """Both parts of the table, as the only observer sees them."""
        (client,) = self.clients.values()
        out = np.zeros(COUNT, dtype=np.int64)
        table = client.machine.table_of("store/t")
        call = client.machine.pull(table, out.ctypes.data, True)
        self.settle()
        assert client.machine.done(call), "a pull of an observer waits"
        return [out[:OBSERVERS], out[PART:]]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_push_counts_once(first: int) -> None:
    """Also over broken channels; of who was killed, what was committed and no more than was sent.

    A seed replays: it alone decides.
    """
    for seed in range(first, first + 50):
        world = World(seed)
        for _ in range(1500):
            world.event()
        for client in list(world.clients.values()):
            world.go(client, well=True)
        world.come(OBSERVERS)  # who looks at it all
        world.settle()
        (last,) = world.clients.values()
        assert last.stage == 2, f"seed {seed}: an observer waits for a maker that is gone"

        for value in world.values():
            for number, (least, most) in world.bounds.items():
                assert least <= value[number] <= most, f"seed {seed}: observer {number}"
        for shard in world.shards:
            shard.compare(world.replay)
        assert world.replay.report().endswith(", equal"), f"seed {seed}"
