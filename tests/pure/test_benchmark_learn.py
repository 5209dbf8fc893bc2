# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of `commute learn` reads out of commands, and what it judges by it."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import learn
from benchmarks.failure import BenchError
from benchmarks.figures import judge
from benchmarks.rounds import Cell, CellResult, Round
from benchmarks.session import Options

VW_SAID = """\
0.555413 0.558180        65536        65536.0        -1.0000        -1.8985       40

finished run
number of examples = 100000
weighted example sum = 100000.000000
average loss = 0.555102
best constant = -0.849728
best constant's loss = 0.610432
total feature number = 4000000
"""


def seconds_of(cell: Cell, **seconds: float) -> CellResult:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return CellResult(cell, 1, [Round(named, 0.0, 0.0, True)])


def test_the_loss_of_vw_is_the_average_of_all_examples() -> None:
    """Not a progress line, nor the constant's loss; and not of fewer examples than there are."""
    assert learn.average_loss(VW_SAID, 100_000) == 0.555102
    with pytest.raises(BenchError, match="did not say its loss on 99,999 examples"):
        learn.average_loss(VW_SAID, 99_999)
    with pytest.raises(BenchError, match=r"n\.a\."):
        learn.average_loss(VW_SAID.replace("0.555102", "n.a."), 100_000)


OUR_COMMANDS = {"commute_whole": 2.0, "commute_two_passes": 3.0, "commute_start": 0.75}
VW_COMMANDS = {"vw_ftrl_whole": 3.0, "vw_ftrl_two_passes": 5.5, "vw_ftrl_start": 0.25}
COMMANDS = OUR_COMMANDS | VW_COMMANDS


def test_passes_from_the_cache_are_what_commands_take_longer() -> None:
    """On both sides; the commands themselves stay in the results."""
    first = learn.without_start(seconds_of(learn.CACHED, **COMMANDS))
    second = learn.second_pass(first)

    taken = first.rounds[0].seconds
    assert (taken["commute"], taken["vw ftrl"], taken["commute whole"]) == (1.25, 2.75, 2.0)
    taken = second.rounds[0].seconds
    assert (second.cell, taken["commute"], taken["vw ftrl"]) == (learn.SECOND, 1.0, 2.5)


def test_the_table_shows_what_was_measured() -> None:
    """Rates of passes, times of commands; and "noise" where there was nothing else."""
    first = {"commute": 2.0, "commute_single": 2.5, "vw": 4.0, "vw_ftrl": 4.0, "vw_ftrl_0.1": 5.0}
    cached = learn.without_start(seconds_of(learn.CACHED, **COMMANDS))
    losses = {"commute": 0.5, "vw": 0.51, "vw ftrl": 0.55, "vw ftrl 0.1": 0.5064}
    run = {
        learn.FIRST: seconds_of(learn.FIRST, **first),
        learn.CACHED: cached,
        learn.SECOND: learn.second_pass(cached),
        learn.LOGLOSS: learn.judged_losses(losses),
        learn.MEMORY: learn.judged_sizes({"commute": 28.0}),
    }
    data = {"train": {"bytes": 303e6, "distinct_ids": 3_000_000}}
    facts = {
        "versions": {"vw": "9"},
        "data": {**data, "test": {"true_model": {"logloss": 0.45}}},
        "learning_rates": {"commute": 350_000.4},
    }

    text = "\n".join(learn.table(run, facts))

    assert "500,000" in text and "2.0 [2.0-2.0]" in text  # the first pass
    assert "800,000" in text and "commute whole: 2000 ms" in text  # the first from the cache
    assert "1,000,000" in text and "2.5 [2.5-2.5]" in text  # the second
    assert "0.5064" in text and "28.0" in text and "commute 350,000/s" in text
    noisy = [dataclasses.replace(run[learn.FIRST].rounds[0], kept=False)]
    run[learn.FIRST] = CellResult(learn.FIRST, 1, noisy)
    assert "noise" in "\n".join(learn.table(run, facts))


def test_what_the_figures_ask_for() -> None:
    """Each is met by a hair; then ours is made a little slower, worse or larger everywhere."""

    def met(worse: float) -> list[bool]:
        first = {"vw_ftrl": 3.0, "commute": 2.0 * worse, "commute_single": 2.3 * worse}
        losses = {"commute": 0.5064 * worse, "vw": 0.51, "vw ftrl": 0.55, "vw ftrl 0.1": 0.5064}
        results = [
            seconds_of(learn.FIRST, **first),
            seconds_of(learn.FIRST_ALONE, **first),
            seconds_of(learn.SECOND, commute=1.4 * worse, vw_ftrl=2.8),
            learn.judged_losses(losses),
            learn.judged_sizes({"commute": 40.0 * worse}),
        ]
        verdicts = judge(learn.REQUIREMENTS, [{result.cell: result for result in results}])
        return [verdict.met for verdict in verdicts]

    assert met(1.0) == [True] * 5
    assert met(1.01) == [False] * 5


def test_no_figure_is_required_twice() -> None:
    rows = learn.REQUIREMENTS

    assert len({(row.peer, row.cell) for row in rows}) == len(rows)


def test_the_order_of_a_round_rotates() -> None:
    """Everyone is first once; no round is made again where noise is kept."""
    order: list[str] = []

    def taker(name: str) -> Any:
        return lambda: order.append(name) or 1.0

    result = learn.interleave(
        Cell(2, 0, "first pass"),
        {name: taker(name) for name in "abc"},
        Options(rounds=3, keep_noisy=True),
        lambda text: None,
    )

    assert "".join(order) == "abcbcacab"
    assert [r.seconds["a"] for r in result.kept] == [1.0] * 3


def test_a_command_that_fails_is_shown() -> None:
    argv = (sys.executable, "-c", "import sys; print('all is lost'); sys.exit(3)")

    with pytest.raises(BenchError, match=r"ended with 3:\nall is lost"):
        learn.run_command(argv)


def test_data_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again where a file is missing or short, or where the settings are others."""
    for name, value in (("EXAMPLES", 300), ("TEST_EXAMPLES", 100), ("FEATURES", 5000)):
        monkeypatch.setattr(learn, name, value)
    files = learn.Files(tmp_path / "data")
    facts_path = tmp_path / "data" / "train.vw.json"
    facts = learn.make_data(files, lambda text: None)
    written = files.train.stat().st_mtime_ns

    assert learn.make_data(files, lambda text: None) == facts
    assert files.train.stat().st_mtime_ns == written
    assert files.train.read_text().startswith(files.few.read_text())
    assert len(files.few.read_text().splitlines()) == learn.FEW_LINES
    assert len(files.test.read_text().splitlines()) == 100

    (tmp_path / "data" / "train.vw.cache.0-of-2").touch()
    (tmp_path / "data" / "made").mkdir()
    files.clear()
    left = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert left == ["few.vw", "test.vw", "train.vw", "train.vw.json"]

    files.test.write_text("")
    assert not learn.is_complete(files, facts_path)
    learn.make_data(files, lambda text: None)
    assert learn.is_complete(files, facts_path)
    facts_path.write_text(json.dumps({**facts, "seed": 2}))
    assert not learn.is_complete(files, facts_path)
    facts_path.write_text(json.dumps({**facts, "test": None}))
    assert not learn.is_complete(files, facts_path)
