# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_store_saving.py do: the first argument says which part, the second where.

A part ends by saying `fine`, with what the tables hold; one that finds a wrong value raises.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from saying import ready, say, wait_for_file

import commute

KEYS = np.arange(5000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def declared(world, name="main"):
    store = world.store(name, deterministic=True)
    store.dense("w", (70_000,), update=commute.Momentum(lr=0.1))
    store.sparse("e", 9, update=commute.Adam(lr=0.1), init=commute.Normal(0.0, 1.0))
    return store


def train(store, world, steps):
    """The round is the same for any number of ranks: each pushes its part of the rows."""
    for step in steps:
        rng = np.random.default_rng(step)
        keys = rng.choice(KEYS, 3000, replace=False)
        rows = rng.integers(-8, 9, size=(3000, 9)).astype("float32")
        mine = slice(world.rank, None, world.size)
        store.push("e", keys[mine], rows[mine])
        dense = rng.integers(-8, 9, size=70_000).astype("float32")
        store.push("w", dense if world.rank == 0 else np.zeros_like(dense))


def digest(store):
    """Of everything a store holds, and the clocks."""
    found = hashlib.sha256(store.pull("w").tobytes())
    found.update(store.pull("e", KEYS).tobytes())
    clocks = [table.info().clock for table in store.tables()]
    return [found.hexdigest(), store["e"].count(), clocks]


def save(world, path):
    store = declared(world)
    train(store, world, range(3))
    store.save(path)
    saved = digest(store)
    train(store, world, range(3, 5))
    say(me=world.rank, fine=True, saved=saved, later=digest(store))


def load(world, path):
    store = declared(world, "another name")
    store.load(path)
    saved = digest(store)
    train(store, world, range(3, 5))
    say(me=world.rank, fine=True, saved=saved, later=digest(store))


def slowly(world, path):
    """Saves; then saves again, and stops in the middle, all segments written but one."""
    from commute.store.segments import SegmentWriter

    store = declared(world)
    train(store, world, range(3))
    store.save(path)
    say(me=world.rank, saved=digest(store))
    train(store, world, range(3, 4))
    finish = SegmentWriter.finish

    def waits(self, about):
        ready(world)
        if world.rank == 0:
            wait_for_file("never")
        return finish(self, about)

    SegmentWriter.finish = waits
    store.save(path)


def main():
    part, path = sys.argv[1:]
    with commute.init() as world:
        {"save": save, "load": load, "slowly": slowly}[part](world, path)


main()
