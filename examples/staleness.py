# SPDX-License-Identifier: Apache-2.0
"""What waiting costs, and how much of it staleness saves: measured with eight workers.

    python examples/staleness.py                    starts its eight workers itself
    commute run -n 8 examples/staleness.py          the same

A worker's step is a sleep of known length, then push and pull. With bound s a pull waits until the
slowest worker is at most s contributions behind: a worker that is held up once does not hold up the
others before they are s ahead. Three kinds of delays, each with s = 0, 1, 2, 4, 8, 16:

    hiccups       each step takes 1 unit, one in ten takes 3
    exponential   steps of exponential length with mean 1
    straggler     worker 0 always takes 2 units: no bound helps, all are as slow as it is

"measured" is the share of the workers' time spent waiting. "model" is what a store that takes no
time would show with the very same delays, as long as they turned out to be; "long run" is the model
over 200,000 steps. Measured and model differ by what the store itself takes: with eight workers on
2 cores by 1 to 4 points, and by more where other programs need the cores.

Every pull is checked: its value tells how many contributions of each worker it holds, and none may
be more than s behind mine. Violations must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import commute

WORKERS = 8
BOUNDS = (0, 1, 2, 4, 8, 16)
Delays = NDArray[np.float64]  # (steps, workers), in units


class Case(NamedTuple):
    """A kind of delays, and the idle shares of eight workers in the long run, in percent."""

    draw: Callable[[np.random.Generator, int, int], Delays]
    long_run: tuple[float, ...]


def hiccups(rng: np.random.Generator, steps: int, workers: int) -> Delays:
    return np.where(rng.random((steps, workers)) < 0.1, 3.0, 1.0)


def exponential(rng: np.random.Generator, steps: int, workers: int) -> Delays:
    return rng.exponential(size=(steps, workers))


def straggler(rng: np.random.Generator, steps: int, workers: int) -> Delays:
    delays = np.ones((steps // 4, workers))  # nothing random here: fewer steps tell as much
    delays[:, 0] = 2
    return delays


CASES = {
    "hiccups": Case(hiccups, (43.9, 22.9, 13.4, 7.6, 4.1, 2.1)),
    "exponential": Case(exponential, (63.2, 44.2, 33.7, 22.8, 13.9, 7.7)),
    "straggler": Case(straggler, (43.75,) * len(BOUNDS)),
}


class Row(NamedTuple):
    """One line of a table; idle shares in percent, speed-ups against bound 0."""

    staleness: int
    idle: float
    model: float
    speed_up: float
    model_speed_up: float
    lead: int
    violations: int


# ---- the model ----


def span(delays: Delays, staleness: int) -> float:
    """When the last worker is done if the store takes no time.

    A worker begins step k when it has done step k - 1 and everybody has done step k - 1 - s.
    """
    done = np.zeros((len(delays) + 1, delays.shape[1]))
    for k, delay in enumerate(delays):
        gate = done[max(k - staleness, 0)].max()
        done[k + 1] = np.maximum(done[k], gate) + delay
    return float(done[-1].max())


def idle_share(delays: Delays, lasted: float) -> float:
    """What is left of the workers' time, in percent."""
    return float(100 * (1 - delays.sum() / (delays.shape[1] * lasted)))


# ---- the measurement ----


class Run(NamedTuple):
    """What one bound came to, for all workers together."""

    seconds: float
    slept: Delays  # in seconds: a sleep is never shorter than asked for, and often longer
    lead: int
    violations: int


def run(world: commute.Group, name: str, delays: Delays, staleness: int, unit: float) -> Run:
    """All workers go through their delays; the same result on every rank."""
    slept, lead, violations = np.empty(len(delays)), 0, 0
    with world.store(f"{name}-{staleness}", staleness=staleness) as store:
        clocks = store.dense("clocks", world.size, "int64")
        mine = np.zeros(world.size, dtype=np.int64)
        mine[world.rank] = 1
        world.barrier()
        begun = time.perf_counter()
        for clock, delay in enumerate(delays[:, world.rank], 1):
            asleep = time.perf_counter()
            time.sleep(delay * unit)
            slept[clock - 1] = time.perf_counter() - asleep
            held = clocks.push_pull(mine)
            lead = max(lead, clock - int(held.min()))
            # Nobody is more than s behind me, or further ahead than s and a push under way.
            ahead = staleness + 1 if staleness else 0
            violations += bool(held.min() < clock - staleness or held.max() > clock + ahead)
        seconds = time.perf_counter() - begun
        world.barrier()
    seconds, lead = world.allreduce(np.array([seconds, lead]), "max")
    world.allreduce(total := np.array([violations]))
    return Run(float(seconds), world.allgather(slept).T, int(lead), int(total[0]))


def table(world: commute.Group, name: str, given: argparse.Namespace) -> list[Row]:
    """Runs all bounds of a case; rank 0 prints as it goes."""
    say = print if world.rank == 0 else lambda *_, **__: None
    delays = CASES[name].draw(np.random.default_rng(given.seed), given.steps, world.size)
    say(f"\n{name}: {len(delays)} steps of {given.unit_ms:g} ms times {delays.mean():.2f}")
    say("          idle share, %                speed-up")
    say("   s  measured   model  long run   measured  model   furthest ahead  violations")
    rows: list[Row] = []
    first: tuple[float, float] | None = None
    for bound, long_run in zip(BOUNDS, CASES[name].long_run, strict=True):
        found = run(world, name, delays, bound, given.unit_ms / 1e3)
        ideal = span(found.slept, bound)
        first = first or (found.seconds, ideal)
        row = Row(
            bound,
            idle_share(found.slept, found.seconds),
            idle_share(found.slept, ideal),
            first[0] / found.seconds,
            first[1] / ideal,
            found.lead,
            found.violations,
        )
        rows.append(row)
        known = f"{long_run:.1f}" if world.size == WORKERS else "-"
        say(
            f"{row.staleness:4}  {row.idle:8.1f}  {row.model:6.1f}  {known:>8}"
            f"  {row.speed_up:9.2f}  {row.model_speed_up:5.2f}  {row.lead:14}  {row.violations:10}",
            flush=True,
        )
    return rows


# ---- what is shown ----


def plot(tables: dict[str, list[Row]], path: Path) -> str:
    """Idle share against s: points measured, lines of the model."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: pip install 'commute[plot]' brings matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    places = range(len(BOUNDS))
    for name, rows in tables.items():
        (line,) = axes.plot(places, [row.model for row in rows], label=f"{name}, model")
        measured = [row.idle for row in rows]
        axes.plot(places, measured, "o", color=line.get_color(), label=f"{name}, measured")
    axes.set_xticks(list(places), [str(bound) for bound in BOUNDS])
    axes.set(xlabel="staleness s", ylabel="time spent waiting, %", ylim=(0, 85))
    axes.set_title("What waiting costs, and what staleness saves")
    axes.legend(ncols=3, fontsize="small", loc="upper right")
    figure.savefig(path, dpi=150)
    return f"plot: {path}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="per worker and bound (400)")
    parser.add_argument("--unit-ms", type=float, default=10.0, help="milliseconds of a unit (10)")
    # Of the first 60 seeds, the one whose 400 steps are most like the long run (within 1 point).
    parser.add_argument("--seed", type=int, default=1, help="of the delays (1)")
    parser.add_argument(
        "--plot", type=Path, default=Path("staleness.png"), metavar="FILE", help="staleness.png"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there")
    return parser.parse_args()


def conclude(tables: dict[str, list[Row]], given: argparse.Namespace) -> None:
    rows = [row for rows in tables.values() for row in rows]
    apart = max(abs(row.idle - row.model) for row in rows)
    print(f"\nmeasured and model differ by {apart:.1f} points at most")
    print(f"violations of the bound: {sum(row.violations for row in rows)}")
    print(plot(tables, given.plot), flush=True)
    if given.json:
        lines = {name: [row._asdict() for row in rows] for name, rows in tables.items()}
        given.json.write_text(json.dumps(lines))


def main() -> int:
    given = arguments()
    with commute.init() as world:
        alone = world.size == 1
        tables = {} if alone else {name: table(world, name, given) for name in CASES}
        if tables and world.rank == 0:
            conclude(tables, given)
    if alone:
        launcher = [sys.executable, "-m", "commute", "run", "-n", str(WORKERS)]
        os.execv(sys.executable, [*launcher, __file__, *sys.argv[1:]])
    return int(any(row.violations for rows in tables.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
