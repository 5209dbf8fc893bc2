# SPDX-License-Identifier: Apache-2.0
"""The report of a training run as one HTML page. Pure.

The page needs nothing else: no script, no font, no picture from elsewhere, and its policy forbids
them. Charts are SVG written here by hand; colours follow the reader's light or dark setting. Every
text passes `_text`, since names of features come from data. What is drawn can also be read: each
chart has a title and a description, points tell their values, and tables hold the figures.

    page = header, tiles, charts (_line_chart, _calibration_chart), weights, tables
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from commute.learn.report import (
    Figures,
    Point,
    Report,
    amount,
    duration,
    figure,
    loss_curve,
    printable,
)

__all__ = ["to_html"]

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 424, 14, 198  # the box that data is drawn in
_MOST_POINTS: Final = 120  # drawn; more than that and they could not be told apart
_MOST_ROWS: Final = 200

_STYLE: Final = """
:root { color-scheme: light dark; --paper: #f7f7f5; --card: #ffffff; --ink: #22262b;
  --soft: #656d76; --rule: #e4e5e2; --main: #2f6bd8; --other: #c2601b; --shade: #2f6bd814; }
@media (prefers-color-scheme: dark) { :root { --paper: #131518; --card: #1b1e22; --ink: #e4e7ea;
  --soft: #9ba4ae; --rule: #2e3339; --main: #7ba8f7; --other: #eda366; --shade: #7ba8f71f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; font-weight: 600; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; font-weight: 600; margin: 0 0 .75rem; }
p { margin: 0; } .soft { color: var(--soft); }
.tiles, .cards { display: grid; gap: 1rem; margin-top: 1.5rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.tiles > div, section { background: var(--card); border: 1px solid var(--rule);
  border-radius: .75rem; padding: 1rem 1.15rem; min-width: 0; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-variant-numeric: tabular-nums; font-size: 1.5rem; }
.tiles dd.soft { font-size: .85rem; min-height: 1.3em; }
dl { margin: 0; } ul { margin: 0; padding-left: 1.1rem; }
li, td, th { overflow-wrap: anywhere; }
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--rule); stroke-width: 1; } .line { fill: none; stroke: var(--main);
  stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.area { fill: var(--shade); } .aim { stroke: var(--other); stroke-width: 1.5;
  stroke-dasharray: 5 4; fill: none; }
svg text.aimed { fill: var(--other); stroke: var(--card); stroke-width: 3; paint-order: stroke; }
.dot { fill: var(--main); stroke: var(--card); stroke-width: 1.5; }
.hit { fill: transparent; } .point .dot { opacity: 0; } .point:hover .dot { opacity: 1; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); font-weight: 400; }
tbody tr:last-child > * { border-bottom: 0; } tr > :last-child { padding-right: 0; }
  thead th, tbody th { color: var(--soft); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; } .names tbody th { color: var(--ink); }
.names * { vertical-align: middle; }
.bar { width: 40%; min-width: 6rem; }
.bar svg { display: block; width: 100%; height: .8rem; }
.up { fill: var(--main); } .down { fill: var(--other); }
summary { cursor: pointer; font-weight: 600; } details[open] summary { margin-bottom: .75rem; }
footer { margin-top: 1.5rem; color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
"""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


class _Axis(NamedTuple):
    """Where values of a range lie on the page."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        """Round numbers within the range, about so many."""
        step = _round_step((self.high - self.low) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(raw: float) -> float:
    """The first of 1, 2, 2.5, 5, 10 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next((n * power for n in (1, 2, 2.5, 5) if n * power >= raw * (1 - 1e-9)), 10 * power)


def _spread(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """A range that holds the values and ends at round numbers; never empty."""
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - margin), high + margin
    step = _round_step((high - low) / 4)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _text(value: object) -> str:
    """The only way for a text into the page."""
    return html.escape(printable(str(value)))


def _tick(value: float) -> str:
    """A round number, as short as it can be."""
    if abs(value) >= 1000:
        shown = amount(value)
        unit = shown.lstrip("-0123456789.")
        number = shown[: len(shown) - len(unit)]
        return (number.rstrip("0").rstrip(".") if "." in number else number) + unit
    return f"{value:.6g}" if abs(value) > 1e-12 else "0"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The finite points; of too many, means of neighbours."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    count = min(_MOST_POINTS, len(finite))
    cuts = [len(finite) * i // count for i in range(count + 1)] if count else []
    groups = [finite[a:b] for a, b in itertools.pairwise(cuts)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _frame(x: _Axis, y: _Axis, x_label: str) -> str:
    """Grid, numbers and the name of the horizontal axis."""
    parts = []
    for tick in y.ticks(4):
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 8}" y="{at + 4:.1f}">{_tick(tick)}</text>')
    for tick in x.ticks(5):
        at = x.at(tick)
        parts.append(f'<text class="middle" x="{at:.1f}" y="{_BOTTOM + 18}">{_tick(tick)}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text class="middle" x="{middle}" y="{_HEIGHT - 4}">{_text(x_label)}</text>')
    return "".join(parts)


def _svg(name: str, title: str, description: str, body: str) -> str:
    """A chart with what a screen reader says of it. `name` is unique within the page."""
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{_text(title)}</title>'
        f'<desc id="{name}-text">{_text(description)}</desc>{body}</svg>'
    )


class _Curve(NamedTuple):
    """What a line chart shows."""

    name: str
    title: str
    x_label: str
    points: list[tuple[float, float]]
    shown: Callable[[float], str]
    x_shown: Callable[[float], str]
    from_zero: bool = False
    aim: float = math.nan  # of a test set: a dashed line


def _line_chart(curve: _Curve) -> str:
    """A card with a line over examples or time; empty where there is nothing to draw."""
    points = _thinned(curve.points)
    if not points:
        return ""
    aims = [curve.aim] if math.isfinite(curve.aim) else []
    xs = [x for x, _ in points]
    x = _Axis(0.0, max(xs) if max(xs) > 0 else 1.0, _LEFT, _RIGHT)
    y = _Axis(*_spread([*(v for _, v in points), *aims], curve.from_zero), _BOTTOM, _TOP)
    places = [(x.at(px), y.at(py)) for px, py in points]
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    body = _frame(x, y, curve.x_label)
    if len(points) > 1:
        area = f"M{places[0][0]:.1f} {_BOTTOM}L{path}L{places[-1][0]:.1f} {_BOTTOM}Z"
        body += f'<path class="area" d="{area}"/>' if curve.from_zero else ""
        body += f'<path class="line" d="M{path}"/>'
    else:
        body += f'<circle class="dot" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="4"/>'
    for aim in aims:
        at = y.at(aim)
        beside = at - 6 if places[-1][1] >= at else at + 15  # where the curve is not
        body += f'<path class="aim" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>'
        body += f'<text class="end aimed" x="{_RIGHT}" y="{beside:.1f}">'
        body += f"test {curve.shown(aim)}</text>"
    body += _hits(curve, points, places)
    first, last = curve.shown(points[0][1]), curve.shown(points[-1][1])
    told = f"{curve.title} by {curve.x_label}: from {first} at first to {last} at the end."
    chart = _svg(curve.name, curve.title, told, body)
    return f"<section><h2>{_text(curve.title)}</h2>{chart}</section>"


def _hits(
    curve: _Curve, points: list[tuple[float, float]], places: list[tuple[float, float]]
) -> str:
    """A strip for each point that shows it, and tells its values, below the mouse."""
    parts = []
    edges = [(a[0] + b[0]) / 2 for a, b in itertools.pairwise(places)]
    bounds = zip([_LEFT, *edges], [*edges, _RIGHT], strict=True)
    for (px, py), (cx, cy), (begin, end) in zip(points, places, bounds, strict=True):
        told = _text(f"{curve.x_shown(px)}: {curve.shown(py)}")
        parts.append(
            f'<g class="point"><title>{told}</title><rect class="hit" x="{begin:.1f}" y="{_TOP}"'
            f' width="{max(end - begin, 0):.1f}" height="{_BOTTOM - _TOP}"/>'
            f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="4"/></g>'
        )
    return "".join(parts)


def _calibration_chart(parts: Sequence[tuple[float, float, float]]) -> str:
    """Observed rates by prediction; on the dashed diagonal they are equal."""
    finite = [row for row in parts if all(map(math.isfinite, row))]
    if not finite:
        return ""
    high = _spread([0.0, *(max(p, o) for p, o, _ in finite)], True)[1]
    x, y = _Axis(0.0, high, _LEFT, _RIGHT), _Axis(0.0, high, _BOTTOM, _TOP)
    body = _frame(x, y, "predicted probability")
    body += f'<path class="aim" d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}"/>'
    body += f'<path class="line" d="M{"L".join(_pair(x.at(p), y.at(o)) for p, o, _ in finite)}"/>'
    for predicted, observed, weight in finite:
        told = f"predicted {figure(predicted)}, observed {figure(observed)}, weight {weight:,.0f}"
        body += (
            f'<circle class="dot" cx="{x.at(predicted):.1f}" cy="{y.at(observed):.1f}" r="4">'
            f"<title>{_text(told)}</title></circle>"
        )
    worst = max(abs(p - o) for p, o, _ in finite)
    told = (
        f"Observed rate by predicted probability in {len(finite)} parts of about equal weight."
        f" They differ by at most {figure(worst)}."
    )
    chart = _svg("calibration", "Calibration", told, body)
    return f"<section><h2>Calibration: observed rate by prediction</h2>{chart}</section>"


def _pair(x: float, y: float) -> str:
    return f"{x:.1f} {y:.1f}"


def _curves(report: Report) -> list[_Curve]:
    history, test = report.history, report.test
    name, losses = loss_curve(history)
    loss_test = (test.logloss if name == "log-loss" else test.loss) if test else math.nan
    examples = [float(point.examples) for point in history]
    seconds = [point.seconds for point in history]
    by_examples = ("examples", lambda v: f"{amount(v)} examples")
    by_seconds = ("seconds", duration)

    def curve(
        key: str, title: str, values: list[float], shown: Callable[[float], str],
        timed: bool = True, from_zero: bool = True, aim: float = math.nan,
    ) -> _Curve:  # fmt: skip
        (label, x_shown), xs = (by_seconds, seconds) if timed else (by_examples, examples)
        points = list(zip(xs, values, strict=True))
        return _Curve(key, title, label, points, shown, x_shown, from_zero, aim)

    staleness = [point.staleness for point in history]
    aucs = [point.auc for point in history]
    title = "Log-loss" if name == "log-loss" else f"{report.loss_name.capitalize()} loss"
    return [
        curve("loss", title, losses, figure, False, False, loss_test),
        curve("auc", "AUC", aucs, figure, False, False, test.auc if test else math.nan),
        curve("rate", "Examples a second", _rates(history), amount),
        curve("features", "Features", [float(point.features) for point in history], amount),
        curve("staleness", "Staleness seen, in batches", staleness, lambda v: figure(v, 2)),
    ]


def _rates(history: Sequence[Point]) -> list[float]:
    """Examples a second since the last point; not a number where no time passed."""
    rates, examples, seconds = [], 0, 0.0
    for point in history:
        passed = point.seconds - seconds
        rates.append((point.examples - examples) / passed if passed > 0 else math.nan)
        examples, seconds = point.examples, point.seconds
    return rates


def _weights(weights: Sequence[tuple[str, float]]) -> str:
    """The largest weights: a table with a bar in each row."""
    if not weights:
        return ""
    most = max((abs(w) for _, w in weights if math.isfinite(w)), default=0.0) or 1.0
    rows = []
    for name, weight in weights:
        length = 50 * abs(weight) / most if math.isfinite(weight) else 0.0
        kind, begin = ("down", 50 - length) if weight < 0 else ("up", 50.0)
        bar = (
            '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="{kind}" x="{begin:.2f}" width="{length:.2f}" y="0" height="10"/>'
            '<path class="grid" d="M50 0V10" vector-effect="non-scaling-stroke"/></svg>'
        )
        rows.append(
            f'<tr><th scope="row">{_text(name)}</th><td class="bar">{bar}</td>'
            f'<td class="number">{figure(weight)}</td></tr>'
        )
    head = (
        '<thead><tr><th scope="col">feature</th><td></td>'
        '<th scope="col" class="number">weight</th></tr></thead>'
    )
    table = f'<table class="names">{head}<tbody>{"".join(rows)}</tbody></table>'
    return f"<section><h2>Largest weights</h2>{table}</section>"


def _tiles(report: Report) -> str:
    """The figures that matter most."""
    test = report.test or Figures()
    before = "test " if report.test else ""
    if report.loss_name == "squared":
        goals = [("squared loss", report.loss, test.loss)]
    else:
        goals = [("log-loss", report.logloss, test.logloss), ("AUC", report.auc, test.auc)]
    tiles = [(name, figure(v), before and before + figure(held)) for name, v, held in goals]
    pace = f"{amount(report.examples_per_second)} a second for {duration(report.seconds)}"
    tiles += [("examples", amount(report.examples), pace)]
    memory = f"in {amount(report.table_bytes)}B" if report.table_bytes else ""
    tiles += [("features", amount(report.features), memory)]
    cells = [
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd>"
        f'<dd class="soft">{_text(more)}</dd></div>'
        for name, value, more in tiles
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _figures(report: Report) -> str:
    """All figures of training and test in a table."""
    test = report.test or Figures()
    rows = [("examples", f"{report.examples:,}", f"{test.examples:,}" if report.test else "-")]
    if report.loss_name != "logistic":
        name = f"{report.loss_name} loss"
        rows.append((name, figure(report.loss, 6), figure(test.loss, 6)))
    if report.loss_name != "squared":
        rows.append(("log-loss", figure(report.logloss, 6), figure(test.logloss, 6)))
        rows.append(("AUC", figure(report.auc, 6), figure(test.auc, 6)))
    rows += [
        ("mean label", figure(report.mean_label, 6), "-"),
        ("mean prediction", figure(report.mean_prediction, 6), "-"),
        ("features", f"{report.features:,}", "-"),
        ("bytes of the model's table", f"{report.table_bytes:,}", "-"),
        ("seconds", figure(report.seconds, 3), "-"),
        ("examples a second", figure(report.examples_per_second, 1), "-"),
        ("bad lines, left out", f"{report.bad_lines:,}", "-"),
    ]
    return f"<section><h2>Figures</h2>{_table(('', 'training', 'test'), rows)}</section>"


def _settings(report: Report) -> str:
    if not report.settings:
        return ""
    words = {"True": "yes", "False": "no", "None": "-"}
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(words.get(str(value), value))}</td></tr>'
        for name, value in report.settings.items()
    )
    return f"<section><h2>Settings</h2><table><tbody>{rows}</tbody></table></section>"


def _points(history: Sequence[Point]) -> str:
    """The points that the charts draw, folded away; of too many, every n-th and the last."""
    if not history:
        return ""
    step = -(-len(history) // _MOST_ROWS)
    chosen = history[::-1][::step][::-1]
    rows = [
        (
            *(f"{point.examples:,}", figure(point.seconds, 2), figure(point.loss)),
            *(figure(point.logloss), figure(point.auc)),
            *(f"{point.features:,}", figure(point.staleness, 2)),
        )
        for point in chosen
    ]
    head = ("examples", "seconds", "loss", "log-loss", "AUC", "features", "staleness")
    shown = f"{len(chosen):,} of {len(history):,} points"
    return (
        f"<section><details><summary>The run in numbers</summary>"
        f'<p class="soft">{shown}; loss and AUC are of the examples since the last point.</p>'
        f'<div class="wide">{_table(head, rows)}</div></details></section>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows and whose others are numbers."""
    first, *others = head
    columns = "".join(f'<th scope="col" class="number">{_text(name)}</th>' for name in others)
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th>'
        + "".join(f'<td class="number">{_text(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    corner = f'<th scope="col">{_text(first)}</th>' if first else "<td></td>"
    return f"<table><thead><tr>{corner}{columns}</tr></thead><tbody>{body}</tbody></table>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    rows = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<section><h2>Notes</h2><ul>{rows}</ul></section>"


def to_html(report: Report) -> str:
    """The page."""
    charts = [_line_chart(curve) for curve in _curves(report)]
    charts.insert(2, _calibration_chart(report.calibration))
    tables = [_figures(report), _settings(report), _notes(report.notes)]
    cards = "".join([*charts, _weights(report.top_weights), *tables])
    title = _text(report.title)
    model = f"Model in {_text(report.model)}. " if report.model else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{title}</h1><p class="soft">{_text(report.loss_name)} loss;'
        " figures of training are those of examples not yet learned from.</p></header>\n"
        f'{_tiles(report)}\n<div class="cards">{cards}</div>\n'
        f'<div class="cards">{_points(report.history)}</div>\n'
        f"<footer>{model}Written by commute learn.</footer>\n</main>\n</body>\n</html>\n"
    )
