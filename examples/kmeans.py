# SPDX-License-Identifier: Apache-2.0
"""k-means on points that lie on several ranks: two allreduces per step.

    commute run -n 4 examples/kmeans.py

Each rank has a share of the points. It finds the nearest centre of each, adds the points of every
cluster up, and counts them; sums and counts of all ranks together give the new centres, the same
bits on every rank. Points never travel.
"""

import numpy as np

import commute

CLUSTERS, POINTS, STEPS = 3, 3000, 20


def points_of(rank: int, size: int) -> np.ndarray:
    """This rank's share of points around three corners of a triangle."""
    rng = np.random.default_rng(7)
    corners = np.array([[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]])
    points = corners[np.arange(POINTS) % CLUSTERS] + rng.standard_normal((POINTS, 2))
    return points[rank::size]


def main() -> None:
    with commute.init() as world:
        points = points_of(world.rank, world.size)
        centres = world.broadcast(points[:CLUSTERS].copy())  # all begin from rank 0's first points
        for _ in range(STEPS):
            distances = ((points[:, None] - centres) ** 2).sum(axis=2)
            nearest = np.eye(CLUSTERS)[distances.argmin(axis=1)]
            sums, counts = world.allreduce(nearest.T @ points), world.allreduce(nearest.sum(axis=0))
            centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        if world.rank == 0:
            for centre, count in sorted(zip(centres.round(2).tolist(), counts, strict=True)):
                print(f"{int(count)} points around {centre}")


if __name__ == "__main__":
    main()
