# SPDX-License-Identifier: Apache-2.0
"""What a training run tells of itself: as data, as JSON, as text for a terminal, as a page. Pure.

Point      the run at one moment; its loss and AUC are those of the examples since the last point
History    makes points from sums that only grow
Figures    loss, log-loss and AUC of a test set
Report     all of it, when the run is over

A figure that does not exist (the AUC of a regression) is not a number here, null in JSON, and "-"
for people. Names of features come from data: texts for people show no control characters.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from commute.learn.metrics import Metrics

__all__ = [
    "COLUMNS",
    "Figures",
    "History",
    "Point",
    "Report",
    "amount",
    "clipped",
    "duration",
    "figure",
    "loss_curve",
    "printable",
    "sparkline",
    "to_html",
    "to_json",
    "to_terminal",
]

COLUMNS: Final = 100  # the widest line for a terminal

_NAN: Final = math.nan
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_UNITS: Final = ("", "k", "M", "G", "T")
_SHOWN_WEIGHTS: Final = 12


class Point(msgspec.Struct, kw_only=True):
    """The run at one moment.

    Attributes:
        examples, seconds: since the run began.
        loss, logloss, auc: of the examples since the last point.
        features: how many weights the model has now.
        staleness: rounds by which the slowest worker is behind the fastest.
    """

    examples: int
    seconds: float
    loss: float = _NAN
    logloss: float = _NAN
    auc: float = _NAN
    features: int = 0
    staleness: float = _NAN


class History:
    """The points of a run. It gets sums since the run began and finds what is new in them.

    >>> history, total = History(), Metrics()
    >>> point = history.record(total, seconds=1.0, features=10)
    >>> point.examples, len(history.points)
    (0, 1)
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._last = Metrics()

    def record(
        self, total: Metrics, *, seconds: float, features: int, staleness: float = _NAN
    ) -> Point:
        """Adds a point at this moment."""
        total = Metrics.of(total.array.copy())  # the caller goes on counting in it
        window, self._last = total - self._last, total
        point = Point(
            examples=total.examples,
            seconds=seconds,
            loss=window.loss,
            logloss=window.logloss,
            auc=window.auc,
            features=features,
            staleness=staleness,
        )
        self.points.append(point)
        return point


class Figures(msgspec.Struct, kw_only=True):
    """How good the model is on examples that it was not trained on."""

    examples: int = 0
    loss: float = _NAN
    logloss: float = _NAN
    auc: float = _NAN

    @classmethod
    def of(cls, total: Metrics) -> Figures:
        return cls(examples=total.examples, loss=total.loss, logloss=total.logloss, auc=total.auc)


class Report(msgspec.Struct, kw_only=True):
    """A run that is over. Its fields, in this order, are the keys of the JSON.

    Attributes:
        loss, logloss, auc: of progressive validation, over the whole run; `loss` is the one that
            was trained, `loss_name` says which.
        features, table_bytes: how many weights the model has, and their memory with all state.
        calibration: (mean prediction, observed rate, weight) by part.
        top_weights: (name, weight), the largest first.
        notes: lines for people: expected collisions, which peers took part.
        model, reports: where the model and the written reports are.
    """

    examples: int = 0
    seconds: float = 0.0
    examples_per_second: float = _NAN
    logloss: float = _NAN
    auc: float = _NAN
    features: int = 0
    table_bytes: int = 0
    test: Figures | None = None
    title: str = "training"
    loss_name: str = "logistic"
    loss: float = _NAN
    mean_label: float = _NAN
    mean_prediction: float = _NAN
    bad_lines: int = 0
    model: str | None = None
    reports: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    settings: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    top_weights: list[tuple[str, float]] = msgspec.field(default_factory=list)
    calibration: list[tuple[float, float, float]] = msgspec.field(default_factory=list)
    history: list[Point] = msgspec.field(default_factory=list)

    def take(self, total: Metrics, seconds: float) -> None:
        """Fills in the figures of the whole run from its sums."""
        self.examples, self.seconds = total.examples, seconds
        self.examples_per_second = total.examples / seconds if seconds > 0 else _NAN
        self.loss, self.logloss, self.auc = total.loss, total.logloss, total.auc
        self.mean_label, self.mean_prediction = total.mean_label, total.mean_prediction
        self.calibration = total.calibration


def to_json(report: Report) -> str:
    """For programs; what is not a number is null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def to_html(report: Report) -> str:
    """A page that needs nothing else: charts, figures and settings."""
    from commute.learn import page  # most runs write none

    return page.to_html(report)


def figure(value: float | None, digits: int = 4) -> str:
    """A number for people: "-" for none, and no digits that say nothing.

    >>> figure(0.41237), figure(float("nan")), figure(123456.7), figure(0.00001234)
    ('0.4124', '-', '123,457', '1.23e-05')
    """
    if value is None or not math.isfinite(value):
        return "-" if value is None or math.isnan(value) else f"{value}"
    if value != 0 and abs(value) < 10.0**-digits:
        return f"{value:.2e}"
    if abs(value) >= 1e15:
        return f"{value:.4g}"
    return f"{value:,.{max(0, min(digits, digits + 1 - len(str(int(abs(value))))))}f}"


def amount(value: float) -> str:
    """A count in three digits.

    >>> amount(950), amount(98_304), amount(1_234_567), amount(999_999)
    ('950', '98.3k', '1.23M', '1.00M')
    """
    if not math.isfinite(value):
        return "-" if math.isnan(value) else f"{value}"
    unit = 0
    while abs(value) >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.25), duration(12.34), duration(754), duration(7500)
    ('0.25 s', '12.3 s', '12 min 34 s', '2 h 05 min')
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def printable(text: str) -> str:
    """The text in one line, with control characters (also those that reorder text) spelled out.

    >>> printable("red \\x1b[31m and a\\nline")
    'red \\\\x1b[31m and a\\\\nline'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def clipped(text: str, columns: int) -> str:
    """The printable text in at most so many columns of a terminal; "…" says that more follows."""
    text = printable(text)
    if sum(map(_columns, text)) <= columns:
        return text
    kept, used = [], 1
    for character in text:
        used += _columns(character)
        if used > columns:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _columns(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def sparkline(values: Sequence[float], columns: int = 40) -> str:
    """A small curve; where there are more values than columns, each column is a mean.

    >>> sparkline([4, 3, 2, 1, 1])
    '█▆▃▁▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(columns, len(finite))
    cuts = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def loss_curve(points: Iterable[Point]) -> tuple[str, list[float]]:
    """What to draw of a run: its log-loss, or its loss where there is none; and the name of it."""
    points = list(points)
    if any(math.isfinite(point.logloss) for point in points):
        return "log-loss", [point.logloss for point in points]
    return "loss", [point.loss for point in points]


def to_terminal(report: Report) -> str:
    """The report as text of at most 100 columns, for the end of a run."""
    parts = [
        [clipped(report.title, COLUMNS - 2)],
        _figure_lines(report),
        _run_lines(report),
        _weight_lines(report.top_weights),
        _place_lines(report),
    ]
    blocks = ["\n".join(f"  {line}".rstrip() for line in part) for part in parts if part]
    return "\n" + "\n\n".join(blocks) + "\n"


def _figure_lines(report: Report) -> list[str]:
    """Figures of training and test, side by side."""
    test = report.test
    rows = [("examples", f"{report.examples:,}", f"{test.examples:,}" if test else "")]
    if report.loss_name != "logistic":
        name = f"{printable(report.loss_name)} loss"
        rows.append((name, figure(report.loss, 5), figure(test.loss, 5) if test else ""))
    if report.loss_name != "squared":
        rows.append(
            ("log-loss", figure(report.logloss, 5), figure(test.logloss, 5) if test else "")
        )
        rows.append(("AUC", figure(report.auc), figure(test.auc) if test else ""))
    rows.append(("mean label", figure(report.mean_label), ""))
    rows.append(("mean prediction", figure(report.mean_prediction), ""))
    lines = [f"{'':16}{'training':>16}{'test' if test else '':>16}"]
    lines.append("─" * (48 if test else 32))
    return lines + [f"{name:16}{train:>16}{held:>16}" for name, train, held in rows]


def _run_lines(report: Report) -> list[str]:
    """How long it took, how large the model is, how the loss went, and the notes."""
    rate = f"{amount(report.examples_per_second)} examples/s"
    memory = f"   {amount(report.table_bytes)}B" if report.table_bytes else ""
    rows = [
        ("time", f"{duration(report.seconds)}   {rate}"),
        ("features", f"{report.features:,}{memory}"),
    ]
    name, losses = loss_curve(report.history)
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) > 1:
        rows.append((name, f"{figure(finite[0])} {sparkline(finite)} {figure(finite[-1])}"))
    if report.bad_lines:
        rows.append(("bad lines", f"{report.bad_lines:,}, left out"))
    lines = [line for note in report.notes for line in textwrap.wrap(printable(note), COLUMNS - 12)]
    rows += [("note" if i == 0 else "", line) for i, line in enumerate(lines)]
    return [f"{name:10}{clipped(text, COLUMNS - 12)}" for name, text in rows]


def _weight_lines(weights: Sequence[tuple[str, float]]) -> list[str]:
    """The largest weights as bars around a middle."""
    if not weights:
        return []
    shown = weights[:_SHOWN_WEIGHTS]
    most = max((abs(w) for _, w in shown if math.isfinite(w)), default=0.0) or 1.0
    lines = ["largest weights"]
    for name, weight in shown:
        length = round(10 * abs(weight) / most) if math.isfinite(weight) else 0
        bar = f"{'━' * length:>10}│{'':10}" if weight < 0 else f"{'':10}│{'━' * length:10}"
        sign = "+" if weight > 0 else ""
        lines.append(f"{sign + figure(weight):>12}  {bar}  {clipped(name, COLUMNS - 40)}")
    return lines


def _place_lines(report: Report) -> list[str]:
    rows = [("model", report.model)] if report.model else []
    rows += [("report" if i == 0 else "", path) for i, path in enumerate(report.reports)]
    # A path is never cut: it is there to be copied.
    return [f"{name:10}{printable(path or '')}" for name, path in rows]
