# SPDX-License-Identifier: Apache-2.0
"""The worker of commute's store, with sparse tables. Argument: socket.

Rows of 16 have Adagrad, rows of one FTRL, each in a store of its own, at staleness 0. A push ends
when the server has committed it: push, then flush. With a ticket the same rows were pulled before.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import commute
from benchmarks.workers.rows import Chosen, Counts, resident_bytes, serve
from benchmarks.workers.turns import Array

LR = 0.125
# Steps of Adagrad with gradients of 1 or -1: after n of them the value is their sum times -LR.
STEPS = np.cumsum(1 / np.sqrt(np.arange(1, 1 << 16)))


class Rows:
    def __init__(self, store: commute.Store, width: int, folder: Path) -> None:
        self._store, self._is_narrow = store, width == 1
        update = commute.FTRL(lr=LR) if self._is_narrow else commute.Adagrad(lr=LR)
        self._table = store.sparse("rows", width, update=update)
        self._server = _server()
        self._saved, self._copied = folder / "saved", folder / "copied"

    def given(self, patterns: Array, pushes: Counts) -> Array:
        return patterns

    def holds(self, patterns: Array, pushes: Counts) -> Array:
        if self._is_narrow:  # after one push
            expected: Array = -LR * patterns / (1 + np.abs(patterns))
        else:
            steps = STEPS[pushes.astype(int) - 1].astype(np.float32)
            expected = -LR * patterns * steps[:, None]
        return expected

    def pull(self, chosen: Chosen, out: Array) -> Callable[[], Array]:
        return lambda: self._table.pull(chosen.keys, out=out)

    def push(self, chosen: Chosen, rows: Array, variant: str) -> Callable[[], object]:
        keys = self._table.pull(chosen.keys, ticket=True)[1] if variant == "ticket" else chosen.keys

        def push() -> None:
            self._table.push(keys, rows)
            self._store.flush()

        return push

    def memory(self) -> dict[str, int]:
        return {"in place": resident_bytes(self._server), "info": self._table.info().bytes}

    def prepare(self, variant: str) -> None:
        if variant != "load":
            target = self._saved if variant == "in place" else self._copied
            shutil.rmtree(target, ignore_errors=True)
        os.sync()  # what was written before is not charged to this one

    def save(self, variant: str) -> None:
        match variant:
            case "in place":
                self._store.save(self._saved)
            case "copy" | "copy unsynced":
                shutil.copytree(self._saved, self._copied)
                if variant == "copy":  # as a save does: it is on the disk then
                    _sync(self._copied)
            case "load":
                self._store.load(self._saved)


class Commute:
    def __init__(self, world: commute.Group, folder: Path) -> None:
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {commute.__version__}"
        self.barrier = world.barrier
        self._world, self._folder = world, folder

    def table(self, width: int) -> Rows:
        return Rows(self._world.store(f"rows{width}", staleness=0), width, self._folder)


def _sync(folder: Path) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _server() -> int:
    """The store's server, which this worker has started."""
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [server] = [pid for pid in mine if b"commute.store.server" in _command(pid)]
    return int(server)


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


if __name__ == "__main__":
    with commute.init() as world:
        serve(Commute(world, Path(sys.argv[1]).parent))
