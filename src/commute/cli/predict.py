# SPDX-License-Identifier: Apache-2.0
"""`commute predict`: scores examples with a model that `commute learn` has saved."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

_DESCRIPTION = """\
Score examples with a saved model: a line with a number for each example, in order.

  commute predict model/ new.svm > scores.txt
  zcat new.vw.gz | commute predict model/ - --output scores.txt

For lr the number is the probability of label 1, for other models the score. Labels in the data are
not used, and may be missing where the format allows it."""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute predict`."""
    made = argparse.ArgumentParser(
        prog="commute predict",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("model", help="the folder of the model")
    made.add_argument("data", nargs="+", help="files, patterns of names, or - for standard input")
    made.add_argument("--output", "-o", metavar="FILE", help="write there, not to standard output")
    made.add_argument("--raw", action="store_true", help="scores instead of probabilities")
    return made


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from commute._errors import SettingError
    from commute.learn.model import Model

    with Model.load(options.model) as model:
        made = model.predictions(options.data, raw=options.raw)
        if options.output is None:
            for block in made:
                _print(_lines(block))
            return 0
        new = f"{options.output}.new"
        try:
            with open(new, "w", encoding="ascii") as file:
                for block in made:
                    file.write(_lines(block))
            os.replace(new, options.output)
        except OSError as error:
            raise SettingError(f"{options.output} cannot be written: {error.strerror}") from error
        finally:
            if os.path.exists(new):
                os.unlink(new)
    return 0


def _print(text: str) -> None:
    from commute._errors import SettingError

    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has seen enough: no error to be told
    except OSError as error:
        # Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        why = f"standard output cannot be written: {error.strerror}"
        raise SettingError(why) from error


def _lines(block: object) -> str:
    import numpy as np

    numbers = np.asarray(block).tolist()
    return "".join(f"{number:.6g}\n" for number in numbers)
