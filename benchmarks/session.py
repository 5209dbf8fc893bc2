# SPDX-License-Identifier: Apache-2.0
"""The command line around a question: options, progress, several runs, the printed report."""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.failure import BenchError
from benchmarks.figures import Requirement, Run, judge, verdict_lines
from benchmarks.rounds import ROUNDS

Say = Callable[[str], None]
LOG_SECONDS = 10.0  # between progress lines where there is no terminal to draw on


@dataclass
class Options:
    runs: int = 1
    rounds: int = ROUNDS
    keep_noisy: bool = False
    output: Path = record.RESULTS


@dataclass
class Question:
    """One thing to find out; `measure` makes one run of it and adds to `facts` what it learned."""

    name: str
    title: str
    requirements: Sequence[Requirement]
    measure: Callable[[Options, dict[str, Any], Say], Run]
    table: Callable[[Run, dict[str, Any]], list[str]]
    prepare: Callable[[], None]
    facts: dict[str, Any] = field(default_factory=dict)


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=int, default=1, help="a figure is judged by the median of 3")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="clean rounds per size")
    parser.add_argument("--keep-noisy", action="store_true", help="try it out on a busy host")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the results")
    return Options(**vars(parser.parse_args(arguments)))


def ask(question: Question, options: Options) -> int:
    """Run the question, print its report; 0 when every figure is met, 1 if not, 2 on failure."""
    # An ended bench must still remove its namespaces and jobs: turn both signals into exceptions.
    # SIGINT too, because a shell starts background jobs with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _ask(question, options)
    except BenchError as error:
        print(f"\nbenchmark {question.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbenchmark {question.name}: interrupted", file=sys.stderr)
        return 130


def _ask(question: Question, options: Options) -> int:
    question.prepare()
    print(f"{question.title}\n{record.machine_line()}\n", flush=True)
    started = time.monotonic()
    runs: list[Run] = []
    for number in range(1, options.runs + 1):
        runs.append(question.measure(options, question.facts, _progress(number, options.runs)))
        clear_progress()
        print(f"run {number} of {options.runs}")
        print("\n".join(question.table(runs[-1], question.facts)), flush=True)
    verdicts = judge(question.requirements, runs)
    question.facts["noisy_rounds_kept"] = options.keep_noisy
    question.facts["seconds"] = round(time.monotonic() - started)
    path = record.write(
        question.name, runs=runs, verdicts=verdicts, facts=question.facts, folder=options.output
    )
    print("\n".join(verdict_lines(verdicts)))
    if options.keep_noisy:
        print("noisy rounds were kept (--keep-noisy): these figures prove nothing")
    rule = (
        "one run; the rule is the median of three (--runs 3)" if len(runs) < 3 else "median of runs"
    )
    print(f"judged by: {rule}. {question.facts['seconds']} s. Raw: {path}, plot: {path.stem}.png")
    met = all(verdict.met for verdict in verdicts) and not options.keep_noisy
    return 0 if met else 1


def _progress(run: int, runs: int) -> Say:
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if sys.stderr.isatty():
            print(f"\r\033[Krun {run} of {runs}: {text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - said > LOG_SECONDS:
            print(f"run {run} of {runs}: {text}", file=sys.stderr, flush=True)
            said = time.monotonic()

    return say


def clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def commute_command() -> str:
    """The `commute` beside this interpreter, so that what is measured is what is installed here."""
    path = shutil.which("commute", path=str(Path(sys.executable).parent))
    if path is None:
        raise BenchError(
            f"the command commute is not beside {sys.executable}; install the project there first"
        )
    return path


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
