# SPDX-License-Identifier: Apache-2.0
"""Sparse linear models, trained from text files on the parameter store.

recipe      what a line means: format, columns, crosses
sources     files, and how they are dealt to streams
reader      batches of examples from text (the parser is in core/learn); cache: from a binary
trainer     what a worker does: pull, score, push
progress    what workers report, added up by a table of the store
fitting     looks at the data, starts the workers, follows them; start, job: their processes
model       a trained model: load, predict
metrics, report, page, display     figures, and how they are shown
clicks      data to try it with
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from commute.learn.fitting import fit
    from commute.learn.model import Model

__all__ = ["Model", "fit"]

_HOMES = {"Model": "model", "fit": "fitting"}


def __getattr__(name: str) -> object:
    """Imported at first use: the command starts its job before it needs them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'commute.learn' has no attribute {name!r}")
    home = importlib.import_module(f"commute.learn.{_HOMES[name]}")
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
