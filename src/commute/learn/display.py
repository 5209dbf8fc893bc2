# SPDX-License-Identifier: Apache-2.0
"""How a training run looks while it goes on.

On a terminal, with rich: a panel that is drawn over, at most ten times a second. Elsewhere: plain
lines, at most one every two seconds. The text of the report follows at the end.

    made ── begin ──> shown ── update, note ──> shown ── end, or leaving `with` ──> over

No thread draws: a picture changes within `update`, and only there can a stream fail. Errors of the
stream, BrokenPipeError above all, pass to the caller. While the panel is shown the cursor is
hidden; leaving `with`, for whatever reason, brings it back. What is printed meanwhile appears above
the panel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TextIO

from commute._errors import SettingError
from commute.learn.report import (
    COLUMNS,
    Point,
    Report,
    amount,
    clipped,
    duration,
    figure,
    loss_curve,
    printable,
    sparkline,
    to_terminal,
)

__all__ = ["Display"]

_LINE_SECONDS: Final = 2.0
_PANEL_SECONDS: Final = 0.1
_REMEMBERED: Final = 240  # points of the small curve


class Display:
    """Shows a run. Use it in `with`, so that the terminal is as before whatever happens.

    Args:
        stream: where to; standard output if not given.
        clock: seconds, of any beginning.
        live: a panel or plain lines; if not given, a panel on a terminal where rich is installed.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        live: bool | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._panel = _make_panel(self._stream, live)
        self._shown_at = -math.inf
        self._previous = Point(examples=0, seconds=0.0)

    @property
    def live(self) -> bool:
        """Whether it draws a panel."""
        return self._panel is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._panel is None:
            return
        # What is on its way up matters more than a stream that can no longer be written.
        with contextlib.suppress(OSError, ValueError) if error else contextlib.nullcontext():
            self._panel.stop()

    def begin(self, title: str, lines: list[str]) -> None:
        """Says what is about to run."""
        self._shown_at = self._clock()
        if self._panel is None:  # the panel has it as its title
            self._write(clipped(title, COLUMNS))
        for line in lines:
            self._write("  " + clipped(line, COLUMNS - 2))
        if self._panel is not None:
            self._panel.start(title)

    def update(self, point: Point, total_fraction: float | None = None) -> None:
        """Shows a point, if it is time; `total_fraction` is how much of the run is done."""
        if self._panel is not None:
            self._panel.remember(point)
        now = self._clock()
        least = _LINE_SECONDS if self._panel is None else _PANEL_SECONDS
        if now - self._shown_at < least:
            return
        self._shown_at = now
        passed = point.seconds - self._previous.seconds
        new = point.examples - self._previous.examples
        rate = new / passed if passed > 0 else math.nan
        self._previous = point
        if self._panel is not None:
            self._panel.show(point, rate, total_fraction)
        else:
            self._write(_progress_line(point, rate, total_fraction))

    def note(self, text: str) -> None:
        """Says something at once: a bad line, a peer that came or went."""
        self._write("note: " + printable(text))

    def end(self, report: Report) -> None:
        """Takes the panel away and shows the report."""
        if self._panel is not None:
            self._panel.stop()
        self._write(to_terminal(report).rstrip("\n"))

    def _write(self, text: str) -> None:
        if self._panel is not None:
            self._panel.write(text)
            return
        # A log in Latin-1 shall not end a run because of a name in it.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        self._stream.write(text + "\n")
        self._stream.flush()


def _progress_line(point: Point, rate: float, fraction: float | None) -> str:
    """A point in one line that explains itself, for logs and for grep."""
    name, (loss,) = loss_curve([point])
    done = "" if fraction is None else f"{min(max(fraction, 0.0), 1.0):4.0%}  "
    parts = [f"{done}{point.examples:>13,} examples", f"{amount(rate):>5}/s"]
    parts.append(f"{name} {figure(loss):>6}")
    if not math.isnan(point.auc):
        parts.append(f"AUC {figure(point.auc)}")
    parts.append(f"features {amount(point.features):>5}")
    if not math.isnan(point.staleness):
        parts.append(f"stale {figure(point.staleness, 1)}")
    return clipped("  ".join(parts), COLUMNS)


def _make_panel(stream: TextIO, live: bool | None) -> _Panel | None:
    installed = importlib.util.find_spec("rich") is not None
    if live and not installed:
        raise SettingError("a live display needs rich; install commute[cli], or pass live=False")
    if live is False or not installed or (live is None and not stream.isatty()):
        return None
    panel = _Panel(stream)
    return panel if live or panel.able else None


class _Panel:
    """A panel of rich: figures, how far the run is, and a small curve of the loss."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        # Its own answer to a closed pipe is to leave the process.
        self._console.on_broken_pipe = _pass_on
        self._live: Any = None
        self._title = ""
        self._recent: deque[Point] = deque(maxlen=_REMEMBERED)

    @property
    def able(self) -> bool:
        """Whether the terminal can move its cursor and has the characters of the panel."""
        return not self._console.is_dumb_terminal and self._console.encoding.startswith("utf")

    def start(self, title: str) -> None:
        from rich.live import Live

        self._title = title
        self._live = Live(
            self._picture("waiting for the first figures"),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Gives the terminal back; nothing if it has it."""
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            finally:
                self._console.show_cursor(True)

    def write(self, text: str) -> None:
        from rich.text import Text

        # As Text, square brackets are no markup; soft_wrap keeps paths whole.
        self._console.print(Text(text), soft_wrap=True)

    def remember(self, point: Point) -> None:
        self._recent.append(point)

    def show(self, point: Point, rate: float, fraction: float | None) -> None:
        if self._live is not None:
            self._live.update(self._picture(self._body(point, rate, fraction)), refresh=True)

    def _picture(self, body: Any) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        title = Text(clipped(self._title, max(self._console.width - 8, 1)), style="bold")
        width = min(self._console.width, COLUMNS)
        return Panel(body, title=title, title_align="left", border_style="dim", width=width)

    def _body(self, point: Point, rate: float, fraction: float | None) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        name, losses = loss_curve(self._recent)
        rows = [
            ("examples", f"{point.examples:,}", name, figure(losses[-1] if losses else None)),
            ("a second", amount(rate), "AUC", figure(point.auc)),
            ("features", f"{point.features:,}", "staleness", figure(point.staleness, 2)),
        ]
        table = Table.grid(padding=(0, 2))
        for justify, style in (("left", "dim"), ("right", "bold")) * 2:
            table.add_column(justify=justify, style=style, min_width=9)
        for row in rows:
            table.add_row(*map(Text, row))
        curve = Text.assemble((f"{name}  ", "dim"), (sparkline(losses, 60), "cyan"))
        return Group(table, Text(""), curve, self._bar(point, fraction))

    def _bar(self, point: Point, fraction: float | None) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        passed = duration(point.seconds)
        if fraction is None or not 0 < fraction <= 1:
            return Text(passed, style="dim")
        left = point.seconds * (1 - fraction) / fraction
        row = Table.grid(padding=(0, 2))
        row.add_row(
            ProgressBar(total=1.0, completed=fraction, width=40),
            Text(f"{fraction:.0%}"),
            Text(f"{passed}, about {duration(left)} left", style="dim"),
        )
        return row


def _pass_on() -> None:
    """Called where a BrokenPipeError is being handled."""
    raise
