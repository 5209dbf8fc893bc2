# SPDX-License-Identifier: Apache-2.0
"""What is kept of a measurement: machine, versions, rounds, verdicts; as JSON and as a plot."""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.failure import BenchError
from benchmarks.figures import Run, Verdict
from benchmarks.rounds import CellResult
from benchmarks.setup_peers import ROOT, python_of

RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith(("model name", "flags"))]
    memory_kb = int(next(x for x in _lines("/proc/meminfo") if x.startswith("MemTotal")).split()[1])
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "virtual": any("hypervisor" in line for line in cpu),
        "memory_gb": round(memory_kb / (1 << 20)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def machine_line() -> str:
    m = machine()
    kind = "virtual" if m["virtual"] else "bare metal"
    return (
        f"{m['cpu']}, {m['usable_cores']} of {m['cores']} cores usable, {m['memory_gb']} GB, "
        f"{kind}, Linux {m['kernel']}, Python {m['python']}"
    )


def write(
    question: str,
    *,
    runs: Sequence[Run],
    verdicts: Sequence[Verdict],
    facts: dict[str, Any],
    folder: Path = RESULTS,
) -> Path:
    """Write the raw results and draw them; returns the path of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    path = folder / f"{question}-{now:%Y%m%d-%H%M%S}.json"
    document = {
        "question": question,
        "finished": now.isoformat(timespec="seconds"),
        "machine": machine(),
        **facts,
        "figures": [{**dataclasses.asdict(v), "ratio": v.ratio, "met": v.met} for v in verdicts],
        "runs": [[_cell(result) for result in run.values()] for run in runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _draw(path)
    return path


def _cell(result: CellResult) -> dict[str, Any]:
    return {
        "call": result.cell.call,
        "ranks": result.cell.ranks,
        "bytes": result.cell.bytes,
        "batch": result.cell.batch,
        "dropped": result.dropped,
        "rounds": [dataclasses.asdict(r) for r in result.rounds],
    }


def _draw(path: Path) -> None:
    command = [str(python_of("plot")), str(ROOT / "benchmarks" / "plot.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"the plot of {path.name} could not be drawn:\n{done.stderr[-800:]}")
