# SPDX-License-Identifier: Apache-2.0
"""Ratings by matrix factorization: a row of numbers for each user and each item, in sparse tables.

    python examples/embeddings.py                                   one process
    commute run -n 4 --servers 2 examples/embeddings.py             four workers, two servers
    commute run -n 4 examples/embeddings.py --staleness none        nobody waits for anybody
    python examples/embeddings.py --data ratings.txt                lines of user, item, rating

A rating is the product of its user's row and its item's. Every worker takes its part of each batch,
pulls the rows of the users and items in it, and pushes their gradients; a row begins when it is
first pushed. At staleness 0 the losses are those of one process on the whole batch.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import commute
from training import staleness_of

WIDTH, HIDDEN = 8, 4
USERS, ITEMS, RATINGS, NOISE = 400, 300, 40_000, 0.3
LR, DECAY = 0.05, 0.02
RAW = argparse.RawDescriptionHelpFormatter


class Ratings(NamedTuple):
    users: NDArray[Any]  # any whole numbers: they are the keys
    items: NDArray[Any]
    values: NDArray[Any]

    def of(self, places: NDArray[Any]) -> Ratings:
        return Ratings(*(column[places] for column in self))


def ratings(file: Path | None) -> Ratings:
    """Those of the file; or made up: hidden factors, and noise."""
    if file is not None:
        users, items, values = np.loadtxt(file, ndmin=2).T
        return Ratings(users.astype(np.uint64), items.astype(np.uint64), values)
    rng = np.random.default_rng(1)  # the same on every worker
    users, items = rng.integers(USERS, size=RATINGS), rng.integers(ITEMS, size=RATINGS)
    p, q = (rng.normal(size=(count, HIDDEN)) for count in (USERS, ITEMS))
    exact = 3 + (p[users] * q[items]).sum(axis=1) / 2
    return Ratings(users, items, exact + rng.normal(size=RATINGS) * NOISE)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("--staleness", type=staleness_of, default=0, metavar="0|N|none")
    parser.add_argument("--epochs", type=int, default=20, help="default 20")
    parser.add_argument("--batch", type=int, default=400, help="ratings, of all workers together")
    parser.add_argument("--data", type=Path, metavar="FILE", help="numbers: user item rating")
    parser.add_argument("--losses", default=os.devnull, metavar="FILE.json", help="of each epoch")
    return parser.parse_args()


def main() -> None:
    given = options()
    found = ratings(given.data)
    rng = np.random.default_rng(2)  # all workers draw the same batches
    places = rng.permutation(len(found.values))
    test, train = map(found.of, np.split(places, [len(places) // 10]))
    with commute.init() as world, world.store("ratings", staleness=given.staleness) as store:
        sgd, init = commute.SGD(LR), commute.Normal(std=0.5)  # drawn from seed and key
        users = store.sparse("users", WIDTH, "float64", update=sgd, init=init, seed=1)
        items = store.sparse("items", WIDTH, "float64", update=sgd, init=init, seed=2)
        totals = store.dense("totals", 2, "float64")  # squared errors and ratings, so far
        middle, losses, before = train.values.mean(), [], np.zeros(2)
        for epoch in range(1, given.epochs + 1):
            order, sums = rng.permutation(len(train.values)), np.zeros(2)
            for start in range(0, len(order), given.batch):
                mine = train.of(order[start : start + given.batch][world.rank :: world.size])
                p, user_ticket = users.pull(mine.users, ticket=True)
                q, item_ticket = items.pull(mine.items, ticket=True)
                error = (p * q).sum(axis=1) - (mine.values - middle)
                users.push(user_ticket, error[:, None] * q + DECAY * p)
                items.push(item_ticket, error[:, None] * p + DECAY * q)
                sums += error @ error, len(error)
            totals.push(sums)
            now = totals.pull(fresh=True)
            losses.append(float(np.divide(*(now - before))))
            before = now
            if world.rank == 0:
                print(f"epoch {epoch:2}/{given.epochs}  loss {losses[-1]:.4f}", flush=True)
        store.flush()
        world.barrier()  # now everybody's last push has arrived
        if world.rank == 0:
            guess = (users.pull(test.users) * items.pull(test.items)).sum(axis=1) + middle
            rmse, spread = np.sqrt(np.mean((guess - test.values) ** 2)), test.values.std()
            noise = f"; their noise is {NOISE}" if given.data is None else ""
            print(f"RMSE on ratings never seen: {rmse:.3f} (of the mean {spread:.3f}{noise})")
            print(f"rows: {users.count()} of users, {items.count()} of items")
            Path(given.losses).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
