# SPDX-License-Identifier: Apache-2.0
"""How fast and how well is a sparse linear model learned from text, beside Vowpal Wabbit?

    python -m benchmarks.learn [--runs 3]

A million examples of 39 ids each, of 10 million, as `commute generate clicks` makes them, in VW's
own text; 100,000 fresh ones to test. Three questions: the first pass, from text; the second pass,
from the cache; how good the model is and what it takes. What is timed is a whole command, from its
start until the model is saved. The second pass is what a command of two passes takes longer than
one of one pass, both from the cache that an earlier command left. That one pass from the cache,
with a model that begins anew, is shown too, less the time of the same command on a few lines.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import noise, setup_peers
from benchmarks.failure import BenchError
from benchmarks.figures import OURS, Requirement, Run, compare
from benchmarks.rounds import ATTEMPTS_PER_ROUND, Cell, CellResult, Round, time_text
from benchmarks.session import Options, Question, Say, ask, columns, commute_command, parse
from benchmarks.setup_peers import python_of
from commute.learn.clicks import make_clicks

EXAMPLES, TEST_EXAMPLES = 1_000_000, 100_000
FEATURES, FIELDS, SEED = 10_000_000, 39, 1
# A round takes half a minute, so few of them; each is long enough for the noise guard.
ROUNDS_MAX = 5
COMMAND_SECONDS = 600
FEW_LINES = 100

SINGLE = f"{OURS} single"
VW, FTRL, FTRL_SLOW = "vw", "vw ftrl", "vw ftrl 0.1"
VW_OPTIONS = {VW: (), FTRL: ("--ftrl",), FTRL_SLOW: ("--ftrl", "--ftrl_alpha", "0.1")}
VW_BASE = ("-b", "24", "--loss_function", "logistic")
OUR_PROCESSES = {OURS: (2, 1), SINGLE: (1, 0)}  # workers, servers
WHOLE, TWICE, START, BEST = "whole", "two passes", "start", "best vw"

FIRST, FIRST_ALONE = Cell(2, 0, "first pass"), Cell(1, 0, "first pass")
CACHED, SECOND = Cell(2, 0, "cached pass"), Cell(2, 0, "second pass")
LOGLOSS, MEMORY = Cell(2, 0, "test log-loss"), Cell(2, 0, "feature bytes")

# Key, weight and FTRL's state of a feature, and how many times that its table may take.
PARTS_BYTES, PARTS_TIMES_MAX = 8 + 4 + 8, 2.0


def _row(cell: Cell, peer: str, ratio: float, words: str, ours: str = OURS) -> Requirement:
    return Requirement(peer, cell.ranks, cell.bytes, ratio, words, cell.call, ours=ours)


REQUIREMENTS = [
    _row(FIRST, FTRL, 1.5, "1.5 times vw --ftrl"),
    _row(FIRST_ALONE, FTRL, 1.3, "one process: 1.3 times it", SINGLE),
    _row(SECOND, FTRL, 2.0, "from the cache: twice vw --ftrl"),
    _row(LOGLOSS, BEST, 1.0, "no worse than the best vw"),
    _row(MEMORY, "limit", 1.0, f"{PARTS_TIMES_MAX:g} x key, weight and state"),
]


@dataclass(frozen=True)
class Files:
    """Everything lies in one folder; only the data is left there."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.vw"

    @property
    def test(self) -> Path:
        return self.folder / "test.vw"

    @property
    def few(self) -> Path:
        return self.folder / "few.vw"

    @property
    def made(self) -> Path:
        """Models, reports and VW's cache."""
        return self.folder / "made"

    def clear(self) -> None:
        """Leaves the data only. Our cache lies beside its file."""
        shutil.rmtree(self.made, ignore_errors=True)
        for cache in self.folder.glob("*.cache.*"):
            cache.unlink()

    def model_of(self, name: str) -> Path:
        return self.made / name.replace(" ", "-")


def make_data(files: Files, say: Say) -> dict[str, Any]:
    """The facts of the data, which is made unless it is there already."""
    files.folder.mkdir(parents=True, exist_ok=True)
    facts_path = files.train.with_name(files.train.name + ".json")
    if not is_complete(files, facts_path):
        make_clicks(
            files.train,
            examples=EXAMPLES,
            features=FEATURES,
            fields=FIELDS,
            seed=SEED,
            test=files.test,
            test_examples=TEST_EXAMPLES,
            progress=lambda done, of: say(f"making data, {done:,} of {of:,} examples"),
        )
    with files.train.open("rb") as text:
        files.few.write_bytes(b"".join(itertools.islice(text, FEW_LINES)))
    facts: dict[str, Any] = json.loads(facts_path.read_text(encoding="utf-8"))
    return facts


def is_complete(files: Files, facts_path: Path) -> bool:
    """Whether the files are those of these settings: the facts are written last."""
    if not facts_path.exists():
        return False
    facts = json.loads(facts_path.read_text(encoding="utf-8"))
    wanted = {"format": "vw", "seed": SEED, "fields": FIELDS, "features": FEATURES}
    sets = ((files.train, "train", EXAMPLES), (files.test, "test", TEST_EXAMPLES))
    return all(facts.get(key) == value for key, value in wanted.items()) and all(
        (facts.get(part) or {}).get("examples") == examples
        and path.exists()
        and path.stat().st_size == facts[part]["bytes"]
        for path, part, examples in sets
    )


def run_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[float, str]:
    """Its wall time and all it said."""
    started = time.perf_counter()
    done = subprocess.run(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS,
    )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise BenchError(f"`{' '.join(argv)}` ended with {done.returncode}:\n{tail}")
    return seconds, done.stdout


def vw(*arguments: str | Path) -> tuple[float, str]:
    # What lies on our PYTHONPATH is not VW's.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    argv = (str(python_of("vowpalwabbit")), "-m", "vowpalwabbit", *map(str, arguments))
    return run_command(argv, env)


def train_vw(files: Files, name: str, source: Path, *more: str | Path) -> float:
    """The time of one pass over `source`, until the model is saved."""
    model = files.model_of(name)
    model.unlink(missing_ok=True)
    return vw(*VW_BASE, *VW_OPTIONS[name], "-d", source, "-f", model, "--quiet", *more)[0]


def vw_test_loss(files: Files, name: str) -> float:
    # The loss is no part of a saved model: without naming it, VW tells the squared one.
    said = vw(*VW_BASE, "-t", "-i", files.model_of(name), "-d", files.test)[1]
    return average_loss(said, TEST_EXAMPLES)


def average_loss(said: str, examples: int) -> float:
    """What VW says at the end of a run, if it is about as many examples as it should be."""
    counted = re.search(r"^number of examples = (\d+)$", said, re.MULTILINE)
    loss = re.search(r"^average loss = ([\d.]+)", said, re.MULTILINE)
    if counted is None or loss is None or int(counted[1]) != examples:
        raise BenchError(f"vw did not say its loss on {examples:,} examples:\n{said[-800:]}")
    return float(loss[1])


def learn(
    files: Files, name: str, source: Path, *more: str | Path, epochs: int = 1
) -> tuple[float, Any]:
    """The time of `commute learn`, until the model is saved, and its report."""
    model, report = files.model_of(name), files.made / "report.json"
    shutil.rmtree(model, ignore_errors=True)
    report.unlink(missing_ok=True)
    workers, servers = OUR_PROCESSES[name]
    seconds, _ = run_command(
        (
            *(commute_command(), "learn", str(source), "--model", "lr"),
            *("--workers", str(workers), "--servers", str(servers), "--epochs", str(epochs)),
            *("--save", str(model), "--json", str(report), *map(str, more)),
        )
    )
    return seconds, json.loads(report.read_text(encoding="utf-8"))


def interleave(
    cell: Cell, takers: Mapping[str, Callable[[], float]], options: Options, say: Say
) -> CellResult:
    """As rounds.measure does it, with commands instead of ranks that wait for their turn."""
    names, rounds = list(takers), min(options.rounds, ROUNDS_MAX)
    result = CellResult(cell, rounds)
    while len(result.kept) < rounds and len(result.rounds) < ATTEMPTS_PER_ROUND * rounds:
        start = len(result.rounds) % len(names)
        before = noise.snapshot()
        taken = {}
        for name in (*names[start:], *names[:start]):
            say(f"{cell.call}: {len(result.kept)} of {rounds} rounds, now {name}")
            taken[name] = takers[name]()
        heard = noise.between(before, noise.snapshot())
        keep = options.keep_noisy or not heard.too_much
        result.rounds.append(Round(taken, heard.stolen, heard.foreign, keep))
    return result


def measure_all(options: Options, facts: dict[str, Any], say: Say) -> Run:
    files = Files(options.output / "learn-data")
    facts["examples_per_pass"] = EXAMPLES
    facts["data"] = make_data(files, say)
    facts["versions"] = {"vw": vw("--version")[1].splitlines()[0]}
    files.clear()
    files.made.mkdir()
    try:
        first = interleave(FIRST, _first_takers(files), options, say)
        cached = _measure_cached(files, options, say)
        say("testing the models")
        quality = _measure_quality(files, facts)
    finally:
        files.clear()
    found = (first, replace(first, cell=FIRST_ALONE), cached, second_pass(cached), *quality)
    return {result.cell: result for result in found}


def _first_takers(files: Files) -> dict[str, Callable[[], float]]:
    ours = {name: (lambda name=name: learn(files, name, files.train)[0]) for name in OUR_PROCESSES}
    theirs = {name: (lambda name=name: train_vw(files, name, files.train)) for name in VW_OPTIONS}
    return {**ours, **theirs}


def _measure_cached(files: Files, options: Options, say: Say) -> CellResult:
    def ours(epochs: int) -> float:
        return learn(files, OURS, files.train, "--cache", epochs=epochs)[0]

    def theirs(passes: int) -> float:
        # Without the last option a second pass would leave a tenth of the examples out.
        cache = ("--cache_file", files.made / "vw.cache", "--passes", str(passes), "--holdout_off")
        return train_vw(files, FTRL, files.train, *cache)

    takers: dict[str, Callable[[], float]] = {
        f"{OURS} {WHOLE}": lambda: ours(1),
        f"{OURS} {TWICE}": lambda: ours(2),
        f"{OURS} {START}": lambda: learn(files, OURS, files.few)[0],
        f"{FTRL} {WHOLE}": lambda: theirs(1),
        f"{FTRL} {TWICE}": lambda: theirs(2),
        f"{FTRL} {START}": lambda: train_vw(files, FTRL, files.few),
    }
    say("making the caches")
    for name in (OURS, FTRL):
        takers[f"{name} {WHOLE}"]()
    return without_start(interleave(CACHED, takers, options, say))


def without_start(result: CellResult) -> CellResult:
    return _less(result, WHOLE, START)


def second_pass(result: CellResult) -> CellResult:
    return replace(_less(result, TWICE, WHOLE), cell=SECOND)


def _less(result: CellResult, more: str, less: str) -> CellResult:
    """With our entry and VW's: what one command takes longer than another."""

    def net(name: str) -> Callable[[Mapping[str, float]], float]:
        return lambda taken: taken[f"{name} {more}"] - taken[f"{name} {less}"]

    return result.with_entry(OURS, net(OURS)).with_entry(FTRL, net(FTRL))


def _measure_quality(files: Files, facts: dict[str, Any]) -> tuple[CellResult, CellResult]:
    """Once: VW's models are the same every time, and noise does not change any."""
    test = ("--test", files.test)
    reports = {name: learn(files, name, files.train, *test)[1] for name in OUR_PROCESSES}
    losses = {name: float(report["test"]["logloss"]) for name, report in reports.items()}
    for name in VW_OPTIONS:
        train_vw(files, name, files.train)
        losses[name] = vw_test_loss(files, name)
    facts["test_logloss"] = losses
    facts["learning_rates"] = {
        name: report["examples_per_second"] for name, report in reports.items()
    }
    sizes = {name: report["table_bytes"] / report["features"] for name, report in reports.items()}
    return judged_losses(losses), judged_sizes(sizes)


def judged_losses(losses: Mapping[str, float]) -> CellResult:
    best = min(losses[name] for name in VW_OPTIONS)
    return CellResult(LOGLOSS, 1, [Round({**losses, BEST: best}, 0.0, 0.0, True)])


def judged_sizes(sizes: Mapping[str, float]) -> CellResult:
    most = PARTS_TIMES_MAX * PARTS_BYTES
    return CellResult(MEMORY, 1, [Round({**sizes, "limit": most}, 0.0, 0.0, True)])


def table(run: Run, facts: dict[str, Any]) -> list[str]:
    data = facts["data"]
    best = data["test"]["true_model"]
    losses, sizes = run[LOGLOSS].rounds[0].seconds, run[MEMORY].rounds[0].seconds
    return [
        *(f"{name}: {version}" for name, version in facts["versions"].items()),
        f"{EXAMPLES:,} examples of {FIELDS} ids, {data['train']['bytes'] / 1e6:.0f} MB; "
        f"{data['train']['distinct_ids']:,} distinct ids of {FEATURES:,}",
        "",
        "first pass, from text to the saved model: the whole command",
        *_rates(run[FIRST], (OURS, SINGLE, *VW_OPTIONS)),
        "learning alone, as the reports say, once: "
        + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in facts["learning_rates"].items()),
        "",
        "the second pass, from the cache: a command of two, less one of one pass",
        *_rates(run[SECOND], (OURS, FTRL)),
        "",
        "the first pass from the cache: the whole command, less the same on a few lines",
        *_rates(run[CACHED], (OURS, FTRL)),
        *_commands(run[CACHED]),
        "",
        f"log-loss on {TEST_EXAMPLES:,} fresh examples; the true model's is {best['logloss']:.4f}",
        *columns([[*losses], [f"{loss:.4f}" for loss in losses.values()]]),
        "",
        f"bytes per feature; its parts have {PARTS_BYTES}",
        *columns([[*sizes], [f"{size:.1f}" for size in sizes.values()]]),
        "",
    ]


def _rates(result: CellResult, names: Sequence[str]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("who", "time", "examples/s", f"times {FTRL} [range]", f"dropped {result.dropped}")
    ]
    for name in names:
        if not result.has_result:
            rows.append((name, "noise", "noise", "-", ""))
            continue
        seconds = result.median(name)
        times = str(compare(result, FTRL, name))
        rows.append((name, time_text(seconds), f"{EXAMPLES / seconds:,.0f}", times, ""))
    return columns(rows)


def _commands(result: CellResult) -> list[str]:
    names = [f"{name} {part}" for name in (OURS, FTRL) for part in (WHOLE, TWICE, START)]
    return [f"{name}: {time_text(result.median(name))}" for name in names if result.has_result]


def prepare() -> None:
    setup_peers.set_up(("vowpalwabbit", "plot"))
    commute_command()


QUESTION = Question(
    name="learn",
    title="commute learn: a sparse linear model from text, 2 workers and 1 server, and alone",
    requirements=REQUIREMENTS,
    measure=measure_all,
    table=table,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(ask(QUESTION, parse(str(__doc__))))
