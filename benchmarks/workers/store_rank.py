# SPDX-License-Identifier: Apache-2.0
"""One worker of commute's store, through its public interface. Argument: socket.

Staleness 0, the default: an exchange is a round of all workers, and its sum is the same for all.
"""

from functools import partial
from typing import Any

import commute
from benchmarks.workers.exchanges import Exchange, Keeps, serve
from benchmarks.workers.turns import Array


class CommuteStore:
    keeps = Keeps.ROUNDS

    def __init__(self, world: commute.Group) -> None:
        self.rank, self.size = world.rank, world.size
        self.version = f"commute {commute.__version__}"
        self.barrier = world.barrier
        self._store = world.store("bench", staleness=0)
        self._tables: dict[str, Any] = {}

    def declare(self, table: str, bytes: int) -> None:
        self._tables[table] = self._store.dense(table, (bytes // 4,), "float32")

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        return partial(self._tables[table].push_pull, source, out=result)


if __name__ == "__main__":
    with commute.init() as world:
        serve(CommuteStore(world))
