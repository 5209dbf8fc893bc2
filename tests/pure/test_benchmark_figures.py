# SPDX-License-Identifier: Apache-2.0
"""What the benchmark judges: the right cell, the fastest peer, the median of the runs.

And what it lets pass as a result: what the call must leave, written in this very sample.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import four_hosts, one_host, sparse, store
from benchmarks.figures import Requirement, compare, judge, verdict_lines
from benchmarks.rounds import Cell, CellResult, Round
from benchmarks.session import Question
from benchmarks.workers.calls import bytes_given, bytes_left, values_given, values_left
from benchmarks.workers.exchanges import Exchange, Exchanges, Keeps, bounds
from benchmarks.workers.rows import CALL_ROWS, Chosen, Counts, Pulling, Pushing, Resident
from benchmarks.workers.turns import Array, Bound, Call

MB = 1 << 20
CALLS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "barrier")


def result_of(cell: Cell, *rounds: dict[str, float], kept: bool = True) -> CellResult:
    made = [Round(seconds, stolen=0.0, foreign=0.0, kept=kept) for seconds in rounds]
    return CellResult(cell, wanted=len(rounds), rounds=made)


def test_the_fastest_variant_counts_on_both_sides() -> None:
    """Ours may be measured out of place; of the MPIs the fastest in any variant is the peer."""
    seconds = {"commute out of place": 1.0, "openmpi": 3.0, "mpich out of place": 2.0, "impi": 4.0}

    spread = compare(result_of(Cell(2, 16 * MB, "allgather"), seconds), "mpi")

    assert spread is not None
    assert spread.median == 2.0


def test_a_requirement_is_judged_by_the_cell_of_its_call() -> None:
    """Another call of the same ranks and size does not decide it."""
    row = Requirement("mpi", 2, 16 * MB, 0.95, "no slower than MPI", "broadcast")
    slow = result_of(Cell(2, 16 * MB), {"commute": 2.0, "impi": 1.0})
    fast = result_of(row.cell, {"commute": 1.0, "impi": 2.0})

    [verdict] = judge([row], [{slow.cell: slow, fast.cell: fast}])

    assert verdict.met
    assert "broadcast" in verdict_lines([verdict])[0]


@pytest.mark.parametrize(("ratios", "met"), [((2.0, 2.0, 0.5), True), ((2.0, 0.5, 0.5), False)])
def test_the_median_of_the_runs_decides(ratios: tuple[float, ...], met: bool) -> None:
    """One bad run of three is forgiven, two are not."""
    row = Requirement("gloo", 2, 8, 1.5, "1.5 times gloo")
    runs = [{row.cell: result_of(row.cell, {"commute": 1.0, "gloo": r})} for r in ratios]

    [verdict] = judge([row], runs)

    assert verdict.met is met


def test_noise_is_never_met() -> None:
    """A cell without clean rounds has no ratio, whatever was measured."""
    row = Requirement("gloo", 2, 8, 0.1, "")
    noisy = result_of(row.cell, {"commute": 1.0, "gloo": 9.0}, kept=False)

    [verdict] = judge([row], [{row.cell: noisy}])

    assert verdict.ratio is None
    assert not verdict.met


def test_a_limit_is_compared_like_a_peer() -> None:
    """A time that follows from the round's own, such as five times another's, is one more entry."""
    measured = result_of(Cell(8, 1024), {"commute": 4.0, "commute x4": 1.0})

    spread = compare(measured.with_entry("limit", lambda s: 5 * s["commute x4"]), "limit")

    assert spread is not None
    assert spread.median == 1.25


@pytest.mark.parametrize(("seconds", "met"), [(3.3, False), (4.0, True), (4.7, False)])
def test_a_ratio_may_have_to_lie_between_two_bounds(seconds: float, met: bool) -> None:
    """Four times as fast, within 15%, fails on either side; ours need not be called commute."""
    row = Requirement("x1", 8, MB, 3.4, "", "push_pull", ours="x4", ratio_max=4.6)
    measured = result_of(row.cell, {"x1": seconds, "x4": 1.0})

    [verdict] = judge([row], [{row.cell: measured}])

    assert verdict.met is met
    assert "needs 3.400-4.600" in verdict_lines([verdict])[0]


def test_the_best_peer_of_the_store_is_the_fastest_of_its_peers() -> None:
    """A copy and a limit are in the same round, and no peers."""
    seconds = {"commute": 1.0, "ray": 5.0, "rpc": 3.0, "redis": 4.0, "copy": 0.5, "limit": 2.0}

    spread = compare(result_of(Cell(1, 16 * MB, "push_pull"), seconds), "best peer")

    assert spread is not None
    assert spread.median == 3.0


QUESTIONS = (one_host.QUESTION, four_hosts.QUESTION, store.QUESTION, sparse.QUESTION)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
def test_no_figure_is_required_twice(question: Question) -> None:
    """A peer has one requirement per cell: the stronger one replaces "no slower"."""
    rows = question.requirements

    assert len({(row.peer, row.cell) for row in rows}) == len(rows)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("call", CALLS)
def test_the_expected_values_are_those_of_the_call(call: str, ranks: int) -> None:
    """What must be left is what the call makes of what the ranks are given."""
    given = [values_given(call, rank, ranks) for rank in range(ranks)]
    sums = [sum(parts) for parts in zip(*given, strict=True)]
    gathered = [value for parts in given for value in parts]
    by_rank = {
        "allreduce": [sums] * ranks,
        "broadcast": [given[0]] * ranks,
        "allgather": [gathered] * ranks,
        "reduce_scatter": [[value] for value in sums],
        "barrier": [[]] * ranks,
    }[call]

    assert [values_left(call, rank, ranks) for rank in range(ranks)] == by_rank


def test_a_size_is_that_of_the_whole_array() -> None:
    """16 MB gathered from four ranks are 4 MB each; so are the parts of 16 MB scattered."""
    assert (bytes_given("allgather", 16 * MB, 4), bytes_left("allgather", 16 * MB, 4)) == (
        4 * MB,
        16 * MB,
    )
    assert bytes_given("reduce_scatter", 16 * MB, 4) == 16 * MB
    assert bytes_left("reduce_scatter", 16 * MB, 4) == 4 * MB


class Lazy:
    """Rank 1 of 2 of a library that does its work in the first sample only."""

    rank, size, version = 1, 2, "lazy"

    def __init__(self) -> None:
        self.is_working = True

    def barrier(self) -> None:
        pass

    def bind(self, call: str, source: Array, result: Array) -> Call:
        parts = result.reshape(max(1, len(self.expected(call))), -1)

        def work() -> None:
            for part, value in zip(parts, self.expected(call), strict=True):
                if self.is_working:
                    part.fill(value)

        return work

    def expected(self, call: str) -> list[float]:
        return values_left(call, self.rank, self.size)


@pytest.mark.parametrize(
    ("call", "variant"),
    [
        *(("allreduce", variant) for variant in ("in place", "out of place")),
        *(("broadcast", "in place"), ("allgather", "out of place")),
        ("reduce_scatter", "out of place"),
    ],
)
def test_a_stale_result_is_found_out(call: str, variant: str) -> None:
    """The right result of an earlier sample, still in the buffer, does not pass."""
    library = Lazy()
    bound = Bound(library, call=call, bytes=64, batch=3, variant=variant)
    bound.sample()
    library.is_working = False

    with pytest.raises(AssertionError, match="wrong result"):
        bound.sample()


@pytest.mark.parametrize(
    ("keeps", "expected"),
    # After three exchanges of a sample of four: worker 1 has given 2, 4 and 2; worker 0 at most
    # 1, 2, 1 and 2.
    [(Keeps.ROUNDS, (12, 12)), (Keeps.ARRIVALS, (8, 14)), (Keeps.LAST, (2, 2))],
)
def test_what_an_exchange_must_answer(keeps: Keeps, expected: tuple[float, float]) -> None:
    """Whole rounds, all of mine with some of the others', or only what I gave last."""
    assert bounds(keeps, rank=1, workers=2, number=3, last=4) == expected


class Summing:
    """The only worker of a server that adds up, until it is told to answer what it last did."""

    rank, size, version, keeps = 0, 1, "summing", Keeps.ROUNDS

    def __init__(self) -> None:
        self.is_working = True
        self.tables: dict[str, Array] = {}

    def barrier(self) -> None:
        pass

    def declare(self, table: str, bytes: int) -> None:
        self.tables[table] = np.zeros(bytes // 4, np.float32)

    def bind(self, table: str, source: Array, result: Array) -> Exchange:
        def exchange() -> Array:
            if self.is_working:
                self.tables[table] += source
            np.copyto(result, self.tables[table])
            return result

        return exchange


def test_an_exchange_that_adds_nothing_is_found_out() -> None:
    """The sum of the exchange before does not pass."""
    worker = Summing()
    work = Exchanges(worker, table="t", bytes=64, batch=3, idle_seconds=0.0)
    work.sample()
    worker.is_working = False

    with pytest.raises(AssertionError, match="wrong sum"):
        work.sample()


class KeptRows:
    """Rows in a dictionary, until it is told to leave them as they are."""

    def __init__(self) -> None:
        self.is_working = True
        self.rows: dict[int, Array] = {}

    def given(self, patterns: Array, pushes: Counts) -> Array:
        return self.holds(patterns, pushes)

    def holds(self, patterns: Array, pushes: Counts) -> Array:
        return patterns * pushes[:, None].astype(np.float32)

    def pull(self, chosen: Chosen, out: Array) -> Callable[[], Array]:
        def pull() -> Array:
            if self.is_working:
                out[:] = [self.rows[key] for key in chosen.keys.tolist()]
            return out

        return pull

    def push(self, chosen: Chosen, rows: Array, variant: str) -> Callable[[], object]:
        return lambda: self.rows.update(zip(chosen.keys.tolist(), rows, strict=True))

    def memory(self) -> dict[str, int]:
        return {"in place": len(self.rows)}


@pytest.mark.parametrize("width", [1, 16])
def test_rows_that_are_old_are_found_out(width: int) -> None:
    """Rows as they were before the last push, and rows that were never written, do not pass."""
    table = KeptRows()
    resident = Resident(table, width, 2 * CALL_ROWS)
    Pulling(resident, 1).sample()
    Pushing(resident, 2, "in place").sample()
    before = dict(table.rows)
    Pushing(resident, 1, "in place").sample()

    assert resident.row_bytes == {"in place": 1.0}
    table.rows = before
    with pytest.raises(AssertionError, match="wrong row of key"):
        Pulling(resident, 1).sample()
    table.is_working = False
    with pytest.raises(AssertionError, match="wrong row of key"):
        Pulling(resident, 1).sample()
