# SPDX-License-Identifier: Apache-2.0
"""Data to learn from, a model that was, and the command."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commute.learn import fit
from learning import SEED, Clicks
from serving import COMMUTE


@pytest.fixture(autouse=True)
def records(
    scrubbed_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    """What failed runs record stays with the test."""
    monkeypatch.setenv("COMMUTE_RECORDS", str(tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same examples in every format: train.* and test.*"""
    folder = tmp_path_factory.mktemp("data")
    for name, clicks in (("train", Clicks(2000)), ("test", Clicks(1000, SEED + 1))):
        for format in ("svm", "vw", "csv", "tsv"):
            (folder / f"{name}.{format}").write_text(clicks.text(format))
        (folder / f"{name}.svm.gz").write_bytes(gzip.compress(clicks.text("svm").encode()))
    lines = Clicks(2000).lines("vw")
    for i in range(4):
        (folder / f"day{i}.vw").write_text("".join(lines[500 * i : 500 * (i + 1)]))
    (folder / "empty.vw").write_text("")
    return folder


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of train.vw that tests only read."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    fit(str(data / "train.vw"), save=folder).close()
    return folder


@pytest.fixture
def run(job: Callable[..., Any]) -> Callable[..., Any]:
    """`run("learn", "train.vw")` waits for the end of the command."""

    def ended(*words: object, code: int = 0, stdin: Path | None = None) -> Any:
        command = [*COMMUTE, *map(str, words)]
        if stdin is not None:
            command = ["sh", "-c", 'f="$1"; shift; exec "$@" < "$f"', "sh", str(stdin), *command]
        result = job(command, timeout=60.0).wait()
        assert result.code == code, f"{words}\n{result.out}\n{result.err}"
        assert "Traceback" not in result.out + result.err
        return result

    return ended
