# SPDX-License-Identifier: Apache-2.0
"""The style that a program can check: sizes, licence lines, banned words, import direction."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "core", "tests", "benchmarks", "examples", "tools")
PACKAGE = ROOT / "src" / "commute"

LINE_LIMIT = 100
FUNCTION_LIMIT = 70
FILE_LIMIT = 600
TEST_FILE_LIMIT = 800

# Layers of commute, and what each may import of it: downwards only. watch sees every layer.
GROUND = {"_errors", "_core", "_version"}
PARTS = {*GROUND, "plan", "cluster", "watch"}
LAYERS = {
    "_version": set[str](),
    "_errors": set[str](),
    "_core": set[str](),
    "_cores": set[str](),
    "plan": {"_errors"},
    "cluster": GROUND,
    "_arrays": GROUND,
    "_settings": GROUND,
    "_runner": PARTS,
    "_wiring": {*PARTS, "_runner"},
    "_handle": {*PARTS, "_runner"},
    "store": {*PARTS, "_cores", "_arrays", "_settings", "_runner", "_handle"},
    "group": {*PARTS, "_arrays", "_runner", "_wiring", "_handle", "store"},
    "_member": {*PARTS, "_cores", "_settings", "_runner", "_wiring", "group", "store"},
    "_init": {*PARTS, "_settings", "_runner", "_wiring", "group", "_member", "store"},
    "learn": {*PARTS, "_cores", "_settings", "_runner", "_wiring", "group", "_member", "store"}
    | {"_init"},
}
TOP_LAYERS = {"__init__", "__main__", "cli", "testing", "watch"}  # may import everything below
NAMED_BADLY = re.compile(r"(^|_)(utils?|helpers?|common|misc)(_|$)")
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|work|mnt)/\w")


def sources(*suffixes: str) -> list[Path]:
    found = [p for folder in FOLDERS for s in suffixes for p in (ROOT / folder).rglob(f"*{s}")]
    return sorted(path for path in found if path.name != "_core.pyi")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = sources(".py")
CPP = sources(".cc", ".h")
HOUSE = [ROOT / name for name in ("Makefile", "pyproject.toml", "CMakeLists.txt", ".ci/run")]
ALL = [*PYTHON, *CPP, *(path for path in HOUSE if path.exists())]


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_source_file(path: Path) -> None:
    """Each file has its licence line, a fair name and size, and no path of somebody's machine."""
    lines = path.read_text().splitlines()
    text_limit = TEST_FILE_LIMIT if "tests" in path.relative_to(ROOT).parts else FILE_LIMIT
    code = path.suffix in (".py", ".cc", ".h")
    too_long = [i for i, line in enumerate(lines, 1) if code and len(line) > LINE_LIMIT]
    machine = [
        i for i, line in enumerate(lines, 1) if path != Path(__file__) and MACHINE_PATH.search(line)
    ]

    assert any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2])
    assert len(lines) <= text_limit, f"{len(lines)} lines; split the file by what it knows"
    assert not too_long, f"lines longer than {LINE_LIMIT}: {too_long}"
    assert not machine, f"absolute paths of one machine in lines {machine}"
    assert not NAMED_BADLY.search(path.stem), "a name that says nothing; find the noun"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_python_functions_are_short(path: Path) -> None:
    """A function fits on one screen and a half; a longer one has parts that deserve names."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LIMIT
    }

    assert not long


def cpp_blocks(text: str) -> Iterator[tuple[int, int]]:
    """First line and length of each function: clang-format puts its last brace below its first."""
    opened: list[tuple[int, int]] = []  # (indentation, line) of lines that open a block
    for number, line in enumerate(text.splitlines(), 1):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        if opened and stripped.startswith("}") and indent <= opened[-1][0]:
            _, first = opened.pop()
            yield first, number - first + 1
        starts = re.search(r"\)[\w\s:<>,&*()-]*\{$", stripped) is not None
        if starts and not opened and not stripped.startswith(("}", "namespace", "#")):
            opened.append((indent, number))


@pytest.mark.parametrize("path", CPP, ids=name_of)
def test_cpp_functions_are_short(path: Path) -> None:
    """The limit of Python's functions holds for C++ too."""
    long = [at for at, length in cpp_blocks(path.read_text()) if length > FUNCTION_LIMIT]

    assert not long, f"functions longer than {FUNCTION_LIMIT} lines begin at {long}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    """No bytes from a socket or file ever become code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.split(".")[0]} & UNSAFE_MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & UNSAFE_CALLS

    assert not found


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The full name of the module that `from ... import` reads, relative ones resolved."""
    here = path.relative_to(PACKAGE.parent).parts
    parts = [*here[: len(here) - node.level]] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports_of(path: Path) -> set[str]:
    """The layers of commute that a file imports, also inside functions; not for types only."""
    layers: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            names = [f"{base}.{a.name}" for a in node.names] if base == "commute" else [base]
        else:
            continue
        layers |= {name.split(".")[1] for name in names if name.startswith("commute.")}
    return layers


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    """Imports follow the layers drawn in ARCHITECTURE.md."""
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer in TOP_LAYERS:
        return
    assert layer in LAYERS, f"{layer} is not in the picture of layers; give it a place in LAYERS"

    assert imports_of(path) - {layer} <= LAYERS[layer]


def test_core_knows_no_python() -> None:
    """Only the bindings may include Python or nanobind."""
    guilty = [
        name_of(path)
        for path in CPP
        if path.parent.name != "bindings"
        and re.search(r'#include [<"](Python\.h|nanobind/)', path.read_text())
    ]

    assert not guilty
