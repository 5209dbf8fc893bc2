# SPDX-License-Identifier: Apache-2.0
"""What a line of text means: its format, its columns, which features are crossed.

A recipe is made once, from flags and a look at the data, and saved with the model: whoever scores
with the model reads lines the same way. The parser itself is in the core (core/learn/parser.h).

    cell ──> kind:  category   feature (column, text), 1
                    number     feature (column), (x - mean) / deviation, after a logarithm if asked
                               for; or with bins the category of its bin
                    label, weight, ignore
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from commute import _core
from commute._errors import SettingError

__all__ = ["ALL", "Column", "Recipe", "crosses_of", "guess", "split_cells"]

FORMATS = ("svm", "vw", "csv", "tsv")
ALL = "*"  # of --cross: every category
LABEL_NAMES = ("label", "target", "class", "click", "clicked", "y", "outcome")
# Distinct texts of a column of numbers up to which it is taken for codes of categories.
CODES_MAX = 2
MISSING = ("", "?", "nan")  # as the parser says (core/learn/parser_csv.cc)


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a CSV file."""

    name: str
    kind: str  # category, number, label, weight, ignore
    log: bool = False
    shift: float = 0.0
    scale: float = 1.0
    edges: tuple[float, ...] = ()


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How lines become examples.

    >>> Recipe(format="vw").digest() == Recipe(format="svm").digest()
    False
    """

    format: str
    separator: str = ","
    header: bool = False  # the first line of a file names its columns
    columns: tuple[Column, ...] = ()
    crosses: tuple[tuple[str, ...], ...] = ()
    positive: tuple[str, ...] = ()
    binary: bool = True
    constant: bool = True

    def parser(self, header: Sequence[str] = (), *, labels_needed: bool = True) -> _core.Parser:
        """A parser of lines; `header` are the columns of this file, where they are in it."""
        return _core.Parser(
            "csv" if self.format == "tsv" else self.format,
            self.separator,
            [
                (c.name, c.kind, c.log, c.shift, c.scale, list(c.edges))
                for c in self._in_order(header, labels_needed)
            ],
            [list(cross) for cross in self.crosses],
            list(self.positive),
            self.binary,
            self.constant,
            labels_needed,
        )

    def _in_order(self, header: Sequence[str], labels_needed: bool) -> tuple[Column, ...]:
        if not header:
            return self.columns
        known = {column.name: column for column in self.columns}
        missing = [
            name
            for name, column in known.items()
            if name not in header
            and column.kind != "ignore"
            and (labels_needed or column.kind not in ("label", "weight"))
        ]
        if missing:
            raise SettingError(
                f"expected the columns {', '.join(known)}; the file has no {', '.join(missing)}."
                " Its first line must name its columns"
            )
        return tuple(known.get(name, Column(name=name, kind="ignore")) for name in header)

    def digest(self) -> str:
        """The same for recipes that make the same features."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


def split_cells(line: str, separator: str) -> list[str]:
    """The cells of a line, without blanks and quotes around them.

    >>> split_cells('39, State-gov,"a, b"', ",")
    ['39', 'State-gov', 'a, b']
    """
    cells, cell, quoted, i = [], "", False, 0
    line = line.rstrip("\r\n")
    while i < len(line):
        char = line[i]
        if char == '"' and quoted and line[i + 1 : i + 2] == '"':
            cell += char
            i += 1
        elif char == '"' and (quoted or not cell.strip()):
            quoted = not quoted
        elif char == separator and not quoted:
            cells.append(cell.strip())
            cell = ""
        else:
            cell += char
        i += 1
    return [*cells, cell.strip()]


def guess(
    lines: Sequence[str],
    *,
    format: str,
    names: Sequence[str] = (),
    label: str | None = None,
    weight: str | None = None,
    kinds: dict[str, str] | None = None,
    logs: Sequence[str] = (),
    bins: dict[str, int] | None = None,
    crosses: Sequence[Sequence[str]] = (),
    positive: Sequence[str] = (),
    binary: bool = True,
) -> tuple[Recipe, list[str]]:
    """The recipe for a file that begins with these lines, and sentences about what was guessed."""
    if format not in FORMATS:
        raise SettingError(f"expected a format of {', '.join(FORMATS)}, got {format!r}")
    if format in ("svm", "vw"):
        _refuse_columns(format, names, label, weight, kinds, logs, bins)
        recipe = Recipe(
            format=format,
            crosses=crosses_of(crosses, None if format == "vw" else []),
            positive=tuple(positive),
            binary=binary,
        )
        return recipe, []
    separator = "\t" if format == "tsv" else ","
    rows = [split_cells(line, separator) for line in lines if line.strip()]
    if not rows:
        raise SettingError("the file is empty; expected a line with the names of its columns")
    header = not names
    columns = list(names) if names else rows.pop(0)
    if len(set(columns)) < len(columns):
        raise SettingError(f"expected each column to have a name of its own, got {columns}")
    rows = [row for row in rows if len(row) == len(columns)]
    table = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    asked = _asked(table, label, weight, kinds or {}, logs, bins or {})
    said: list[str] = []
    label = _label(columns, asked, said)
    positive = _positive(table[label], positive, said) if binary else ()
    made = [_column(name, table[name], asked, logs, bins or {}) for name in columns]
    categories = [column.name for column in made if column.kind == "category"]
    numbers = [column.name for column in made if column.kind == "number" and not column.edges]
    said.append(f"{len(categories)} columns of categories: {', '.join(categories) or '-'}")
    said.append(f"{len(numbers)} columns of numbers: {', '.join(numbers) or '-'}")
    recipe = Recipe(
        format=format,
        separator=separator,
        header=header,
        columns=tuple(made),
        crosses=crosses_of(crosses, [c.name for c in made if c.kind == "category" or c.edges]),
        positive=tuple(positive),
        binary=binary,
    )
    return recipe, said


def crosses_of(
    given: Sequence[Sequence[str]], categories: Sequence[str] | None
) -> tuple[tuple[str, ...], ...]:
    """The crosses with each `*` written out; `categories` is None where any name may come up.

    >>> crosses_of([["*", "*"]], ["a", "b", "c"])
    (('a', 'b'), ('a', 'c'), ('b', 'c'))
    """
    made: dict[tuple[str, ...], None] = {}
    for cross in given:
        if len(cross) < 2:
            raise SettingError(f"expected names like a:b to be crossed, got {':'.join(cross)!r}")
        if categories is None:
            made[tuple(cross)] = None
            continue
        if set(cross) == {ALL}:
            made.update(dict.fromkeys(combinations(categories, len(cross))))
            continue
        unknown = [name for name in cross if name not in categories]
        if unknown:
            raise SettingError(
                f"there is no column of categories {unknown[0]!r} to be crossed; there are"
                f" {', '.join(categories) or 'none'} (a number becomes one by --bin)"
            )
        made[tuple(cross)] = None
    if any(ALL in cross for cross in made):
        raise SettingError(f"{ALL!r} to be crossed needs a file with columns: name the namespaces")
    return tuple(made)


def _refuse_columns(format: str, *given: Any) -> None:
    if any(given):
        raise SettingError(
            f"a file in the format {format} has no columns; --label, --column, --log, --bin and"
            " --names are for csv and tsv"
        )


def _asked(
    table: dict[str, list[str]],
    label: str | None,
    weight: str | None,
    kinds: dict[str, str],
    logs: Sequence[str],
    bins: dict[str, int],
) -> dict[str, str]:
    """The kinds that flags ask for, by column."""
    asked = {**kinds, **dict.fromkeys((*logs, *bins), "number")}
    if label is not None:
        asked[label] = "label"
    if weight is not None:
        asked[weight] = "weight"
    for name, kind in asked.items():
        if name not in table:
            raise SettingError(f"there is no column {name!r}; there are {', '.join(table)}")
        if kind not in ("category", "number", "label", "weight", "ignore"):
            raise SettingError(
                f"expected column {name!r} to be category, number, label, weight or ignore,"
                f" got {kind!r}"
            )
    return asked


def _label(columns: Sequence[str], asked: dict[str, str], said: list[str]) -> str:
    found = [name for name, kind in asked.items() if kind == "label"]
    if len(found) > 1:
        raise SettingError(f"expected one label, got {', '.join(found)}")
    if not found:
        free = [name for name in columns if name not in asked]
        named = [name for name in free if name.lower() in LABEL_NAMES]
        found = named[:1] or free[-1:]
        if not found:
            raise SettingError("there is no column left to be the label; --label names it")
        said.append(f"label: column {found[0]!r} (guessed; --label says another)")
        asked[found[0]] = "label"
    return found[0]


def _positive(cells: Sequence[str], given: Sequence[str], said: list[str]) -> Sequence[str]:
    if given or all(_number(cell) is not None for cell in cells):
        return given
    texts, counts = np.unique(cells, return_counts=True)
    if len(texts) != 2:
        raise SettingError(
            f"expected the label to be a number or one of two texts, got {len(texts)} of them:"
            f" {', '.join(map(str, texts[:5]))}; --positive says which ones mean 1"
        )
    rarer = str(texts[int(np.argmin(counts))])
    said.append(f"label 1: {rarer!r}, the rarer one (guessed; --positive says another)")
    return (rarer,)


def _column(
    name: str,
    cells: Sequence[str],
    asked: dict[str, str],
    logs: Sequence[str],
    bins: dict[str, int],
) -> Column:
    numbers = [_number(cell) for cell in cells if cell.lower() not in MISSING]
    is_number = bool(numbers) and None not in numbers and len(set(numbers)) > CODES_MAX
    kind = asked.get(name, "number" if is_number else "category")
    if kind != "number":
        return Column(name=name, kind=kind)
    known = np.array([n for n in numbers if n is not None])
    if name in bins:
        if bins[name] < 2:
            raise SettingError(f"expected 2 bins or more for column {name!r}, got {bins[name]}")
        # Of distinct values: in a column that is mostly 0, bins of equal weight would all be 0.
        inner = np.arange(1, bins[name]) / bins[name]
        edges = np.unique(np.quantile(np.unique(known), inner)) if len(known) else np.zeros(0)
        return Column(name=name, kind=kind, edges=tuple(map(float, edges)))
    log = name in logs
    if log:
        known = np.sign(known) * np.log1p(np.abs(known))
    deviation = float(known.std()) if len(known) else 0.0
    return Column(
        name=name,
        kind=kind,
        log=log,
        shift=float(known.mean()) if len(known) else 0.0,
        scale=1 / deviation if deviation > 0 else 1.0,
    )


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
