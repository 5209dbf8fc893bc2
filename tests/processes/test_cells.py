# SPDX-License-Identifier: Apache-2.0
"""Every collective against NumPy between processes, in shared memory and over TCP: see cells.py.

One job per number of ranks runs all its cells. They are those of a seeded cover; `--all` has the
rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cells import LINKS, SIZES, covered, fits, in_full, written

PROGRAM = Path(__file__).parent / "programs" / "covered.py"
SHARED_MEMORY = {"shared": "1", "tcp": "0"}


@pytest.fixture
def run(job, tmp_path):
    """Runs cells on `size` ranks, each of which must come through all of them."""

    def whole(link, size, cells, seed, timeout):
        listed = tmp_path / "cells.json"
        listed.write_text(written(cells))
        env = {
            "COMMUTE_RECORDS": str(tmp_path),
            "COMMUTE_SHARED_MEMORY": SHARED_MEMORY[link],
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "commute", "run", "-n", str(size)]
        ended = job([*command, PROGRAM, listed, str(seed)], env=env, timeout=timeout).wait()

        assert ended.code == 0, ended.out + ended.err
        assert ended.out.count(f"{len(cells)} cells ok on") == size, ended.out + ended.err

    return whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("link", LINKS[1:])
def test_a_cover(run, run_seed, link, size):
    """Each pair of values that can come together does, in the cells of all sizes."""
    cells = [cell for cell in covered(link, run_seed) if cell.ranks == size]

    assert cells
    run(link, size, cells, run_seed, timeout=55.0)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("link", LINKS[1:])
def test_all(run, seed, link, size, way):
    """The whole product."""
    if not fits(link, {"way": way, "ranks": size}):
        pytest.skip("the algorithm needs ranks that share memory")
    run(link, size, list(in_full(link, ranks=size, way=way)), seed, timeout=160.0)
