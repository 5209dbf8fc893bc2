# SPDX-License-Identifier: Apache-2.0
"""The demo: click data with ten million features, learned by two workers and a server.

    python examples/demo.py        (or make demo)

runs three commands that you can type yourself, and then compares what was learned with the hidden
model that the data was made from: no learner can do better than that one.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[1] / "build"
FEATURES, SEED = 10_000_000, 1
TEST_SHARE = 10  # one test example for so many that are learned from


def main(examples: int, folder: Path) -> int:
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    train, test, model = (folder / name for name in ("train.vw", "test.vw", "model"))
    report, page = folder / "report.json", folder / "report.html"
    sizes = ["--examples", examples, "--test-examples", max(1, examples // TEST_SHARE)]
    kind = ["--features", FEATURES, "--seed", SEED, "--force"]
    ways = ["--workers", 2, "--servers", 1, "--save", model, "--json", report, "--html", page]
    for title, command in (
        (
            "1. Clicks, made from a hidden model: 39 ids in each example, most of them rare",
            ["generate", "clicks", train, "--test", test, *sizes, *kind],
        ),
        (
            "2. Logistic regression with FTRL: two workers read and learn, a server keeps weights",
            ["learn", train, "--test", test, *ways],
        ),
    ):
        print(title, flush=True)
        if code := run(command):
            return code
        print(flush=True)
    print("3. Beside the hidden model, on test examples that nobody has seen")
    compare(json.loads(report.read_text()), json.loads((folder / "train.vw.json").read_text()))
    print(f"\nThe report, with charts: {page}")
    print(f"Next: `commute show model {shown(model)}`, docs/learn.md, and `make demo-net`.")
    print(f"{time.monotonic() - began:.0f} seconds in all")
    return 0


def run(words: list[Any]) -> int:
    """A command of commute, whose output is ours: on a terminal its display lives."""
    command = [shown(word) for word in words]
    print(f"$ commute {shlex.join(command)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "commute", *command]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # it came to the command too, which knows what to do
                continue


def shown(word: Any) -> str:
    """A path as one would type it here."""
    if isinstance(word, Path) and word.is_relative_to(Path.cwd()):
        return str(word.relative_to(Path.cwd()))
    return str(word)


def compare(report: dict[str, Any], facts: dict[str, Any]) -> None:
    """Test figures: of who knows only how many click, of ours, and of the hidden model."""
    test, rate = facts["test"], facts["train"]["positive_rate"]
    hits = test["positive_rate"]
    rows = [
        ("knowing the share of clicks", -hits * log(rate) - (1 - hits) * log(1 - rate), 0.5),
        ("learned just now", report["test"]["logloss"], report["test"]["auc"]),
        ("the hidden model", test["true_model"]["logloss"], test["true_model"]["auc"]),
    ]
    print(f"  {'':28}{'log-loss':>10}{'AUC':>10}")
    for name, logloss, auc in rows:
        print(f"  {name:28}{logloss:10.4f}{auc:10.4f}")


def log(share: float) -> float:
    """Of a share that may be 0 where there are few examples."""
    return math.log(max(share, 1e-9))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=500_000, help="to learn from (500000)")
    parser.add_argument("--folder", type=Path, default=BUILD / "demo", help="for all files")
    given = parser.parse_args()
    try:
        sys.exit(main(given.examples, given.folder.resolve()))
    except KeyboardInterrupt:
        sys.exit(130)
