# SPDX-License-Identifier: Apache-2.0
"""`commute generate clicks OUT.vw`: data whose best possible result is known."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from commute._errors import SettingError

if TYPE_CHECKING:
    from commute.learn.clicks import ClickFacts, SetFacts

# As in learn/clicks.py, which needs NumPy; help does not.
_FORMATS = ("vw", "svm", "csv")
_TEST_EXAMPLES = 50_000
_QUIET_SECONDS = 2.0
_COUNT_MAX = 10**12

_DESCRIPTION = """\
Make examples of click data: one id per field, few ids frequent and most of them rare, and a click
or none. Labels come from a hidden model with a weight for each id, so the best log-loss and AUC
that a learner could reach are known; they are printed, and kept in OUT.json.

  commute generate clicks train.vw --test test.vw       half a million, and fresh ones to test
  commute generate clicks clicks.csv --examples 10000 --features 50000 --fields 12
  commute generate clicks big.svm --examples 20000000 --features 50000000 --seed 7"""

_EPILOG = """\
vw:  `-1 |f a3 b51243 ...`, read by Vowpal Wabbit; the letters name the field
svm: `0 4:1 12345:1 ...`, read by LIBSVM, XGBoost and others
csv: a header `click,a,b,...`, then one row per example

The same seed and numbers always give the same bytes. Training and test examples are different draws
of the same hidden model."""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute generate`."""
    made = argparse.ArgumentParser(
        prog="commute generate", description="Make data to try things with.", allow_abbrev=False
    )
    things = made.add_subparsers(dest="thing", metavar="WHAT", required=True)
    clicks = things.add_parser(
        "clicks",
        help="examples of click data, with a hidden model behind them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = clicks.add_argument
    add("out", metavar="OUT", type=Path, help="file of the training examples")
    add("--examples", type=_count, default=500_000, metavar="N", help="(default 500000)")
    add("--features", type=_count, default=10_000_000, metavar="N", help="ids (default 10000000)")
    add("--fields", type=_count, default=39, metavar="N", help="ids per example (default 39)")
    add("--seed", type=_seed, default=1, metavar="N", help="another seed, other data (default 1)")
    add("--format", choices=_FORMATS, help="(default: as OUT ends, else vw)")
    add("--test", metavar="FILE", type=Path, help="also write test examples, to this file")
    add("--test-examples", type=_count, metavar="N", help=f"(default {_TEST_EXAMPLES})")
    add("--force", action="store_true", help="replace files that are there")
    return made


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from commute.learn.clicks import make_clicks

    _check_files(options)
    started = time.monotonic()
    show, clear = _progress(started)
    try:
        facts = make_clicks(
            options.out,
            examples=options.examples,
            features=options.features,
            fields=options.fields,
            seed=options.seed,
            format=options.format or _format_of(options.out),
            test=options.test,
            test_examples=options.test_examples or _TEST_EXAMPLES,
            progress=show,
        )
    except OSError as error:
        raise SettingError(f"cannot write {options.out}: {error.strerror}") from error
    finally:
        clear()
    print(_as_text(facts, options, time.monotonic() - started))
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _COUNT_MAX):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 64):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return int(text)


def _format_of(path: Path) -> str:
    ending = path.suffix.removeprefix(".")
    return ending if ending in _FORMATS else "vw"


def _check_files(options: argparse.Namespace) -> None:
    if options.test is None and options.test_examples is not None:
        raise SettingError("--test-examples needs a file for them; add --test FILE")
    if options.test is not None and options.test.absolute() == options.out.absolute():
        raise SettingError(f"--test and the training examples are both {options.out}; name another")
    wanted = [options.out, _facts_path(options.out), *([options.test] if options.test else [])]
    there = [str(path) for path in wanted if path.exists()]
    if there and not options.force:
        raise SettingError(f"{' and '.join(there)} already there; add --force to replace")


def _facts_path(out: Path) -> Path:
    return out.with_name(out.name + ".json")


def _progress(started: float) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """Tells stderr how far it is, when it takes long; and takes a line on a terminal back."""
    said = started
    draws = sys.stderr.isatty()

    def show(done: int, of: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < _QUIET_SECONDS:
            return
        said = now
        rate = done / (now - started)
        line = (
            f"{done:,} of {of:,} examples, {rate:,.0f} per second, {(of - done) / rate:.0f} s left"
        )
        print(f"\r\033[K{line}" if draws else line, end="" if draws else "\n", file=sys.stderr)
        sys.stderr.flush()

    def clear() -> None:
        if draws and said > started:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    return show, clear


def _as_text(facts: ClickFacts, options: argparse.Namespace, seconds: float) -> str:
    files = [(options.out, facts.train)] + ([(options.test, facts.test)] if facts.test else [])
    best = facts.best
    lines = [
        *(_set_line(path, made) for path, made in files),
        f"best possible log-loss {best.logloss:.4f}, AUC {best.auc:.4f}: the hidden model on "
        f"{files[-1][0]}",
        f"{seconds:.1f} s; all of this is in {_facts_path(options.out)}",
    ]
    return "\n".join(lines)


def _set_line(path: Path, made: SetFacts) -> str:
    return (
        f"{path}: {made.examples:,} examples, {made.bytes / 1e6:,.1f} MB, "
        f"{made.distinct_ids:,} distinct ids, {made.positive_rate:.1%} clicks"
    )
