# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_cells.py do: each cell of a file against NumPy, one after the other.

covered.py FILE SEED
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import commute

sys.path.append(str(Path(__file__).parents[2]))  # for what several rings use

from cells import check, read


def main():
    path, seed = sys.argv[1:]
    cells = read(Path(path).read_text())
    with commute.init(timeout=30.0) as world:
        shares = os.environ.get("COMMUTE_SHARED_MEMORY") == "1" and world.size > 1
        assert (world._wiring.place == "memory") == shares
        for number, cell in enumerate(cells):
            check(world, cell, number, int(seed))
        print(f"{len(cells)} cells ok on {world.rank}", flush=True)


if __name__ == "__main__":
    main()
