# SPDX-License-Identifier: Apache-2.0
"""How a run is shown: plain lines in their time, a panel that leaves the terminal as it was."""

from __future__ import annotations

import io
import sys

import pytest

from commute import SettingError
from commute.learn import display as module
from commute.learn.display import Display
from commute.learn.report import Point, Report

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
LATER = Point(
    examples=123_456_789_012,
    seconds=4.0,
    loss=0.41,
    logloss=0.41237,
    auc=0.77123,
    features=1_234_567,
    staleness=12.34,
)


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Torn(Terminal):
    """A pipe whose reader leaves after some writes."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def point(examples: int, seconds: float) -> Point:
    return Point(examples=examples, seconds=seconds, loss=0.5, features=10)


def test_plain_lines_come_every_two_seconds():
    """However often it is told; the rate is that since the last line."""
    stream, clock = io.StringIO(), Clock()
    with Display(stream, clock) as display:
        display.begin("a run", ["of 2 workers"])
        for tenth in range(1, 51):
            clock.now = 100 + tenth / 10
            display.update(point(tenth * tenth * 100, tenth / 10), tenth / 50)
    lines = stream.getvalue().splitlines()

    assert not display.live
    assert lines[:2] == ["a run", "  of 2 workers"]
    assert lines[2:] == [
        " 40%         40,000 examples  20.0k/s  loss 0.5000  features    10",
        " 80%        160,000 examples  60.0k/s  loss 0.5000  features    10",
    ]


def test_a_line_holds_all_figures():
    """It fits in 100 columns; without a fraction there is no per cent."""
    stream, clock = io.StringIO(), Clock()
    display = Display(stream, clock)
    display.begin("x" * 200, ["y" * 200, "a\x1b[31m\nb"])
    clock.now += 2
    display.update(LATER, 1.0)
    clock.now += 2
    display.update(LATER)
    *head, full, bare = stream.getvalue().splitlines()

    assert all(len(line) <= 100 and line.isprintable() for line in (*head, full, bare))
    assert full.startswith("100%  123,456,789,012 examples  30.9G/s  log-loss 0.4124  AUC 0.7712")
    assert full.endswith("features 1.23M  stale 12")
    assert bare.split()[:3] == ["123,456,789,012", "examples", "-/s"]


def test_notes_and_the_end_come_at_once():
    """They do not wait for their time."""
    stream = io.StringIO()
    with Display(stream, Clock()) as display:
        display.begin("a run", [])
        display.note("worker 1\nleft")
        display.end(Report(title="the run", examples=1234))
    text = stream.getvalue()

    assert text.startswith("a run\nnote: worker 1\\nleft\n\n  the run\n")
    assert "1,234" in text


def test_plain_where_it_must_be(monkeypatch):
    """No panel in a pipe, on a dumb terminal, in an old encoding, or without rich."""
    pytest.importorskip("rich")
    old = Terminal()
    old.encoding = "latin-1"
    monkeypatch.setenv("TERM", "xterm")

    assert Display(Terminal()).live
    assert not Display(Terminal(), live=False).live
    assert not Display(io.StringIO()).live
    assert not Display(old).live
    monkeypatch.setenv("TERM", "dumb")
    assert not Display(Terminal()).live
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert not Display(Terminal()).live
    with pytest.raises(SettingError, match=r"install commute\[cli\]"):
        Display(Terminal(), live=True)


def test_standard_output_by_default(capsys):
    """It is looked up when the display is made."""
    Display().begin("a run", [])

    assert capsys.readouterr().out == "a run\n"


def test_old_encodings_get_what_they_can_show():
    """A name that the log cannot hold does not end the run."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Display(stream).begin("größe", ["日"])

    assert raw.getvalue() == b"gr??e\n  ?\n"


def test_panel():
    """It shows figures, curve and progress, and goes away before the report."""
    pytest.importorskip("rich")
    stream, clock = Terminal(), Clock()
    with Display(stream, clock, live=True) as display:
        display.begin("a [red]run[/red]", ["of [b]2[/b] workers"])
        for second in range(1, 9):
            clock.now += 1
            display.update(point(1000 * second, float(second)), second / 8)
        display.note("[1] left")
        display.end(Report(title="the run"))
    text = stream.getvalue()

    assert "a [red]run[/red]" in text  # no markup of rich in what others named
    assert "of [b]2[/b] workers" in text
    assert "8,000" in text
    assert "1000" in text or "1.00k" in text
    assert "note: [1] left" in text
    assert "4.00 s, about 4.00 s left" in text
    assert text.index(HIDE) < text.rindex(SHOW) < text.index("the run\n")


def test_panel_is_not_drawn_too_often():
    """Ten times a second at most, while every point is in the curve."""
    pytest.importorskip("rich")
    stream, clock = Terminal(), Clock()
    with Display(stream, clock, live=True) as display:
        display.begin("a run", [])
        before = len(stream.getvalue())
        for _ in range(50):
            display.update(point(1, 1.0))
        assert len(stream.getvalue()) == before
        clock.now += 1
        display.update(point(1, 1.0))
        assert "▁" * 51 in stream.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_cursor_comes_back(error):
    """Whatever ends the run, and standard output is the old one again."""
    pytest.importorskip("rich")
    stream, out = Terminal(), sys.stdout
    with pytest.raises(error), Display(stream, Clock(), live=True) as display:
        display.begin("a run", [])
        assert stream.getvalue().rindex(HIDE) >= 0
        raise error
    text = stream.getvalue()

    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert sys.stdout is out


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("left", range(6))
def test_a_closed_pipe_is_the_callers_to_handle(live, left):
    """BrokenPipeError passes, not an exit of the process, wherever it strikes."""
    pytest.importorskip("rich")
    out, clock = sys.stdout, Clock()
    with pytest.raises(BrokenPipeError), Display(Torn(left), clock, live=live) as display:
        display.begin("a run", ["of 2 workers"])
        for second in range(9):
            clock.now += 2
            display.update(point(second, second))
        display.end(Report())

    assert sys.stdout is out
