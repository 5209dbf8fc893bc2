# SPDX-License-Identifier: Apache-2.0
"""Draws every algorithm into docs/drawings, from its plan: `python docs/draw.py`.

A test compares the files with the plans, so that no drawing shows what is not done any more.
"""

from __future__ import annotations

from pathlib import Path

from commute.plan import Collective, algorithms, build, draw

FOLDER = Path(__file__).parent / "drawings"
# As few ranks as show the idea; 4 where nothing else is said.
RANKS = {
    "circulant": 5,
    "bidirectional-ring-meeting": 5,
    "double-tree": 7,
    "scatter-allgather": 5,
    "binomial": 8,
    "tree": 8,
    "bruck": 5,
    "dissemination": 5,
    "one-shot": 3,
    "two-shot": 3,
    "shared": 3,
    "direct": 3,
}


def drawings() -> dict[str, str]:
    """The files and what they should hold. A kernel's is that of the plan it stands for."""
    made = {}
    for collective in Collective:
        for name in algorithms(collective):
            if name not in ("line", "fetch"):
                plan = build(collective, name, RANKS.get(name, 4))
                made[f"{collective.label}-{name}.svg"] = draw(plan)
    return made


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, text in drawings().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
