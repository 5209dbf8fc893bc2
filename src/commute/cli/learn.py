# SPDX-License-Identifier: Apache-2.0
"""`commute learn`: trains a sparse linear model on text files; learn.fitting does the work."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from commute._cores import ONE_THREAD
from commute.cluster.forked import importing

_DESCRIPTION = """\
Train a linear model on text, on all cores: workers read the files, servers keep the weights.

  commute learn train.svm --test test.svm --save model/
  commute learn 'day*.vw.gz' --l1 1 --staleness 4 --html report.html
  commute learn people.csv --label income --cross '*:*' --bin age:10 --log capital-gain
  commute predict model/ new.svm > scores.txt
  commute show model model/

Files may be LIBSVM/SVMlight, Vowpal Wabbit text, CSV or TSV with the names of the columns in the
first line (or in --names), plain or gzipped; - is standard input. Features are hashed to 64 bits,
so there is no table size to choose."""

_EPILOG = """\
Each example is scored before it is learned from, so the log-loss and AUC that are shown while it
runs are honest. Ctrl-C ends the training and saves what was asked for; a second one ends at
once."""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute learn`."""
    made = argparse.ArgumentParser(
        prog="commute learn",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("data", nargs="+", help="files to learn from, or patterns like 'day*.vw'")
    _add_what(made.add_argument_group("what comes out"))
    _add_model(made.add_argument_group("the model"))
    _add_columns(made.add_argument_group("what lines mean"))
    _add_running(made.add_argument_group("how it runs"))
    return made


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--test", nargs="+", default=[], metavar="FILE", help="files to score at the end")
    add("--save", metavar="FOLDER", help="keep the model there")
    add("--save-every", type=int, default=0, metavar="N", help="and after every N examples")
    add("--start-from", metavar="FOLDER", help="go on from a model, with any number of servers")
    add("--json", metavar="FILE", help="write the report as JSON")
    add("--html", metavar="FILE", help="write the report as a page with charts")


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", default="lr", help="lr, linear, svm or perceptron (lr)")
    add("--optimizer", default="ftrl", help="ftrl, adagrad, adam or sgd (ftrl)")
    add("--lr", type=float, default=0.1, help="learning rate (0.1)")
    add("--l1", type=float, default=0.0, help="keeps small weights at 0; ftrl only (0)")
    add("--l2", type=float, default=0.0, help="(0)")
    add("--epochs", type=int, default=1, help="passes over the data (1)")
    add(
        "--batch",
        type=int,
        default=0,
        metavar="N",
        help="examples of a worker between a pull and a push (it grows from 16 to 1000)",
    )
    add(
        "--admit",
        type=int,
        default=1,
        metavar="N",
        help="a feature gets a weight when it is pushed for the N-th time (1)",
    )


def _add_columns(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--format", help="svm, vw, csv or tsv; by default from the name or the first line")
    add("--names", metavar="A,B,...", help="the columns, where the first line does not name them")
    add("--label", metavar="COLUMN", help="what to predict (guessed, and said)")
    add("--weight", metavar="COLUMN", help="the importance of an example")
    add("--positive", nargs="+", default=[], metavar="TEXT", help="labels that mean 1")
    add(
        "--column",
        action="append",
        default=[],
        metavar="NAME:KIND",
        help="category, number or ignore, where the guess is wrong; several times",
    )
    add("--bin", action="append", default=[], metavar="NAME:N", help="a number as N categories")
    add("--log", action="append", default=[], metavar="NAME", help="the logarithm of a number")
    add(
        "--cross",
        action="append",
        default=[],
        metavar="A:B",
        help="columns or namespaces whose combinations are features too, also A:B:C; "
        "'*:*' is every pair of categories",
    )
    add(
        "--bad-lines",
        type=int,
        default=100,
        metavar="N",
        help="lines that cannot be read are skipped, up to so many (100)",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workers", type=int, metavar="N", help="processes that read and learn (one per core)")
    add(
        "--servers",
        type=int,
        metavar="N",
        help="processes that keep the weights (1; for one worker none, they are in its process)",
    )
    add(
        "--staleness",
        default="none",
        metavar="0|N|none",
        help="rounds that a worker may be ahead of the slowest; none: any (none)",
    )
    add("--deterministic", action="store_true", help="the same bits each time; staleness 0")
    add("--streams", type=int, default=0, metavar="N", help="shares of the data (one per worker)")
    add("--wire", metavar="DTYPE", help="send values as bfloat16 or float16")
    add(
        "--cache",
        action="store_true",
        help="keep parsed examples beside the file: later passes are faster",
    )
    add("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    with _tidy_if_terminated():
        return _run(options)


@contextlib.contextmanager
def _tidy_if_terminated() -> Iterator[None]:
    """SIGTERM is an exit, so that what was started ends too, and nothing is left lying about."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    if "numpy" not in sys.modules:
        os.environ.update({**ONE_THREAD, **os.environ})  # so that the job can be forked
    from commute.learn.start import waiting_job

    # First: on another core it imports what it needs while we import what we need.
    with waiting_job(forked=True) as job:
        return _learn(options, job)


def _learn(options: argparse.Namespace, job: Any) -> int:
    with importing():
        from commute.learn.display import Display
        from commute.learn.fitting import Interrupted, prepare
        from commute.learn.fitting import run as run_plan
        from commute.learn.report import Report

    training = _training(options)
    columns = _columns(options)
    report: Report | None
    code = 0
    with prepare(
        options.data,
        options.test,
        options.save,
        options.start_from,
        columns,
        training,
        _title(options, training),
    ) as plan:
        with Display(live=False if options.quiet else None) as display:
            if not options.quiet:
                display.begin(plan.title, list(plan.notes))
            try:
                report = run_plan(plan, job, None if options.quiet else display)
            except Interrupted as interrupted:
                report, code = interrupted.report, 130
        if report is None:
            return code
        report.reports = [path for path in (options.json, options.html) if path]
        _write(report, options)
        if not options.quiet:
            display.end(report)
    return code


def _title(options: argparse.Namespace, training: Any) -> str:
    servers = {0: "no server", 1: "1 server"}.get(training.servers, f"{training.servers} servers")
    return (
        f"{training.model} with {training.optimizer} on {', '.join(options.data)[:60]}:"
        f" {training.workers} worker{'s' if training.workers > 1 else ''}, {servers}"
    )


def _training(options: argparse.Namespace) -> Any:
    from commute.learn.fitting import default_workers
    from commute.learn.settings import Training

    workers = default_workers() if options.workers is None else options.workers
    servers = options.servers if options.servers is not None else int(workers > 1)
    return Training(
        model=options.model,
        optimizer=options.optimizer,
        lr=options.lr,
        l1=options.l1,
        l2=options.l2,
        epochs=options.epochs,
        batch=options.batch,
        staleness=_staleness(options.staleness),
        deterministic=options.deterministic,
        wire=options.wire,
        admit=options.admit,
        workers=workers,
        servers=servers,
        streams=options.streams,
        save_every=options.save_every,
        bad_lines=options.bad_lines,
        cache=options.cache,
    )


def _staleness(given: str) -> int | None:
    from commute._errors import SettingError

    if given.lower() == "none":
        return None
    if not given.isdecimal():
        raise SettingError(f"expected --staleness to be 0, a number, or none; got {given!r}")
    return int(given)


def _columns(options: argparse.Namespace) -> dict[str, Any]:
    """What was said about lines, and only that."""
    pairs = [_pair(text, "--column") for text in options.column]
    bins = {}
    for name, count in (_pair(text, "--bin") for text in options.bin):
        if not count.isdecimal():
            from commute._errors import SettingError

            raise SettingError(f"expected --bin to be like age:10, got {name}:{count}")
        bins[name] = int(count)
    said = {
        "format": options.format,
        "names": options.names.split(",") if options.names else [],
        "label": options.label,
        "weight": options.weight,
        "kinds": dict(pairs),
        "logs": options.log,
        "bins": bins,
        "crosses": [cross.split(":") for cross in options.cross],
        "positive": options.positive,
    }
    return {name: value for name, value in said.items() if value}


def _pair(text: str, flag: str) -> tuple[str, str]:
    from commute._errors import SettingError

    name, colon, value = text.rpartition(":")
    if not colon:
        raise SettingError(f"expected {flag} to be like name:value, got {text!r}")
    return name, value


def _write(report: Any, options: argparse.Namespace) -> None:
    from commute._errors import SettingError
    from commute.learn.report import to_html, to_json

    for path, made in ((options.json, to_json), (options.html, to_html)):
        if path is None:
            continue
        text = made(report)
        try:
            if isinstance(text, bytes):
                Path(path).write_bytes(text)
            else:
                Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise SettingError(f"{path} cannot be written: {error.strerror}") from error
