# SPDX-License-Identifier: Apache-2.0
"""The command `commute`: one verb per file, imported only when it is used.

A verb's module has two functions: `parser()` describes its arguments to argparse, and
`run(options, env)` does the work and returns the exit code.

Exit codes: 2 for a wrong command line, 1 for an error of commute's own, else the verb's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from commute._errors import CommuteError
from commute._version import __version__

__all__ = ["main"]

# Verb: the one line that `commute --help` shows.
VERBS = {
    "run": "start a job: the same script as several ranks",
    "learn": "train a sparse linear model on text files",
    "predict": "score examples with such a model",
    "serve": "keep a parameter server up, for clients that come and go",
    "status": "show what such a server holds, and for whom",
    "generate": "make data to try things with",
    "show": "show what commute would do, such as the plan of an algorithm",
    "doctor": "check this machine and print a report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    verb, *arguments = list(sys.argv[1:] if argv is None else argv) or [""]
    if verb == "--version":
        print(f"commute {__version__}")
        return 0
    if verb not in VERBS:
        asked = verb in ("-h", "--help", "help")
        wrong = f"commute: there is no verb '{verb}'\n\n" if verb and not asked else ""
        print(f"{wrong}{_help()}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        module = importlib.import_module(f"commute.cli.{verb}")
        return int(module.run(module.parser().parse_args(arguments), os.environ))
    except CommuteError as error:
        print(f"commute {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _help() -> str:
    # Not argparse's subparsers: these would eat the first "--" that belongs to a script.
    lines = [f"  {verb:<10}{line}" for verb, line in VERBS.items()]
    return "\n".join(
        (
            "usage: commute VERB ...",
            "",
            "Keeps the parameters of distributed training in step.",
            "",
            *lines,
            "",
            "`commute VERB --help` tells more about each.",
        )
    )
