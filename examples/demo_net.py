# SPDX-License-Identifier: Apache-2.0
"""The net and the collectives: four workers train through two servers, and one of them dies.

    python examples/demo_net.py        (or make demo-net)

starts examples/net_numpy.py, and then itself three times: every collective against NumPy,
algorithms against sizes, and a job in which one rank is killed so that you see what its peers are
told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import commute
from commute.watch.measure import allreduce_seconds, copy_seconds

RANKS = 4
SIZES = ((8, "8 B"), (1 << 10, "1 KB"), (64 << 10, "64 KB"), (1 << 20, "1 MB"), (16 << 20, "16 MB"))
# The first two need shared memory between all ranks.
ALGORITHMS = ("one-shot", "two-shot", "ring", "tree", "halving-doubling", "gather-to-root")
SECONDS_PER_CELL = 0.25


def main() -> int:
    print(f"commute {commute.__version__}: {RANKS} ranks on this machine\n", flush=True)
    print(
        "1. A net learns digits: four workers push gradients to two servers and pull weights back"
    )
    sys.stdout.flush()
    if code := train():
        print(f"this part ended with exit code {code}, expected 0")
        return 1
    print(flush=True)
    for title, part in (
        ("2. Every collective against NumPy", "check"),
        ("3. Allreduce of float32: microseconds, and GB/s of the array", "measure"),
        ("4. Rank 2 is killed with -9; what a survivor reads", "kill"),
    ):
        print(title, flush=True)
        code = start(part)
        expected = 0 if part != "kill" else 128 + signal.SIGKILL
        if code != expected:
            print(f"this part ended with exit code {code}, expected {expected}")
            return 1
        print(flush=True)
    print(
        "Next: README.md, docs/parameter-server.md, examples/staleness.py, and `commute show plan"
    )
    print("ring --ranks 4` for what the ring really does; `make bench` measures against the peers.")
    return 0


def train() -> int:
    """The net, as a job whose output is ours: on a terminal its progress line lives."""
    net = Path(__file__).with_name("net_numpy.py")
    command = [sys.executable, "-m", "commute", "run", "-n", str(RANKS), "--servers", "2", str(net)]
    # One thread of BLAS per worker: there are more workers than cores already.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, env={**os.environ, **threads}).returncode


def start(part: str) -> int:
    """This file again, as a job of four ranks; its output, without the launcher's last word."""
    command = [sys.executable, "-m", "commute", "run", "-n", str(RANKS), __file__, part]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print("  " + line.partition("] ")[2], end="", flush=True)
        return job.wait()


# ---- what the ranks do ----


def check(world: commute.Group) -> None:
    mine = np.arange(1000, dtype=np.float32) + world.rank
    everyone = np.stack([np.arange(1000, dtype=np.float32) + rank for rank in range(world.size)])
    total = everyone.sum(axis=0)

    def same(name: str, got: object, expected: object) -> None:
        np.testing.assert_array_equal(got, expected)
        if world.rank == 0:
            print(f"{name:<16} ok")

    for op, expected in (
        ("sum", total),
        ("mean", total / world.size),
        ("prod", everyone.prod(axis=0)),
        ("min", everyone.min(axis=0)),
        ("max", everyone.max(axis=0)),
    ):
        same(f"allreduce {op}", world.allreduce(mine.copy(), op), expected)
    same("broadcast", world.broadcast(mine.copy(), root=2), everyone[2])
    reduced = world.reduce(mine.copy(), root=1)
    same("reduce", reduced, total if world.rank == 1 else mine)
    same("allgather", world.allgather(mine), everyone)
    blocks = np.repeat(mine[None], world.size, axis=0)
    same("reduce_scatter", world.reduce_scatter(blocks), total)
    gathered = world.gather(mine, root=3)
    same("gather", gathered, everyone if world.rank == 3 else None)
    same("scatter", world.scatter(everyone if world.rank == 0 else None), mine)
    same("alltoall", world.alltoall(blocks), everyone)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    handle = world.send_async(mine, to=after)
    got = world.recv(np.empty_like(mine), source=before)
    handle.wait()
    same("send, recv", got, everyone[before])
    same("sendrecv", world.sendrecv(mine, after, before), everyone[before])
    world.barrier()
    same("barrier", 0, 0)


def measure(world: commute.Group) -> None:
    say = print if world.rank == 0 else lambda *_, **__: None
    # First what a plain call gets, which also takes the shortest way through Python.
    names = [None, *(name for name in ALGORITHMS if works(world, name))]
    titles = [name or "plain call" for name in names]
    say(f"{'':>6}" + "".join(f"{title:>18}" for title in (*titles, "a memory copy")))
    for nbytes, label in SIZES:
        say(f"{label:>6}", end="", flush=True)
        for name in names:
            say(cell(allreduce_seconds(world, nbytes, SECONDS_PER_CELL, name), nbytes), end="")
        copied = copy_seconds(nbytes)
        world.barrier()
        say(cell(copied, nbytes), flush=True)


def works(world: commute.Group, name: str) -> bool:
    """Whether this algorithm can be had here; all ranks get the same answer."""
    try:
        world.allreduce(np.ones(1), algorithm=name)
    except ValueError:
        return False
    return True


def cell(seconds: float, nbytes: int) -> str:
    return f"{seconds * 1e6:11.1f} {nbytes / seconds / 1e9:6.2f}"


def kill(world: commute.Group) -> None:
    x = np.ones(1000, dtype=np.float32)
    for step in range(1000):
        if world.rank == 2 and step == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.allreduce(x)
        except commute.PeerLostError as error:
            if world.rank == 0:
                print(f"{type(error).__name__}: {error}")
                print(f"  rank={error.rank} pid={error.pid} host={error.host!r}")
                print(f"  last_operation={error.last_operation!r}")
            raise SystemExit(0) from None


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with commute.init() as world:
            {"check": check, "measure": measure, "kill": kill}[sys.argv[1]](world)
    else:
        sys.exit(main())
