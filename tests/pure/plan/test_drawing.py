# SPDX-License-Identifier: Apache-2.0
"""Plans as drawings, and those of docs/algorithms.md."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from commute.cli import main
from commute.plan import Collective, algorithms, build, draw
from commute.plan.drawing import arrows

DOCS = Path(__file__).resolve().parents[3] / "docs"
ALL = [(collective, name) for collective in Collective for name in algorithms(collective)]


def drawer() -> ModuleType:
    """docs/draw.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_ring_has_an_arrow_per_rank_and_step() -> None:
    """Each rank sends to both sides in each of n-1 steps, of which the first half adds."""
    found = arrows(build("allreduce", "bidirectional-ring-meeting", 5))
    steps = [[arrow for arrow in found if arrow.time == step] for step in range(1, 5)]

    assert len(found) == sum(map(len, steps)) == 5 * 2 * 4
    assert [{arrow.adds for arrow in step} for step in steps] == [{True}, {True}, {False}, {False}]
    assert all((arrow.target - arrow.source) % 5 in (1, 4) for arrow in found)


def test_time_is_that_of_one_message_after_the_other() -> None:
    """The root of a binomial tree sends to the largest subtree first, then to the next."""
    found = arrows(build("broadcast", "binomial", 8))

    assert [(a.time, a.source, a.target) for a in found] == [
        *[(1, 0, 4), (2, 0, 2), (2, 4, 6)],
        *[(3, 0, 1), (3, 2, 3), (3, 4, 5), (3, 6, 7)],
    ]


def test_messages_of_one_step_are_one_arrow() -> None:
    """Three blocks that follow each other in one direction are drawn as one, with three names."""
    last = arrows(build("allgather", "circulant", 6))[-6:]

    assert {arrow.time for arrow in last} == {3}
    assert {len(arrow.runs) for arrow in last} == {3}


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_every_plan_can_be_drawn(collective: Collective, name: str) -> None:
    """A small, sound and self-contained SVG, with an arrow unless the rank is alone."""
    for ranks in (1, 2, 6):
        text = draw(build(collective, name, ranks))
        root = ElementTree.fromstring(text)
        shown = [
            path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("class")
        ]

        assert (len(shown) > 0) == (ranks > 1)
        assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
        assert len(text) < 40_000
        assert not re.search(r"href|<script|url\(http", text)


def test_the_drawings_are_those_of_the_plans() -> None:
    """What docs/drawings holds is what the plans do now, all of them; else run docs/draw.py."""
    expected = drawer().drawings()
    there = {path.name: path.read_text() for path in (DOCS / "drawings").glob("*.svg")}

    assert sorted(there) == sorted(expected)
    for name, text in expected.items():
        assert there[name] == text, f"{name} shows another plan; run python docs/draw.py"


def test_the_page_shows_every_drawing() -> None:
    """docs/algorithms.md has each drawing once, and names each algorithm."""
    page = (DOCS / "algorithms.md").read_text()
    shown = re.findall(r"\]\(drawings/([\w-]+\.svg)\)", page)

    assert sorted(shown) == sorted(path.name for path in (DOCS / "drawings").glob("*.svg"))
    for _, name in ALL:
        assert f"`{name}`" in page


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--svg FILE` writes the drawing, `-` prints it, a folder that is not there is an error."""
    arguments = ["show", "plan", "chain", "--collective", "broadcast", "--ranks", "3", "--svg"]
    path = tmp_path / "chain.svg"
    drawn = draw(build("broadcast", "chain", 3))

    assert main([*arguments, str(path)]) == 0
    assert path.read_text() == drawn
    assert f"drew broadcast by chain into {path}" in capsys.readouterr().out
    assert main([*arguments, "-"]) == 0
    assert capsys.readouterr().out == drawn
    assert main([*arguments, str(tmp_path / "missing" / "chain.svg")]) == 1
    assert "the drawing was not written" in capsys.readouterr().err
