# SPDX-License-Identifier: Apache-2.0
"""What each rank of `commute doctor`'s self-test runs: what was chosen and why, then figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import numpy as np

import commute
from commute import _core, plan
from commute._cores import usable_cores
from commute.watch.measure import allreduce_seconds, copy_seconds

_SIZES = ((8, "8 B"), (64 << 10, "64 KB"), (16 << 20, "16 MB"))


def main(seconds: float) -> None:
    with commute.init(join_timeout=30, timeout=30) as world:
        _check(world)
        if world.rank == 0:
            for name, choice in _chosen(world):
                print(f"{name:<16}{choice}")
            print("allreduce, broadcast, allgather, reduce_scatter, send and recv agree with NumPy")
        for nbytes, label in _SIZES:
            by = plan.choose("allreduce", world.size, nbytes, world._wiring.place)
            took = allreduce_seconds(world, nbytes, seconds / len(_SIZES) / 2)
            if world.rank == 0:
                copy = copy_seconds(nbytes)
                rate = f"{nbytes / took / 1e9:6.2f} GB/s, a memory copy {nbytes / copy / 1e9:.2f}"
                print(f"allreduce {label:>6} by {by:<18}{took * 1e6:8.1f} us  {rate}")


def _chosen(world: commute.Group) -> Iterator[tuple[str, str]]:
    """What the ranks use, and why."""
    if world._wiring.place == "memory":
        yield "link", "shared memory: the ranks have passed each other their outboxes"
    elif os.environ.get("COMMUTE_SHARED_MEMORY") == "0":
        yield "link", "TCP over loopback: COMMUTE_SHARED_MEMORY=0 turns shared memory off"
    else:
        yield "link", "TCP over loopback: memory cannot be shared here, a warning says why"
    cores, ranks = usable_cores(), world.local_size
    enough = f"{cores:g} usable cores for {ranks} ranks"
    first = "spins 1 us, then " if cores >= ranks else ""
    yield "waiting", f"{first}gives way for 200 us, then sleeps: {enough}"
    yield "kernels", f"{_core.kernel_set()}: the best this processor can run"


def _check(world: commute.Group) -> None:
    mine = np.arange(1000, dtype=np.float32) + world.rank
    everyone = np.arange(1000, dtype=np.float32) + np.arange(world.size)[:, None]
    expected = everyone.sum(axis=0)
    for got, wanted in (
        (world.allreduce(mine.copy()), expected),
        (world.broadcast(mine.copy(), root=1), everyone[1]),
        (world.allgather(mine), everyone),
        (world.reduce_scatter(np.stack([mine] * world.size)), expected),
    ):
        np.testing.assert_array_equal(got, wanted)
    if world.rank == 0:
        world.send(mine, to=1)
    elif world.rank == 1:
        np.testing.assert_array_equal(world.recv(np.empty_like(mine), source=0), everyone[0])


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0)
