# SPDX-License-Identifier: Apache-2.0
"""Sparse linear models, trained from text files on the parameter store.

recipe      what a line means: format, columns, crosses
sources     files, and how they are dealt to streams
reader      batches of examples from text (the parser is in core/learn); cache: from a binary
trainer     what a worker does: pull, score, push
progress    what workers report, added up by a table of the store
fit         looks at the data, starts the workers, follows them; start, job: their processes
model       a trained model: load, predict
metrics, report, page, display     figures, and how they are shown
clicks      data to try it with
"""

from commute.learn.fit import fit
from commute.learn.model import Model

__all__ = ["Model", "fit"]
