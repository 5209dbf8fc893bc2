# SPDX-License-Identifier: Apache-2.0
"""The examples of collectives and messages as real jobs: one result on any number of ranks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ("token_ring.py", "transpose.py", "kmeans.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def output(job: Callable[..., Any]) -> Callable[..., list[str]]:
    """What an example prints, on so many ranks, in shared memory or over TCP."""

    def run(example: str, ranks: int, *flags: str, shared: str = "1") -> list[str]:
        launcher = ["-m", "commute", "run", "-n", str(ranks)]
        command = [sys.executable, *(launcher if ranks > 1 else []), EXAMPLES / example, *flags]
        ended = job(command, env={"COMMUTE_SHARED_MEMORY": shared}, timeout=50.0).wait()
        assert ended.code == 0, ended.out + ended.err
        return [line.removeprefix("[0] ") for line in ended.out.splitlines()]

    return run


@pytest.mark.parametrize("example", SHORT)
def test_under_fifty_lines(example):
    assert len((EXAMPLES / example).read_text().splitlines()) < 50


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_token_goes_round(output, ranks):
    """Three times, from rank to rank."""
    turns = " ".join(str(rank) for _ in range(3) for rank in range(ranks))

    assert output("token_ring.py", ranks)[-1] == f"{3 * ranks} steps, taken by ranks {turns}"


@pytest.mark.parametrize(("ranks", "shared"), [(1, "1"), (3, "1"), (4, "0")])
def test_the_transpose_is_numpys(output, ranks, shared):
    """It compares itself, on all ranks, and ends badly where it is not."""
    shape = (30 * ranks, 20 * ranks)

    assert output("transpose.py", ranks, shared=shared) == [
        f"{shape} transposed on {ranks} ranks, as NumPy's: True"
    ]


def test_kmeans_finds_the_corners(output):
    """On any number of ranks the same clusters, around the three corners the points came from."""
    found = output("kmeans.py", 4)
    centres = [[float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in found]
    counts = [int(line.split()[0]) for line in found]

    assert found == output("kmeans.py", 1)
    assert sum(counts) == 3000
    np.testing.assert_allclose(centres, [[0, 0], [3, 5], [6, 0]], atol=0.2)


def plain_heat(cells: int, steps: int) -> np.ndarray:
    """The plate of examples/stencil.py in one array, without a block in sight."""
    whole = np.zeros((cells + 2, cells + 2))
    whole[0] = 100.0
    for _ in range(steps):
        beside = whole[:-2, 1:-1] + whole[2:, 1:-1] + whole[1:-1, :-2] + whole[1:-1, 2:]
        mine = whole[1:-1, 1:-1]
        whole[1:-1, 1:-1] = mine + 0.2 * (beside - 4.0 * mine)
    return whole[1:-1, 1:-1].copy()


@pytest.mark.parametrize(("ranks", "shared"), [(1, "1"), (3, "1"), (4, "0"), (6, "1")])
def test_the_plate_is_that_of_one_process(output, capsys, ranks, shared):
    """Bit for bit, on 1 x 3, 2 x 2 and 2 x 3 ranks, with blocks of different sizes."""
    cells, steps = 61, 150
    spec = importlib.util.spec_from_file_location("stencil", EXAMPLES / "stencil.py")
    assert spec is not None and spec.loader is not None
    stencil = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stencil)
    stencil.show(plain_heat(cells, steps))
    wanted = capsys.readouterr().out.splitlines()
    got = output("stencil.py", ranks, "--cells", str(cells), "--steps", str(steps), shared=shared)

    assert re.fullmatch(r"mean \d+\.\d{6}, digest [0-9a-f]{16}", got[-1])
    assert [line.rstrip() for line in got] == [line.rstrip() for line in wanted]
