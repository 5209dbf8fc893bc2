# SPDX-License-Identifier: Apache-2.0
"""A run's report: as JSON, as text for a terminal, and as a page that is safe to open."""

from __future__ import annotations

import doctest
import json
import math
import re
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest

from commute.learn import report as module
from commute.learn.metrics import Metrics
from commute.learn.report import (
    Figures,
    History,
    Point,
    Report,
    clipped,
    sparkline,
    to_html,
    to_json,
    to_terminal,
)

SEED = 7
NASTY = "ad=<script>alert('x')</script>&\"\x1b[31m\u202e\n" + "長" * 90
VOID = {"meta", "br", "link", "img", "input", "hr"}


def trained(points: int = 30, loss: str = "logistic") -> Report:
    """The report of a run with scores that get better."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    total, history = Metrics(), History()
    for i in range(points):
        truth = rng.normal(-1, 1, 400)
        labels = (rng.random(400) < 1 / (1 + np.exp(-truth))).astype("f")
        total.add((truth * i / points).astype("f"), labels, None, loss)
        history.record(total, seconds=(i + 1) / 4, features=100 * i, staleness=i % 3)
    made = Report(
        title=f"{loss} on {NASTY}",
        loss_name=loss,
        features=100 * points,
        table_bytes=2_500_000,
        test=Figures.of(total),
        settings={"data": NASTY, "workers": 2, "constant": True, "l1": 0.5, NASTY: None},
        top_weights=[(NASTY, 2.5), ("constant", -1.25), ("zero", 0.0), ("lost", math.nan)],
        notes=["2.1e-08 collisions expected", NASTY, "word " * 60],
        bad_lines=3,
        model="clicks.model",
        reports=["report.html", "report.json"],
        history=history.points,
    )
    made.take(total, points / 4)
    return made


REPORTS = {
    "logistic": trained(),
    "hinge": trained(loss="hinge"),
    "squared": trained(loss="squared"),
    "one point": trained(1),
    "many points": trained(1000),
    "nothing": Report(),
    "infinite": Report(
        loss=math.inf,
        logloss=math.inf,
        history=[Point(examples=5, seconds=0.0, logloss=math.inf, auc=math.nan)] * 2,
        top_weights=[("a", math.inf), ("b", -math.inf)],
        calibration=[(math.nan, 0.5, 1.0)],
    ),
    "huge": Report(
        examples=10**15,
        features=10**18,
        history=[Point(examples=10**15, seconds=1e-9, loss=1e300, features=10**18)],
        top_weights=[("a", 1e300), ("b", -1e-300)],
    ),
}
each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())


def test_points_are_of_the_window():
    """A point's loss and AUC are of the examples since the last; its counts are of all."""
    total, history = Metrics(), History()
    total.add(np.array([1.0, -1.0]), np.array([1.0, 0.0]))
    first = history.record(total, seconds=1.0, features=4)
    total.add(np.array([1.0, -1.0]), np.array([0.0, 1.0]))
    second = history.record(total, seconds=2.0, features=6, staleness=1.5)
    third = history.record(total, seconds=3.0, features=6)

    assert (first.examples, first.auc) == (2, 1.0)
    assert (second.examples, second.auc, second.features, second.staleness) == (4, 0.0, 6, 1.5)
    assert second.logloss == pytest.approx(first.logloss + 1)
    assert (third.examples, math.isnan(third.logloss), math.isnan(third.auc)) == (4, True, True)
    assert history.points == [first, second, third]


def test_json_of_a_classifier():
    """The keys that programs read are at the top."""
    report = REPORTS["logistic"]
    found = json.loads(to_json(report))

    top = {"examples", "seconds", "examples_per_second", "logloss", "auc", "features", "test"}
    assert top <= set(list(found)[:8])
    assert found["examples"] == 30 * 400
    assert found["examples_per_second"] == pytest.approx(1600)
    assert found["logloss"] == report.logloss
    assert found["test"]["auc"] == report.auc
    assert found["settings"][NASTY] is None
    assert found["top_weights"][0] == [NASTY, 2.5]
    assert len(found["history"]) == 30


def test_json_of_a_regression():
    """It has a loss, and null where figures of classes would be."""
    found = json.loads(to_json(REPORTS["squared"]))

    assert (found["logloss"], found["auc"]) == (None, None)
    assert (found["test"]["logloss"], found["test"]["auc"]) == (None, None)
    assert found["loss"] > 0
    assert found["test"]["loss"] == found["loss"]


@each_report
def test_json_is_standard(report):
    """No NaN and no Infinity, which JSON does not have."""
    json.loads(to_json(report), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@each_report
def test_terminal_is_narrow_and_harmless(report):
    """At most 100 columns, also with wide characters, and nothing that commands a terminal."""
    text = to_terminal(report)

    assert max(map(columns, text.splitlines())) <= 100
    assert all(line.isprintable() for line in text.split("\n"))


def test_terminal_tells():
    """What was trained, figures of training and test, notes, weights, and where things are."""
    report = REPORTS["logistic"]
    text = to_terminal(report)
    figures = {line.split("  ")[1]: line.split()[-2:] for line in text.splitlines() if line}

    assert text.lstrip().startswith("logistic on ad=<script>")
    assert figures["examples"] == ["12,000", "12,000"]
    assert figures["log-loss"] is not None
    assert f"{report.auc:.4f}" in figures["AUC"]
    assert "2.1e-08 collisions expected" in text
    assert "features  3,000   2.50MB\n" in text
    assert "bad lines 3" in text
    assert re.search(r"-1\.2500 +━{5}│ +constant", text)
    assert re.search(r"  -  +│ +lost", text)
    assert "model     clicks.model\n  report    report.html\n            report.json" in text


def test_terminal_of_a_regression():
    """The loss by its name, and nothing about classes."""
    text = to_terminal(REPORTS["squared"])

    assert "squared loss" in text
    assert "AUC" not in text
    assert "log-loss" not in text


class Page(HTMLParser):
    """Checks the balance of tags and keeps what it met."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def titles(self) -> list[str]:
        """What is said of each chart."""
        labels = [a["aria-labelledby"] for tag, a in self.tags if tag == "svg" and "role" in a]
        return [label.split("-")[0] for label in labels if label]


@each_report
def test_page_is_whole_and_alone(report):
    """Tags are balanced, names unique; nothing is run or loaded, no coordinate is off."""
    text = to_html(report)
    page = Page(text)
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    drawn = [
        attrs[key] or ""
        for _, attrs in page.tags
        for key in ("d", "x", "y", "cx", "cy", "width")
        if key in attrs
    ]
    numbers = [float(n) for d in drawn for n in re.findall(r"-?[\d.]+(?:e[-+]\d+)?", d)]

    assert len(names) == len(set(names))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith(("on", "src"))]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"nan|inf", "".join(drawn))
    assert all(-1 <= number <= 441 for number in numbers)


def test_page_shows_names_as_text():
    """A name that looks like a tag is shown letter by letter."""
    page = Page(to_html(REPORTS["logistic"]))
    cells = [text for text in page.texts if text.startswith("ad=<script>")]

    assert cells  # the weight, and the settings
    assert all("\\x1b[31m" in cell and "\\u202e" in cell for cell in cells)


def test_page_has_its_charts():
    """A chart for all that is known, each with a title; a regression has no classes to show."""
    charts = Page(to_html(REPORTS["logistic"])).titles()
    regression = Page(to_html(REPORTS["squared"])).titles()

    assert charts == ["loss", "auc", "calibration", "rate", "features", "staleness"]
    assert regression == ["loss", "rate", "features", "staleness"]
    assert Page(to_html(REPORTS["nothing"])).titles() == []


def test_page_of_a_long_run_is_small():
    """A thousand points are drawn as 120 and listed as 200 rows, the last among them."""
    report = REPORTS["many points"]
    text = to_html(report)

    assert text.count('class="point"') == 5 * 120
    assert "200 of 1,000 points" in text
    assert f'<th scope="row">{report.examples:,}</th>' in text
    assert len(text) < 300_000


def test_texts():
    """Clipping counts columns; a curve of nothing is nothing."""
    assert clipped("日本語", 6) == "日本語"
    assert clipped("日本語", 5) == "日本…"
    assert clipped("a\tb", 9) == "a\\tb"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(range(1000), 60)) == 60


def test_samples_run():
    """The samples in the docstrings give what they show."""
    found = doctest.testmod(module)

    assert found.attempted > 0
    assert found.failed == 0
