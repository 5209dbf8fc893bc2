# SPDX-License-Identifier: Apache-2.0
"""The code blocks of README.md and docs/*.md run, in order, each page in a folder of its own.

    ```python           runs; all such blocks of a page share one namespace in one process
    # file: train.py    as first line: the block is written to that file instead
    ```
    ```console
    $ commute run -n 2 train.py      runs in the page's folder
    [0] sum 3 ...                    output to expect; "..." stands for anything, also whole lines
    ```

A console command without lines below it only has to succeed; `# exit 1` at its end names another
exit code. A block below the comment `<!-- not run: why -->` is shown and not run.
"""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.exists()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_LINE = re.compile(r"# file: ([\w./-]+)\n")
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
EXIT_CODE = re.compile(r"\s+# exit (\d+)$")
COMMAND_SECONDS = 60


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    command: str
    code: int
    expected: str


def blocks(page: str) -> list[Block]:
    return [
        Block(match[1], match[2], page.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(page)
        if not NOT_RUN.search(page[: match.start()])
    ]


def commands(text: str) -> list[Command]:
    """Each `$ ` line, with lines continued by a backslash, and the output shown below it."""
    found = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, expected = part.replace("\\\n", "").partition("\n")
        code = EXIT_CODE.search(line)
        found.append(
            Command(EXIT_CODE.sub("", line), int(code[1]) if code else 0, expected.strip("\n"))
        )
    return found


def matches(expected: str, got: str) -> bool:
    """Compares line ends loosely; "..." is anything, alone on its line any number of lines."""
    escaped = [re.escape(line.rstrip()) for line in expected.splitlines()]
    lines = [line.replace(r"\.\.\.", "[^\n]*?") for line in escaped]
    wanted = "".join("(?:[^\n]*\n)*?" if line == "[^\n]*?" else f"{line}\n" for line in lines)
    clean = "".join(f"{line.rstrip()}\n" for line in got.strip("\n").splitlines())
    return re.fullmatch(wanted, clean) is not None


def run(command: list[str] | str, folder: Path) -> tuple[int, str]:
    """Runs in a session of its own, which ends with it; both streams come back as one text."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{command} has not ended within {COMMAND_SECONDS} s")
    finally:
        # Always: a command that ended may have left others behind in its session.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
    return process.returncode, out


def write_files(found: list[Block], folder: Path) -> list[Block]:
    """Writes the blocks that name a file and returns the others."""
    rest = []
    for block in found:
        named = FILE_LINE.match(block.text)
        if named is None:
            rest.append(block)
            continue
        path = folder / named[1]
        assert path.resolve().is_relative_to(folder.resolve()), f"{path} is outside of the page"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    return rest


def as_script(page: Path, python: list[Block]) -> str:
    """One program of all blocks, each compiled at its place in the page, for true tracebacks."""
    lines = ["namespace = {'__name__': '__main__'}"]
    for block in python:
        padded = "\n" * (block.line - 1) + block.text
        lines.append(f"exec(compile({padded!r}, {page.name!r}, 'exec'), namespace)")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    """A newcomer who types what the page shows sees what the page shows."""
    rest = write_files(blocks(page.read_text()), tmp_path)
    python = [block for block in rest if block.language == "python"]
    if python:
        code, out = run([sys.executable, "-c", as_script(page, python)], tmp_path)
        assert code == 0, out
    for block in rest:
        if block.language != "console":
            continue
        for shown in commands(block.text):
            code, out = run(shown.command, tmp_path)
            where = f"{page.name}:{block.line}: $ {shown.command}\n{out}"
            assert code == shown.code, where
            assert not shown.expected or matches(shown.expected, out), where


def test_wildcards_and_commands() -> None:
    """The reader of pages itself: continued lines, exit codes, expected output."""
    text = "$ a \\\nb  # exit 3\n[0] x ...\n...\nend\n$ c\n"

    assert commands(text) == [Command("a b", 3, "[0] x ...\n...\nend"), Command("c", 0, "")]
    assert matches("[0] x ...\n...\nend", "[0] x 12 \nmiddle\nmore\nend\n")
    assert not matches("[0] x ...\nend", "[1] x 12\nend")


def test_blocks_know_their_lines() -> None:
    """A block's line is where its first line of code stands in the page; marked ones are left."""
    page = "# t\n\n```python\nx = 1\n```\n<!-- not run: slow -->\n```console\n$ y\n```\n"

    assert blocks(page) == [Block("python", "x = 1\n", 4)]
