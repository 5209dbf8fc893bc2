# SPDX-License-Identifier: Apache-2.0
"""Draws the main call of a result: time over size, one panel per number of ranks.

Runs in the `plot` environment. The other calls have one size each, which makes no curve. Calls
about rows are drawn as bars: rows per second, one panel per call. So are passes over examples.

.venv-bench/plot/bin/python benchmarks/plot.py results/one_host-….json    writes the .png beside it
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {
    "commute": "#c1121f",
    "gloo": "#1d3557",
    "openmpi": "#2a9d8f",
    "mpich": "#8ab17d",
    "impi": "#e9a23b",
    "ray": "#2a9d8f",
    "rpc": "#1d3557",
    "redis": "#e9a23b",
    "copy": "#9a9a9a",
    "wire": "#9a9a9a",
    "numpy": "#9a9a9a",
    "vw": "#1d3557",
}
LIMITS = {"copy", "wire"}
# The main calls, and what a panel says of its number of ranks.
PANELS = {"allreduce": "{0} ranks", "push_pull": "servers + workers: {0} + {0}"}
ROW_CALLS = ("pull rows", "push rows")
PASSES = ("first pass", "cached pass")


def main_call(document: dict[str, Any]) -> str:
    measured = {call_of(cell) for run in document["runs"] for cell in run}
    return next(call for call in PANELS if call in measured)


def call_of(cell: dict[str, Any]) -> str:
    return str(cell.get("call", "allreduce"))  # old results name no call


def cells_of(document: dict[str, Any], call: str) -> dict[int, list[dict[str, Any]]]:
    """Ranks -> the cells of all runs, where there are several sizes."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for cell in (c for run in document["runs"] for c in run):
        if call_of(cell) == call:
            by_ranks.setdefault(cell["ranks"], []).append(cell)
    several = {r: cells for r, cells in by_ranks.items() if len({c["bytes"] for c in cells}) > 1}
    return dict(sorted(several.items()))


def curves(cells: list[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """Library -> bytes -> the kept seconds of all runs, in the faster of its variants."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        kept = [r["seconds"] for r in cell["rounds"] if r["kept"]]
        best: dict[str, list[float]] = {}
        for entry in (e for e in (kept[0] if kept else ()) if e != "limit"):
            library, times = entry.split(" ")[0], [seconds[entry] for seconds in kept]
            if library not in best or statistics.median(times) < statistics.median(best[library]):
                best[library] = times
        for library, times in best.items():
            found.setdefault(library, {}).setdefault(cell["bytes"], []).extend(times)
    return found


def draw(document: dict[str, Any], target: Path) -> None:
    call = main_call(document)
    by_ranks = cells_of(document, call)
    figure, panels = pyplot.subplots(
        1, len(by_ranks), figsize=(6.2 * len(by_ranks), 4.8), squeeze=False, sharey=True
    )
    for panel, (ranks, cells) in zip(panels[0], by_ranks.items(), strict=True):
        for library, by_size in curves(cells).items():
            sizes = sorted(by_size)
            middle = [statistics.median(by_size[size]) for size in sizes]
            colour = COLOURS.get(library)
            style = "--" if library in LIMITS else "-"
            panel.plot(sizes, middle, style, marker="o", ms=4, color=colour, label=library)
            low = [min(by_size[size]) for size in sizes]
            high = [max(by_size[size]) for size in sizes]
            panel.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
        panel.set(
            xscale="log", yscale="log", title=PANELS[call].format(ranks), xlabel="bytes per rank"
        )
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel(f"seconds per {call} (median; band: all rounds)")
    panels[0][-1].legend(frameon=False)
    machine = document["machine"]
    figure.suptitle(
        f"{document['question']}: {call} of float32, {machine['cores']} cores, "
        f"{len(document['runs'])} run(s), {document['finished'][:10]}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def draw_rows(document: dict[str, Any], target: Path) -> None:
    """Million rows per second of each entry: the median as a bar, all rounds as its whisker."""
    rows = document["call_rows"]
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in (c for run in document["runs"] for c in run if call_of(c) in ROW_CALLS):
        cells.setdefault((call_of(cell), cell["bytes"] // rows // 4), []).append(cell)
    figure, panels = pyplot.subplots(
        1, len(cells), figsize=(4.2 * len(cells), 4.2), squeeze=False, sharey=True
    )
    for panel, ((call, width), found) in zip(panels[0], cells.items(), strict=True):
        kept = [r["seconds"] for cell in found for r in cell["rounds"] if r["kept"]]
        names = [name for name in (kept[0] if kept else ()) if not name.endswith("limit")]
        draw_bars(panel, {name: [rows / s[name] / 1e6 for s in kept] for name in names})
        panel.set(yscale="log", title=f"{call}, {width} wide")
    panels[0][0].set_ylabel("million rows per second")
    figure.suptitle(f"{document['question']}: calls of {rows:,} rows, {document['finished'][:10]}")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def draw_bars(panel: Any, rates: dict[str, list[float]]) -> None:
    for place, (name, found) in enumerate(rates.items()):
        middle = statistics.median(found)
        ends = [[middle - min(found)], [max(found) - middle]]
        panel.bar(place, middle, yerr=ends, capsize=3, color=COLOURS[name.split(" ")[0]])
    panel.set_xticks(range(len(rates)), list(rates), fontsize=8)
    panel.grid(axis="y", alpha=0.25)


def draw_passes(document: dict[str, Any], target: Path) -> None:
    """Thousand examples per second of each entry, in each kind of pass."""
    examples = document["examples_per_pass"]
    figure, panels = pyplot.subplots(1, len(PASSES), figsize=(11, 4.2), squeeze=False)
    for panel, call in zip(panels[0], PASSES, strict=True):
        cells = [c for run in document["runs"] for c in run if call_of(c) == call]
        # The first pass is there twice, for its two figures.
        kept = [r["seconds"] for c in cells if c["ranks"] == 2 for r in c["rounds"] if r["kept"]]
        parts = ("whole", "start")  # of what is drawn
        names = [name for name in (kept[0] if kept else ()) if not name.endswith(parts)]
        draw_bars(panel, {name: [examples / s[name] / 1e3 for s in kept] for name in names})
        panel.set(title=call, ylabel="thousand examples per second")
    figure.suptitle(f"{document['question']}: {examples:,} examples, {document['finished'][:10]}")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    document = json.loads(source.read_text(encoding="utf-8"))
    drawing = draw_rows if "call_rows" in document else draw
    drawing = draw_passes if "examples_per_pass" in document else drawing
    drawing(document, source.with_suffix(".png"))
