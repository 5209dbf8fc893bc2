# SPDX-License-Identifier: Apache-2.0
"""The transpose of a matrix whose rows lie on several ranks: one alltoall.

    commute run -n 4 examples/transpose.py

Each rank has a band of rows and wants the same band of columns. It cuts its band into one block for
each rank and turns every block on its side; alltoall hands the blocks out, and those that come in
are put side by side. Every element travels once, straight to where it belongs.
"""

import numpy as np

import commute

ROWS, COLUMNS = 30, 20  # for each rank


def band_of(rank: int, size: int) -> np.ndarray:
    """The rows of this rank; any rank can compute those of any other."""
    rng = np.random.default_rng(rank)
    return rng.standard_normal((ROWS, COLUMNS * size))


def transpose(world: commute.Group, band: np.ndarray) -> np.ndarray:
    """My band of rows of the transpose, from my band of rows of the matrix."""
    rows, columns = band.shape[0], band.shape[1] // world.size
    blocks = band.T.reshape(world.size, columns, rows)  # block r is for rank r
    came: np.ndarray = world.alltoall(blocks)  # block r is from rank r
    return came.transpose(1, 0, 2).reshape(columns, rows * world.size)


def main() -> None:
    with commute.init() as world:
        turned = transpose(world, band_of(world.rank, world.size))
        whole = np.concatenate([band_of(rank, world.size) for rank in range(world.size)])
        mine = slice(world.rank * COLUMNS, (world.rank + 1) * COLUMNS)
        right = world.allreduce(np.array([np.array_equal(turned, whole.T[mine])]), "and")[0]
        if world.rank == 0:
            print(f"{whole.shape} transposed on {world.size} ranks, as NumPy's: {bool(right)}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
