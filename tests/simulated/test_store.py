# SPDX-License-Identifier: Apache-2.0
"""Stores under a seed, with the shipped machines; see commute.testing.simulate for the promises."""

from __future__ import annotations

import pytest

from commute.testing.simulate import PLANTED, first_broken, main

SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_promises_are_kept(first: int) -> None:
    """Two hundred seeds, of which each replays by `--seed`."""
    broken = {seed: why for seed in range(first, first + 50) if (why := first_broken(seed))}
    assert broken == {}


@pytest.mark.parametrize("bug", PLANTED[1:])
def test_planted_bugs_are_found(bug: str) -> None:
    """The checks can fail: each bug is found within as many seeds."""
    planted = PLANTED.index(bug)
    assert any(first_broken(seed, planted) for seed in range(SEEDS))


@pytest.mark.parametrize("bug", [bug for bug in PLANTED[1:] if bug != "stale cache"])
def test_planted_bugs_are_found_by_rows_alone(bug: str) -> None:
    """The sparse table's checks can fail too; it has no cache."""
    planted = PLANTED.index(bug)
    assert any(first_broken(seed, planted, dense=False) for seed in range(SEEDS))


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_promises_are_kept_by_rows_alone(first: int) -> None:
    """Nothing else holds a worker up, so other orders of events come up."""
    seeds = range(first, first + 50)
    broken = {seed: why for seed in seeds if (why := first_broken(seed, dense=False))}
    assert broken == {}


def test_a_failing_seed_replays(capsys: pytest.CaptureFixture[str]) -> None:
    """The command names the seed, and the seed alone fails in the same way."""
    assert main(["--seeds", "200", "--planted", "lost tick"]) == 1
    said = capsys.readouterr().out
    seed = said.split()[1].rstrip(":")
    assert main(["--seed", seed, "--planted", "lost tick"]) == 1
    assert capsys.readouterr().out == said
    assert main(["--seed", seed]) == 0
