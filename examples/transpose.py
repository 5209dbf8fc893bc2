# SPDX-License-Identifier: Apache-2.0
"""A matrix of which each rank has some rows is transposed: one alltoall.

    commute run -n 4 examples/transpose.py

Rank r has a band of rows, cut into as many square blocks as there are ranks. Block c of its band
belongs into band c of the transpose, at place r: so every rank sends one block to each, which is
what alltoall does. What is left is to transpose each block where it is.
"""

import numpy as np

import commute

SIDE = 4  # of a block


def main() -> None:
    with commute.init() as world:
        band = matrix(world.size)[world.rank * SIDE : (world.rank + 1) * SIDE]
        blocks = np.stack(np.split(band, world.size, axis=1))  # (size, SIDE, SIDE)
        arrived = world.alltoall(blocks)
        turned = np.concatenate([block.T for block in arrived], axis=1)  # my band of the transpose

        whole = world.allgather(turned).reshape(SIDE * world.size, -1)
        if world.rank == 0:
            right = np.array_equal(whole, matrix(world.size).T)
            print(f"{len(whole)} x {len(whole)} transposed {'rightly' if right else 'WRONGLY'}")


def matrix(ranks: int) -> np.ndarray:
    """The whole matrix, which a real program would not have in one place."""
    return np.arange((SIDE * ranks) ** 2, dtype=np.float64).reshape(SIDE * ranks, -1)


if __name__ == "__main__":
    main()
