# SPDX-License-Identifier: Apache-2.0
"""`commute show plan` and `commute show model`: what would be done, and what was learned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

_DESCRIPTION = """\
Show the plan of an algorithm: what each rank sends, receives and adds, step by step. The plan is
the very data that is executed, and is verified before it is shown.

  commute show plan ring --ranks 4                       allreduce by a ring of four
  commute show plan halving-doubling --ranks 6 --rank 5  what rank 5 of six does
  commute show plan binomial --collective broadcast --ranks 8 --root 3
  commute show plan ring --ranks 4 --svg ring.svg        as a drawing"""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute show`."""
    made = argparse.ArgumentParser(prog="commute show", allow_abbrev=False)
    things = made.add_subparsers(dest="thing", metavar="WHAT", required=True)
    plan = things.add_parser(
        "plan",
        help="the instructions of one algorithm",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument("algorithm", help="its name, such as ring or tree")
    plan.add_argument("--ranks", type=int, default=4, metavar="N", help="how many (default 4)")
    plan.add_argument("--collective", default="allreduce", metavar="NAME", help="(allreduce)")
    plan.add_argument("--root", type=int, default=0, metavar="RANK", help="where it has one (0)")
    plan.add_argument("--rank", type=int, metavar="RANK", help="show this rank only")
    plan.add_argument("--svg", metavar="FILE", help="draw it into this file; - is the output")
    model = things.add_parser(
        "model",
        help="the largest weights, sizes and settings of a saved model",
        description="Show a model that `commute learn` has saved.",
        allow_abbrev=False,
    )
    model.add_argument("folder", help="where it is")
    model.add_argument("--top", type=int, default=20, metavar="N", help="weights to list (20)")
    return made


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    return _show_model(options) if options.thing == "model" else _show_plan(options)


def _show_model(options: argparse.Namespace) -> int:
    from commute.learn.model import describe

    print(describe(options.folder, options.top))
    return 0


def _show_plan(options: argparse.Namespace) -> int:
    from commute.plan import build, draw, show

    if options.rank is not None and not 0 <= options.rank < options.ranks:
        print(f"commute show: there is no rank {options.rank} of {options.ranks}", file=sys.stderr)
        return 2
    try:
        plan = build(options.collective, options.algorithm, options.ranks, options.root)
    except ValueError as error:
        print(f"commute show: {error}", file=sys.stderr)
        return 2
    if options.svg is None:
        sys.stdout.write(show(plan, options.rank))
        return 0
    if options.svg == "-":
        sys.stdout.write(draw(plan))
        return 0
    try:
        Path(options.svg).write_text(draw(plan))
    except OSError as error:
        print(f"commute show: the drawing was not written: {error}", file=sys.stderr)
        return 1
    print(f"drew {plan.collective.label} by {plan.algorithm} into {options.svg}")
    return 0
