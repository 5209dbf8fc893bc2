# SPDX-License-Identifier: Apache-2.0
"""For tests of `commute learn`: examples of a hidden model, and what a model says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from commute.learn import Model

SEED = 6
FIELDS, IDS = 6, 30


class Clicks:
    """Examples of a hidden model: an id per field. Every line of a format has the same length."""

    def __init__(self, count: int, seed: int = SEED) -> None:
        hidden = np.random.default_rng(1).normal(0, 1, (FIELDS, IDS))
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(0, IDS, (count, FIELDS))
        score = hidden[np.arange(FIELDS), self.ids].sum(1)
        self.labels = (rng.random(count) < 1 / (1 + np.exp(-score))).astype(int)

    def lines(self, format: str) -> list[str]:
        def words(row: np.ndarray) -> list[str]:
            return [f"{'abcdef'[field]}{number:02d}" for field, number in enumerate(row)]

        rows = zip(self.labels, map(words, self.ids), strict=True)
        return {
            "svm": lambda: [f"{y} " + " ".join(f"{w}:1" for w in row) + "\n" for y, row in rows],
            "vw": lambda: [f"{y} |f " + " ".join(row) + "\n" for y, row in rows],
            "csv": lambda: [",".join([*row, str(y)]) + "\n" for y, row in rows],
            "tsv": lambda: ["\t".join([*row, str(y)]) + "\n" for y, row in rows],
        }[format]()

    def text(self, format: str) -> str:
        header = {"csv": "A,B,C,D,E,F,label\n", "tsv": "A\tB\tC\tD\tE\tF\tlabel\n"}.get(format, "")
        return header + "".join(self.lines(format))


def weights_of(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Keys in order, and their weights."""
    with model:
        keys, rows = (np.concatenate(part) for part in zip(*model.table.items(), strict=True))
    order = np.argsort(keys)
    return keys[order], rows.reshape(-1)[order]


def predicted(folder: Path, data: Path) -> np.ndarray:
    with Model.load(folder) as model:
        return model.predict(str(data))
