# SPDX-License-Identifier: Apache-2.0
"""The heat equation on a plate, cut into blocks: each rank has one, and asks its neighbours.

    commute run -n 4 examples/stencil.py

A plate is held at 100 degrees along its upper edge and at 0 along the others. In each step a cell
moves towards the mean of the four cells beside it. Those of other ranks are in the halo, which
`exchange` fills. Every cell is computed by the same expression from the same numbers as on one
rank, so the temperatures are the same, bit for bit, on any number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np

import commute

RATE = 0.2  # of what flows between two cells in a step; beyond 0.25 the scheme is not stable


def main(cells: int, steps: int) -> None:
    with commute.init() as world:
        grid = world.neighbors(squarest(world.size))
        # My rows and columns of the plate; blocks may differ by one where it cannot be cut evenly.
        rows, columns = (
            np.array_split(np.arange(cells), parts)[place]
            for parts, place in zip(grid.shape, grid.coordinates, strict=True)
        )
        block = np.zeros((len(rows) + 2, len(columns) + 2))
        if grid.coordinates[0] == 0:
            block[0] = 100.0
        for _ in range(steps):
            grid.exchange(block)
            mine = block[1:-1, 1:-1]
            beside = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
            block[1:-1, 1:-1] = mine + RATE * (beside - 4.0 * mine)
        # Each rank adds its block to a plate of zeros: numbers stay what they are.
        plate = np.zeros((cells, cells))
        plate[np.ix_(rows, columns)] = block[1:-1, 1:-1]
        world.reduce(plate, root=0)
        if world.rank == 0:
            show(plate)


def squarest(size: int) -> tuple[int, int]:
    """The grid of so many ranks whose sides differ least."""
    rows = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    return rows, size // rows


def show(plate: np.ndarray) -> None:
    shades = " .:-=+*#%@"
    for row in plate[:: max(1, len(plate) // 10)]:
        print("".join(shades[int(t / 100.01 * 10)] * 2 for t in row[:: max(1, len(row) // 20)]))
    print(f"mean {plate.mean():.6f}, digest {hashlib.sha256(plate.tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, default=200, help="along each edge of the plate (200)")
    parser.add_argument("--steps", type=int, default=500, help="of time (500)")
    given = parser.parse_args()
    main(given.cells, given.steps)
