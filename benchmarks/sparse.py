# SPDX-License-Identifier: Apache-2.0
"""How fast are rows pulled and pushed, 10,000 random ones of 10 million, beside Redis and NumPy?

    python -m benchmarks.sparse [--runs 3]

One server with 2 shards and one worker on 2 cores. Rows of 16 float32 with Adagrad; a push counts
until it is committed. Redis keeps a row as a string (MGET, and MSET of new rows: it has no
optimizer); NumPy gathers and scatters rows of an array in the process. Then rows of one float32
with FTRL, the memory a row takes, and saving and loading all of them beside a copy of the files.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import commute
from benchmarks import setup_peers, store_jobs
from benchmarks.figures import OURS, Requirement, Run, compare
from benchmarks.rounds import Cell, CellResult, Entry, measure, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse
from benchmarks.workers.calls import FILL_ROWS, PULL_ROWS, PUSH_ROWS, ROW_BYTES, SAVE_ROWS

# As in workers/rows.py.
RESIDENT, CALL_ROWS = 10_000_000, 10_000
# The turns of a round share this time. What a turn does besides, drawing keys and checking rows,
# makes a round last more than the second that the noise guard needs.
ROUND_SECONDS = 0.6
# Of saving, which takes seconds.
SAVES = 3
SHARDS = 2

WIDE, NARROW = 16, 1
# Key, value and state of a row: Adagrad has one number for each of the value's, FTRL two.
PARTS_BYTES = {WIDE: 8 + 64 + 64, NARROW: 8 + 4 + 8}
PARTS_TIMES_MAX = {WIDE: 1.3, NARROW: 2.0}

INFO, TICKET, COPY, UNSYNCED, LOAD = (
    f"{OURS} {variant}" for variant in ("info", "ticket", "copy", "copy unsynced", "load")
)
SAVE_VARIANTS = ("in place", "copy", "copy unsynced", "load")
PEERS = ("redis", "numpy")


def _cell(call: str, width: int = WIDE) -> Cell:
    return Cell(1, CALL_ROWS * width * 4, call)


PULL, PUSH, NARROW_PULL = _cell(PULL_ROWS), _cell(PUSH_ROWS), _cell(PULL_ROWS, NARROW)
FILLS = {width: _cell(FILL_ROWS, width) for width in (WIDE, NARROW)}
MEMORY = {width: _cell(ROW_BYTES, width) for width in (WIDE, NARROW)}
SAVE = _cell(SAVE_ROWS)
CAN_SAVE = hasattr(commute.Store, "save")

# What ours alone must reach, in million rows per second, by the entry that it becomes.
LIMITS = {
    PULL: {"limit": 9.0},
    PUSH: {"limit": 6.0, "ticket limit": 8.0},
    NARROW_PULL: {"limit": 12.0},
}


def _row(cell: Cell, peer: str, ratio: float, words: str, ours: str = OURS) -> Requirement:
    return Requirement(peer, cell.ranks, cell.bytes, ratio, words, cell.call, ours=ours)


def _memory_rows(width: int) -> list[Requirement]:
    words = f"{PARTS_TIMES_MAX[width]:g} x its parts, width {width}"
    return [
        _row(MEMORY[width], "limit", 1.0, words),
        _row(MEMORY[width], "info limit", 1.0, f"{words}, info()", INFO),
    ]


REQUIREMENTS = [
    _row(PULL, "limit", 1.0, "9 million rows/s (aim 13)"),
    _row(PULL, "redis", 10.0, "10 times Redis"),
    _row(PUSH, "limit", 1.0, "6 million rows/s"),
    _row(PUSH, "redis", 12.0, "12 times Redis"),
    _row(PUSH, "ticket limit", 1.0, "8 million rows/s by ticket", TICKET),
    _row(NARROW_PULL, "limit", 1.0, "12 million rows/s of width 1"),
    *_memory_rows(WIDE),
    *_memory_rows(NARROW),
    *([_row(SAVE, COPY, 0.5, "half the speed of a copy")] if CAN_SAVE else []),
]


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    facts["call_rows"] = CALL_ROWS
    with contextlib.ExitStack() as stack:
        say("starting a server and a worker of each")
        ours = stack.enter_context(store_jobs.commute_job(1, 1, file="rows_rank.py", shards=SHARDS))
        redis = stack.enter_context(store_jobs.redis_job(1, 1, file="redis_rows_rank.py"))
        numpy = stack.enter_context(store_jobs.copy_job(1, name="numpy", file="numpy_rows_rank.py"))
        jobs = (ours, redis, numpy)
        facts["versions"] = {job.name: job.version for job in jobs}
        everybody = [Entry(job) for job in jobs]
        without_redis = [Entry(ours), Entry(numpy)]
        memory = [Entry(ours), Entry(ours, "info")]
        say(f"filling in {RESIDENT:,} rows")
        found = [
            _look(FILLS[WIDE], everybody, say),
            _look(FILLS[NARROW], without_redis, say),
            _with_limit(_look(MEMORY[WIDE], [*memory, Entry(redis)], say)),
            _with_limit(_look(MEMORY[NARROW], memory, say)),
            _with_limit(_measure(PULL, everybody, options, say)),
            _with_limit(_measure(PUSH, [*everybody, Entry(ours, "ticket")], options, say)),
            _with_limit(_measure(NARROW_PULL, without_redis, options, say)),
        ]
        if CAN_SAVE:
            saves = [Entry(ours, variant) for variant in SAVE_VARIANTS]
            found.append(_measure(SAVE, saves, options, say, rounds_max=SAVES))
    return {result.cell: result for result in found}


def _measure(
    cell: Cell, entries: Sequence[Entry], options: Options, say: Say, *, rounds_max: int = 1 << 30
) -> CellResult:
    return measure(
        cell,
        entries,
        turn_seconds=ROUND_SECONDS / len(entries),
        rounds=min(options.rounds, rounds_max),
        keep_noisy=options.keep_noisy,
        say=say,
    )


def _look(cell: Cell, entries: Sequence[Entry], say: Say) -> CellResult:
    """What was found once, when the rows were filled in; noise is no reason to ask again."""
    return measure(cell, entries, turn_seconds=0.0, rounds=1, keep_noisy=True, say=say)


def _with_limit(result: CellResult) -> CellResult:
    for name, millions in LIMITS.get(result.cell, {}).items():
        result = result.with_entry(name, _constant(CALL_ROWS / (millions * 1e6)))
    for width, cell in MEMORY.items():
        for name in ("limit", "info limit") if cell == result.cell else ():
            most = PARTS_TIMES_MAX[width] * PARTS_BYTES[width]
            result = result.with_entry(name, _constant(most))
    return result


def _constant(value: float) -> Callable[[object], float]:
    return lambda _: value


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    lines += [
        "",
        f"{CALL_ROWS:,} random keys of {RESIDENT:,}: million rows/s, then how many times faster"
        " commute is [range]",
    ]
    lines += _rates(run)
    lines += ["", f"filling in {RESIDENT:,} rows, {CALL_ROWS:,} at a time: million rows/s"]
    lines += _fills(run)
    lines += ["", "bytes per row: what the process that keeps them has grown by, and info()"]
    lines += _memory(run)
    if CAN_SAVE:
        lines += ["", f"{RESIDENT:,} rows of {PARTS_BYTES[WIDE]} bytes, to and from files"]
        lines += _saves(run[SAVE])
    return [*lines, ""]


def _rates(run: Run) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("call", OURS, *PEERS, *(f"/{peer}" for peer in PEERS), "dropped")
    ]
    for title, cell, ours in (
        (f"pull, {WIDE} wide", PULL, OURS),
        (f"push, {WIDE} wide", PUSH, OURS),
        ("push with a ticket", PUSH, TICKET),
        ("pull, 1 wide", NARROW_PULL, OURS),
    ):
        result = run[cell]
        rates = [_millions(result, name) for name in (ours, *PEERS)]
        ratios = [_times_faster(result, peer, ours) for peer in PEERS]
        rows.append((title, *rates, *ratios, str(result.dropped)))
    return columns(rows)


def _times_faster(result: CellResult, peer: str, ours: str) -> str:
    return str(compare(result, peer, ours) or "-") if peer in result.rounds[0].seconds else ""


def _millions(result: CellResult, name: str, rows: int = CALL_ROWS) -> str:
    if name not in result.rounds[0].seconds:
        return ""
    return f"{rows / result.median(name) / 1e6:.2f}" if result.has_result else "noise"


def _fills(run: Run) -> list[str]:
    rows: list[tuple[str, ...]] = [("width", OURS, *PEERS)]
    for width, cell in FILLS.items():
        rates = (_millions(run[cell], name, RESIDENT) for name in (OURS, *PEERS))
        rows.append((str(width), *rates))
    return columns(rows)


def _memory(run: Run) -> list[str]:
    heading = ("width", "key, value, state", OURS, "times", "info()", "times", "redis")
    rows: list[tuple[str, ...]] = [heading]
    for width, cell in MEMORY.items():
        seen, parts = run[cell].rounds[0].seconds, PARTS_BYTES[width]
        ours = [t for n in (OURS, INFO) for t in (f"{seen[n]:.1f}", f"{seen[n] / parts:.2f}")]
        redis = f"{seen['redis']:.1f}" if "redis" in seen else ""
        rows.append((str(width), str(parts), *ours, redis))
    return columns(rows)


def _saves(result: CellResult) -> list[str]:
    heading = ("what", "time", "million rows/s", "GB/s", "/copy", "dropped")
    rows: list[tuple[str, ...]] = [heading]
    for title, name in (
        ("save", OURS),
        ("load", LOAD),
        ("copy of the files, synced", COPY),
        ("copy, not synced", UNSYNCED),
    ):
        cells = ["noise", "noise", "noise", "-"]
        if result.has_result:
            seconds = result.median(name)
            rate = f"{PARTS_BYTES[WIDE] * RESIDENT / seconds / 1e9:.2f}"
            million = _millions(result, name, RESIDENT)
            cells = [time_text(seconds), million, rate, str(compare(result, COPY, name))]
        rows.append((title, *cells, str(result.dropped)))
    return columns(rows)


def prepare() -> None:
    setup_peers.set_up(("redis", "plot"))
    commute_command()


QUESTION = Question(
    name="sparse",
    title="the store: rows of sparse tables, 1 server with 2 shards and 1 worker",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
