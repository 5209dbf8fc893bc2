# SPDX-License-Identifier: Apache-2.0
"""The examples as real jobs: what they promise about losses, bounds and size; and the demo."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NETS = ("net_numpy.py", "net_torch.py")
WORKERS = 4
LINES_MAX = {"net_numpy.py": 79, "net_torch.py": 79, "embeddings.py": 105, "demo.py": 110}
LOSS_TOLERANCE = 1e-5
# float64: only the order of sums differs, which moves rows by some 1e-15.
ROW_LOSS_TOLERANCE = 1e-9
NOISE = 0.3  # in the ratings of embeddings.py
# The idle shares, in percent, that research computed for s = 0, 1, 2, 4, 8, 16. They are of a
# shorter simulation than ours: a point of difference is its noise.
PUBLISHED = {
    "hiccups": (43.8, 22.8, 13.3, 7.7, 4.5, 2.5),
    "exponential": (63.1, 44.0, 33.3, 22.8, 13.8, 6.9),
    "straggler": (43.7, 43.7, 43.7, 43.7, 43.7, 43.7),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def need(example: str) -> None:
    """Skips where a package is missing that the example cannot do without."""
    if example == "embeddings.py":
        return
    pytest.importorskip("sklearn", reason="the nets' digits come with scikit-learn")
    if example == "net_torch.py":
        pytest.importorskip("torch", reason="net_torch.py is written with torch")


@pytest.fixture
def losses(job: Callable[..., Any], tmp_path: Path) -> Callable[..., np.ndarray]:
    """Runs an example, with so many workers, and returns the loss of every step, or epoch."""

    def run(example: str, workers: int, *flags: str) -> np.ndarray:
        need(example)
        launcher = ["-m", "commute", "run", "-n", str(workers), "--servers", "2"]
        command = [sys.executable, *(launcher if workers > 1 else []), EXAMPLES / example]
        file = tmp_path / f"{len(list(tmp_path.glob('*.json')))}.json"
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        ended = job([*command, *flags, "--losses", file], env=env, timeout=60.0).wait()
        assert ended.code == 0, ended.err
        assert "never seen" in ended.out
        return np.array(json.loads(file.read_text()))

    return run


@pytest.fixture(scope="module")
def staleness() -> Any:
    """examples/staleness.py as a module."""
    spec = importlib.util.spec_from_file_location("staleness", EXAMPLES / "staleness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the nets ----


@pytest.mark.parametrize("example", NETS)
def test_in_step_workers_are_one_process(losses, example):
    """At staleness 0 four workers have the losses of one process on the joined batch."""
    alone = losses(example, 1, "--steps", "40")
    together = losses(example, WORKERS, "--steps", "40", "--staleness", "0")

    assert len(alone) == 40
    assert np.abs(alone - together).max() <= LOSS_TOLERANCE
    assert alone[-5:].mean() < 0.8 * alone[0]


@pytest.mark.parametrize("staleness_flag", ["2", "none"])
@pytest.mark.parametrize("example", NETS)
def test_stale_workers_learn(losses, example, staleness_flag):
    """With bound 2, and with none, the loss falls all the same."""
    found = losses(example, WORKERS, "--steps", "150", "--staleness", staleness_flag)

    assert np.isfinite(found).all()
    assert found[-5:].mean() < 0.6 * found[0]


@pytest.mark.parametrize("example", LINES_MAX)
def test_an_example_is_short(example):
    """Each is read in a minute."""
    assert len((EXAMPLES / example).read_text().splitlines()) <= LINES_MAX[example]


def test_images_from_idx_files(job, tmp_path):
    """`--data` reads a folder in MNIST's format, packed or not; what is no such file is named."""
    rng = np.random.default_rng(0)
    for start, count in (("train", 64), ("t10k", 16)):
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (count, 12, 12), dtype=np.uint8)),
            ("labels-idx1", rng.integers(0, 10, count, dtype=np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{start}-{kind}-ubyte").write_bytes(head + array.tobytes())
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.with_name(f"{labels.name}.gz").write_bytes(gzip.compress(labels.read_bytes()))
    labels.unlink()
    command = [sys.executable, EXAMPLES / "net_numpy.py", "--steps", "3", "--data"]
    well = job([*command, tmp_path], timeout=30.0).wait()
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"text")
    badly = job([*command, tmp_path], timeout=30.0).wait()

    assert well.code == 0, well.err
    assert "step    3/3" in well.out
    assert badly.code == 1
    assert "t10k-labels-idx1-ubyte is no IDX file" in badly.err


# ---- embeddings ----


def test_embeddings_in_step_are_one_process(losses):
    """At staleness 0 four workers have the losses of one process, whose batch they share."""
    alone = losses("embeddings.py", 1, "--epochs", "4")
    together = losses("embeddings.py", WORKERS, "--epochs", "4", "--staleness", "0")

    assert len(alone) == 4
    assert np.abs(alone - together).max() <= ROW_LOSS_TOLERANCE
    assert alone[-1] < 0.2 * alone[0]


@pytest.mark.parametrize("staleness_flag", ["2", "none"])
def test_stale_embeddings_learn(losses, staleness_flag):
    """With bound 2, and with none, the loss comes down to nearly the noise."""
    found = losses("embeddings.py", WORKERS, "--epochs", "10", "--staleness", staleness_flag)

    assert np.isfinite(found).all()
    assert found[-1] < 1.5 * NOISE**2


def test_embeddings_of_a_file(job, tmp_path):
    """`--data` takes lines of numbers, in any order; ids may be anything up to 2^53."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 2**53, 20), rng.integers(0, 2**53, 10)
    lines = [f"{u} {i} {1 + n % 5}" for u in users for n, i in enumerate(items)]
    (tmp_path / "ratings.txt").write_text("\n".join(lines))
    command = [sys.executable, EXAMPLES / "embeddings.py", "--data", tmp_path / "ratings.txt"]
    ended = job([*command, "--epochs", "5"], timeout=30.0).wait()

    assert ended.code == 0, ended.err
    assert "epoch  5/5" in ended.out
    assert "rows: 20 of users, 10 of items" in ended.out


# ---- the demo ----


def test_the_demo_ends_beside_the_hidden_model(job, tmp_path):
    """With few examples: what was learned lies between knowing nothing and the best there is."""
    command = [sys.executable, EXAMPLES / "demo.py", "--examples", "20000", "--folder", tmp_path]
    ended = job(command, timeout=100.0).wait()

    assert ended.code == 0, ended.out + ended.err
    last = ended.out.partition("3. Beside")[2]
    table = re.findall(r"^  (\w[\w ]+?)  +(0\.\d{4})  +(0\.\d{4})$", last, re.MULTILINE)
    assert [name for name, *_ in table] == [
        "knowing the share of clicks",
        "learned just now",
        "the hidden model",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["examples"] == 20_000
    assert float(table[0][1]) > float(table[1][1]) > float(table[2][1])
    assert 0.5 < float(table[1][2]) < float(table[2][2])
    page = (tmp_path / "report.html").resolve()
    assert f"The report, with charts: {page}" in ended.out
    assert page.read_text().startswith("<!doctype html>")


def test_the_demo_stops_where_a_command_fails(job, tmp_path):
    """What went wrong is said by the command, and its exit code is the demo's."""
    command = [sys.executable, EXAMPLES / "demo.py", "--examples", "0", "--folder", tmp_path]
    ended = job(command, timeout=30.0).wait()

    assert ended.code == 2
    assert "expected a whole number from 1 up" in ended.err
    assert "2. Logistic" not in ended.out


# ---- staleness ----


def test_staleness_starts_its_workers_and_keeps_its_bounds(job, tmp_path):
    """A short run: eight workers, every table whole, no pull beyond its bound."""
    file, picture = tmp_path / "tables.json", tmp_path / "staleness.png"
    command = [sys.executable, EXAMPLES / "staleness.py", "--steps", "24", "--unit-ms", "2"]
    ended = job([*command, "--json", file, "--plot", picture], timeout=100.0).wait()

    assert ended.code == 0, ended.out + ended.err
    tables = json.loads(file.read_text())
    assert list(tables) == list(PUBLISHED)
    for rows in tables.values():
        assert [row["staleness"] for row in rows] == [0, 1, 2, 4, 8, 16]
        assert [row["violations"] for row in rows] == [0] * 6
        assert all(row["lead"] <= row["staleness"] for row in rows)
    assert "violations of the bound: 0" in ended.out
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert "no plot" in ended.out


def test_the_model_of_staleness_gives_the_published_figures(staleness):
    """What the measured tables are compared with: the shares that research computed."""
    for name, published in PUBLISHED.items():
        case = staleness.CASES[name]
        delays = case.draw(np.random.default_rng(1), 20_000, staleness.WORKERS)
        shares = [
            staleness.idle_share(delays, staleness.span(delays, bound))
            for bound in staleness.BOUNDS
        ]

        np.testing.assert_allclose(shares, published, atol=1.2)
        np.testing.assert_allclose(shares, case.long_run, atol=0.6)
