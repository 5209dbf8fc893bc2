# SPDX-License-Identifier: Apache-2.0
"""A token goes round a ring of ranks, and whoever has it works.

    commute run -n 4 examples/token_ring.py

Mutual exclusion as in the token rings of old: only the rank that holds the token may touch what all
share. The token is an array that `recv` waits for and `send` hands on. It counts its steps, and has
a page on which each holder signs, so that in the end one can see that they took turns.
"""

import numpy as np

import commute

ROUNDS = 3


def main() -> None:
    with commute.init() as world:
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        token = np.zeros(1 + ROUNDS * world.size, np.int64)  # steps so far, then signatures
        for turn in range(ROUNDS):
            if turn > 0 or world.rank > 0:  # rank 0 made the token
                take(world, token, before)
            # Here is the work of which no two ranks may do any at the same time.
            token[1 + token[0]] = world.rank
            token[0] += 1
            hand_on(world, token, after)
        if world.rank == 0:
            take(world, token, before)
            print(f"{token[0]} steps, taken by ranks {' '.join(map(str, token[1:]))}")


def take(world: commute.Group, token: np.ndarray, before: int) -> None:
    if world.size > 1:  # alone, one keeps it
        world.recv(token, source=before)


def hand_on(world: commute.Group, token: np.ndarray, after: int) -> None:
    if world.size > 1:
        world.send(token, to=after)


if __name__ == "__main__":
    main()
