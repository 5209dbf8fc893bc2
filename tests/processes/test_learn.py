# SPDX-License-Identifier: Apache-2.0
"""`commute learn`, `commute predict` and `commute show model` between real processes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commute import CommuteError, SettingError
from commute.cli import main
from commute.learn import Model, fit
from serving import COMMUTE, eventually

pytestmark = pytest.mark.timeout(120)

SEED = 6
FIELDS, IDS = 6, 30
FOREVER = ["--epochs", "1000000"]


@pytest.fixture(autouse=True)
def records(
    scrubbed_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    """What failed runs record stays with the test."""
    monkeypatch.setenv("COMMUTE_RECORDS", str(tmp_path_factory.mktemp("records")))


class Clicks:
    """Examples of a hidden model: an id per field. Every line of a format has the same length."""

    def __init__(self, count: int, seed: int = SEED) -> None:
        hidden = np.random.default_rng(1).normal(0, 1, (FIELDS, IDS))
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(0, IDS, (count, FIELDS))
        score = hidden[np.arange(FIELDS), self.ids].sum(1)
        self.labels = (rng.random(count) < 1 / (1 + np.exp(-score))).astype(int)

    def lines(self, format: str) -> list[str]:
        def words(row: np.ndarray) -> list[str]:
            return [f"{'abcdef'[field]}{number:02d}" for field, number in enumerate(row)]

        rows = zip(self.labels, map(words, self.ids), strict=True)
        return {
            "svm": lambda: [f"{y} " + " ".join(f"{w}:1" for w in row) + "\n" for y, row in rows],
            "vw": lambda: [f"{y} |f " + " ".join(row) + "\n" for y, row in rows],
            "csv": lambda: [",".join([*row, str(y)]) + "\n" for y, row in rows],
            "tsv": lambda: ["\t".join([*row, str(y)]) + "\n" for y, row in rows],
        }[format]()

    def text(self, format: str) -> str:
        header = {"csv": "A,B,C,D,E,F,label\n", "tsv": "A\tB\tC\tD\tE\tF\tlabel\n"}.get(format, "")
        return header + "".join(self.lines(format))


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
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


def weights_of(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Keys in order, and their weights."""
    with model:
        keys, rows = (np.concatenate(part) for part in zip(*model.table.items(), strict=True))
    order = np.argsort(keys)
    return keys[order], rows.reshape(-1)[order]


def predicted(folder: Path, data: Path) -> np.ndarray:
    with Model.load(folder) as model:
        return model.predict(str(data))


# ---- every format ----


@pytest.mark.parametrize(
    ("given", "test", "name"),
    [
        ("train.svm", "test.svm", "a03"),
        ("train.vw", "test.vw", "f^a03"),
        ("train.csv", "test.csv", "A=a03"),
        ("train.tsv", "test.tsv", "A=a03"),
        ("train.svm.gz", "test.svm.gz", "a03"),
        ("day*.vw", "test.vw", "f^a03"),
        ("-", "test.vw", "f^a03"),
    ],
)
def test_every_format(run, capfd, data, trained, tmp_path, given, test, name):
    """Trains, predicts as in Python, and shows names; the same examples make the same model."""
    model, scores = tmp_path / "model", tmp_path / "scores.txt"
    train = given if given == "-" else data / given
    stdin = data / "train.vw" if given == "-" else None
    run("learn", train, "--workers", 1, "--test", data / test, "--save", model, stdin=stdin)
    told = run("predict", model, data / test).out
    capfd.readouterr()
    assert main(["predict", str(model), str(data / test), "--output", str(scores)]) == 0
    assert main(["show", "model", str(model), "--top", "50"]) == 0
    shown = capfd.readouterr().out
    found = predicted(model, data / test)
    usual = predicted(trained, data / "test.vw")

    assert told == scores.read_text()
    np.testing.assert_allclose(np.array(told.split(), float), found, rtol=1e-5)
    assert len(found) == 1000 and ((found > 0) & (found < 1)).all()
    # Batches end where a file does: four files make other batches than one.
    np.testing.assert_allclose(found, usual, atol=0.02 if "day" in given else 1e-6)
    assert f"  {name}\n" in shown and "181 features" in shown and "2,000 examples" in shown
    with Model.load(model) as loaded:
        assert loaded.report.test.auc > 0.75 and loaded.report.bad_lines == 0


def test_predict_reads_standard_input_and_removes_its_copy(
    run, data, trained, tmp_path, monkeypatch
):
    """As it reads a file; --raw gives scores."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = run("predict", trained, "-", "--raw", stdin=data / "test.vw").out
    with Model.load(trained) as model:
        expected = model.predict(str(data / "test.vw"), raw=True)

    np.testing.assert_allclose(np.array(out.split(), float), expected, rtol=1e-5)
    assert not list(tmp_path.glob("commute-*"))


def test_predict_needs_no_label(data, tmp_path):
    """A CSV without the column, and Vowpal Wabbit text without labels."""
    with fit(str(data / "train.csv")) as model:
        rows = [line.split(",")[:-1] for line in (data / "test.csv").read_text().splitlines()]
        bare = tmp_path / "bare.csv"
        bare.write_text("".join(",".join(reversed(row)) + "\n" for row in rows))
        expected = model.predict(str(data / "test.csv"))
        np.testing.assert_allclose(model.predict(str(bare)), expected, atol=1e-6)
    with fit(str(data / "train.vw")) as model:
        bare = tmp_path / "bare.vw"
        bare.write_text((data / "test.vw").read_text().replace("0 |", "|").replace("1 |", "|"))
        assert np.array_equal(model.predict(str(bare)), model.predict(str(data / "test.vw")))


def test_standard_input_beside_files_removes_none_of_them(run, data, tmp_path, monkeypatch):
    """Only the copy is removed, whatever the patterns before it stand for."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for i in range(3):
        shutil.copy(data / f"day{i}.vw", tmp_path)
    report = tmp_path / "report.json"
    run(
        *("learn", tmp_path / "day*.vw", "-", "--workers", 1, "--json", report, "--quiet"),
        stdin=data / "day3.vw",
    )

    assert json.loads(report.read_text())["examples"] == 2000
    assert sorted(p.name for p in tmp_path.glob("day*")) == ["day0.vw", "day1.vw", "day2.vw"]
    assert not list(tmp_path.glob("commute-*"))


# ---- reports ----


def test_reports(run, data, tmp_path):
    """In the terminal, as JSON with the promised keys, and as a page that needs nothing else."""
    page, report, model = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "model"
    ended = run(
        *("learn", data / "train.csv", "--test", data / "test.csv", "--workers", 2),
        *("--servers", 2, "--json", report, "--html", page, "--save", model),
    )
    told = json.loads(report.read_text())
    html = page.read_text()

    assert told["examples"] == 2000 and told["features"] == 181
    assert told["examples_per_second"] == pytest.approx(2000 / told["seconds"])
    assert 0.3 < told["test"]["logloss"] < 0.65 and 0.75 < told["test"]["auc"] < 1
    assert 0.3 < told["logloss"] < 0.69 and 0.6 < told["auc"] < 1
    assert html.lower().startswith("<!doctype html") and html.rstrip().endswith("</html>")
    assert "<svg" in html and "src=" not in html and "A=a" in html
    assert "2 workers, 2 servers" in ended.out
    assert "label: column 'label' (guessed; --label says another)" in ended.out
    assert "expected collisions of 181 features in 64 bits" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100


def test_quiet(run, data):
    """Says nothing."""
    ended = run("learn", data / "train.vw", "--workers", 1, "--quiet")

    assert ended.out == ended.err == ""


def test_model_in_python(data, tmp_path):
    """`fit` returns it with its report; a watcher sees points; the dict of columns stays as is."""
    seen: list[tuple[int, float | None]] = []

    class Watcher:
        def update(self, point: Any, fraction: float | None) -> None:
            seen.append((point.examples, fraction))

    columns = {"format": "csv", "crosses": [["*", "*"]]}
    data_, test = str(data / "train.csv"), str(data / "test.csv")
    with fit(data_, test=test, columns=columns, workers=2, servers=1, watcher=Watcher()) as model:
        assert model.report.features > 5000  # each of 15 pairs has 900 combinations
        assert model.report.test.auc > 0.7
        assert len(model.predict(test)) == 1000
    assert columns == {"format": "csv", "crosses": [["*", "*"]]}
    assert seen[-1] == (2000, 1.0)


@pytest.mark.parametrize(
    ("model", "optimizer"), [("linear", "adagrad"), ("svm", "sgd"), ("perceptron", "ftrl")]
)
def test_other_models(data, model, optimizer):
    """Learn: scores of clicks are higher."""
    with fit(str(data / "train.vw"), model=model, optimizer=optimizer, epochs=2) as made:
        scores = made.predict(str(data / "test.vw"))
    labels = Clicks(1000, SEED + 1).labels

    assert np.corrcoef(scores, labels)[0, 1] > 0.3


# ---- the same answer ----


@pytest.fixture(scope="module")
def quarters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`by ranges`: four equal byte ranges; `by rounds`: a round's four batches are neighbours."""
    folder = tmp_path_factory.mktemp("quarters")
    lines = Clicks(1600).lines("vw")
    assert len({len(line) for line in lines}) == 1
    parts = [lines[400 * i : 400 * (i + 1)] for i in range(4)]
    rounds = [line for at in range(0, 400, 50) for part in parts for line in part[at : at + 50]]
    paths = {"by ranges": lines, "by rounds": rounds}
    for name, content in paths.items():
        (folder / f"{name}.vw").write_text("".join(content))
    return {name: str(folder / f"{name}.vw") for name in paths}


@pytest.mark.parametrize(("optimizer", "servers"), [("ftrl", 1), ("adam", 2)])
def test_the_same_bits_with_one_worker_and_with_four(quarters, optimizer, servers):
    """In step and deterministic; and one undivided batch agrees to 1e-5."""

    def learned(data: str, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
        same = {"optimizer": optimizer, "epochs": 2, "staleness": 0, "deterministic": True}
        return weights_of(fit(quarters[data], **same, **settings))

    keys, four = learned("by ranges", workers=4, servers=servers, batch=50)
    keys_of_one, one = learned("by ranges", workers=1, streams=4, batch=50)
    keys_undivided, undivided = learned("by rounds", workers=1, batch=200)

    assert np.array_equal(keys, keys_of_one) and np.array_equal(keys, keys_undivided)
    assert four.tobytes() == one.tobytes()
    assert len(four) == 181 and np.abs(four).max() > 0.1
    np.testing.assert_allclose(undivided, four, rtol=0, atol=1e-5)


def test_staleness_does_not_matter_much(tmp_path):
    """At staleness 4 and none, the log-loss of the test is within half a percent of 0's."""
    train, test = tmp_path / "train.vw", tmp_path / "test.vw"
    train.write_text(Clicks(20_000).text("vw"))
    test.write_text(Clicks(5000, SEED + 1).text("vw"))
    found = {}
    for staleness in (0, 4, None):
        settings = {"staleness": staleness, "workers": 2, "servers": 1, "epochs": 3}
        with fit(str(train), test=str(test), **settings) as model:
            found[staleness] = model.report.test.logloss
            assert model.report.examples == 60_000
    print(found)

    assert found[4] == pytest.approx(found[0], rel=0.005)
    assert found[None] == pytest.approx(found[0], rel=0.005)


@pytest.mark.parametrize(("staleness", "every"), [(0, 80), (4, 80), (None, 80), (None, 0)])
def test_workers_with_unequal_shares(tmp_path, staleness, every):
    """One has five times the examples of the other; in between and at the end all is saved."""
    lines = Clicks(1200).lines("vw")
    long = [line.rstrip() + " " + "x" * 4 * len(line) + "\n" for line in lines[1000:]]
    path = tmp_path / "uneven.vw"
    path.write_text("".join(lines[:1000] + long))
    settings = {"staleness": staleness, "workers": 2, "servers": 1, "batch": 20}
    with fit(str(path), save=tmp_path / "model", save_every=every, **settings) as model:
        assert model.report.examples == 1200 and model.report.features == 182


# ---- caches, starting from a model, saving ----


def test_cache(run, data, tmp_path):
    """The same weights from the cache; a file that has changed makes a new one, and it is said."""
    train = tmp_path / "train.vw"
    shutil.copy(data / "train.vw", train)
    words = ("learn", train, "--workers", 2, "--staleness", 0, "--deterministic", "--batch", 100)
    found = []
    for cache in ([], ["--cache"], ["--cache"]):
        told = run(*words, "--epochs", 2, "--save", tmp_path / "model", *cache).out
        assert "made again" not in told
        found.append(weights_of(Model.load(tmp_path / "model"))[1].tobytes())
    with train.open("a") as file:
        file.write("1 |f a00\n")
    told = run(*words, "--cache").out

    assert found[0] == found[1] == found[2]
    assert "has changed: it is made again" in told and "2,001" in told
    assert sorted(p.name for p in tmp_path.glob("*.cache*")) == [
        "train.vw.cache.0-of-2",
        "train.vw.cache.1-of-2",
    ]


def test_start_from_with_other_workers_and_servers(data, tmp_path):
    """Nothing to learn changes no prediction; more to learn makes a better model."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    test = str(data / "test.vw")
    fit(str(data / "day0.vw"), test=test, save=first, workers=2, servers=1).close()
    fit(str(data / "empty.vw"), start_from=first, save=second, workers=1).close()
    rest = [str(data / f"day{i}.vw") for i in (1, 2, 3)]
    fit(rest, test=test, start_from=second, save=third, workers=3, servers=2, staleness=0).close()
    with Model.load(first) as before, Model.load(third) as after:
        improved = before.report.test.logloss - after.report.test.logloss

    assert np.array_equal(predicted(first, data / "test.vw"), predicted(second, data / "test.vw"))
    assert improved > 0.02


def test_start_from_what_does_not_fit(data, trained):
    """Another optimizer has another state; columns are those of the model."""
    with pytest.raises(SettingError, match="is lr with ftrl, not lr with sgd"):
        fit(str(data / "day0.vw"), start_from=trained, optimizer="sgd")
    with pytest.raises(SettingError, match="says what the columns are"):
        fit(str(data / "day0.vw"), start_from=trained, columns={"format": "vw"})


# ---- ending early ----


class Training:
    """A run without end. Its folder of work is in `folder`, so that a test sees it begin."""

    def __init__(self, job: Callable[..., Any], folder: Path, *words: object) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        command = [*COMMUTE, "learn", *map(str, words), *FOREVER, "--quiet"]
        self.job = job(command, env={"TMPDIR": str(self.folder)}, timeout=60.0)
        eventually(lambda: list(self.folder.glob("*/progress.jsonl")) or self._ended(), "no start")

    def _ended(self) -> None:
        assert self.job.process.poll() is None, self.job.err

    def pids(self, module: str) -> list[int]:
        """The processes of this run that execute a module."""
        found = []
        for pid in self.job.pids():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if module in words:
                found.append(pid)
        return sorted(found)

    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*/output.txt"))

    def ended(self) -> Any:
        """How it ended: without a traceback, and nothing is left of it."""
        result = self.job.wait()
        assert "Traceback" not in result.out + result.err
        eventually(lambda: not self.job.pids(), "processes are left")
        assert not list(self.folder.iterdir())
        return result


@pytest.mark.parametrize("staleness", [0, "none"])
def test_ctrl_c_saves(job, data, tmp_path, staleness):
    """130, the model is saved, and the report written."""
    model, report = tmp_path / "model", tmp_path / "report.json"
    run = Training(
        job,
        *(tmp_path, data / "train.vw", "--test", data / "test.vw", "--staleness", staleness),
        *("--workers", 2, "--save", model, "--json", report, "--cache"),
    )
    run.job.process.send_signal(signal.SIGINT)
    ended = run.ended()
    told = json.loads(report.read_text())

    assert (ended.code, ended.err) == (130, "")
    assert told["examples"] > 0 and told["test"]["auc"] > 0.6
    assert len(predicted(model, data / "test.vw")) == 1000
    assert not list(data.glob("*.new"))
    for cache in data.glob("*.cache.*"):
        cache.unlink()


def test_ctrl_c_twice_ends_at_once(job, data, tmp_path):
    """Also where a worker does not listen; nothing is saved then."""
    model = tmp_path / "model"
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2, "--save", model)
    os.kill(run.pids("commute.learn.worker")[0], signal.SIGSTOP)
    run.job.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more kills them" in run.output(), "the launcher has not heard it")
    run.job.process.send_signal(signal.SIGINT)
    ended = run.ended()

    assert (ended.code, ended.out) == (130, "")
    assert not (model / "model.json").exists()


def test_saved_in_between(job, data, tmp_path):
    """What was saved last is there after the command was killed; and its workers end with it."""
    model = tmp_path / "model"
    run = Training(
        job,
        *(tmp_path, data / "train.vw", "--workers", 2, "--batch", 50),
        *("--save", model, "--save-every", 1000),
    )
    eventually((model / "model.json").exists, "nothing was saved")
    first = (model / "model.json").stat().st_ino
    eventually(lambda: (model / "model.json").stat().st_ino != first, "it was saved once only")
    run.job.process.kill()
    run.job.wait()
    eventually(lambda: not run.job.pids(), "workers are left")
    with Model.load(model) as loaded:
        names = [name for name, _ in loaded.card.largest]
        assert len(loaded.predict(str(data / "test.vw"))) == 1000
        assert loaded.report.examples > 0 and names[0].startswith("f^")


@pytest.mark.parametrize("staleness", [0, "none"])
def test_a_worker_that_dies(job, data, tmp_path, staleness):
    """One message that says so, an exit code, and the others end."""
    run = Training(job, tmp_path, data / "train.vw", "--workers", 3, "--staleness", staleness)
    victim = run.pids("commute.learn.worker")[-1]
    os.kill(victim, signal.SIGKILL)
    ended = run.ended()

    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert f"pid {victim}" in ended.err and ended.err.startswith("commute learn: ")


def test_a_server_that_dies(job, data, tmp_path):
    """The weights are gone with it: one message."""
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2, "--servers", 2)
    os.kill(run.pids("commute.store.server")[-1], signal.SIGKILL)
    ended = run.ended()

    assert ended.code == 1
    assert ended.err.startswith("commute learn: ") and ended.err.count("\n") == 1, ended.err
    assert "server" in ended.err


# ---- what cannot be ----


def refused(capfd: Any, *words: object) -> str:
    """What a command says that ends with 1, before anything is started; in this process."""
    assert main([str(word) for word in words]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"commute {words[0]}: ")
    assert err.count("\n") == 1, err
    return err.partition(": ")[2]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["no.vw"], "no.vw cannot be read: No such file or directory"),
        (["no*.vw"], "no file is called no*.vw"),
        (["{data}", "--test", "no.vw"], "no.vw cannot be read"),
        (["{data}", "--test", "-"], "the test needs a file"),
        (["-", "--cache"], "standard input (-) has none"),
        (["{data}", "--model", "tree"], "expected model to be one of lr, linear, svm, perceptron"),
        (["{data}", "--workers", "2", "--servers", "0"], "2 workers need a server to share"),
        (["{data}", "--save", "{data}"], "cannot be made: File exists"),
        (["{data}", "--save", "{data}/model"], "cannot be made: Not a directory"),
        (["{data}", "--start-from", "no"], "no is no model: model.json cannot be read"),
        (["{data}", "--staleness", "x"], "--staleness to be 0, a number, or none; got 'x'"),
        (["{data}", "--deterministic"], "deterministic needs staleness 0"),
        (["{data}", "--bin", "age"], "expected --bin to be like name:value, got 'age'"),
        (["{data}", "--bin", "age:x"], "expected --bin to be like age:10, got age:x"),
        (["{data}", "--column", "age"], "expected --column to be like name:value"),
        (["{data}", "--label", "y"], "in the format vw has no columns"),
    ],
)
def test_one_sentence(capfd, data, tmp_path, monkeypatch, flags, says):
    """What cannot be is said before anything starts; no folder is made."""
    monkeypatch.chdir(tmp_path)

    assert says in refused(capfd, "learn", *(f.format(data=data / "train.vw") for f in flags))
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_read(capfd, data, trained, tmp_path):
    """Missing, foreign, of another version, or with weights that are cut."""
    test = data / "test.vw"
    assert "is no model: model.json cannot be read" in refused(capfd, "predict", "no", test)
    assert "is no model" in refused(capfd, "show", "model", tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    card = (folder / "model.json").read_text()
    (folder / "model.json").write_text(card.replace('"version": 1', '"version": 99', 1))
    assert "has version 99; this program reads 1" in refused(capfd, "predict", folder, test)
    for text in ("", "{}", "[1, 2", card[: len(card) // 2]):
        (folder / "model.json").write_text(text)
        assert "is damaged, or of another program" in refused(capfd, "predict", folder, test)
        assert "is damaged" in refused(capfd, "learn", test, "--start-from", folder)
    (folder / "model.json").write_text(card)
    largest = max((folder / "weights").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    assert largest.name in refused(capfd, "predict", folder, test)
    shutil.rmtree(folder / "weights")
    assert "weights" in refused(capfd, "predict", folder, test)


def test_a_model_to_start_from_with_damaged_weights(run, data, trained, tmp_path):
    """Noticed by the workers, and told by the command."""
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    largest = max((folder / "weights").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    words = ("learn", data / "day0.vw", "--workers", 2, "--start-from", folder, "--quiet")
    ended = run(*words, code=1)

    assert ended.err.count("\n") == 1 and largest.name in ended.err


@pytest.mark.parametrize("staleness", [0, "none"])
def test_too_many_bad_lines(run, data, tmp_path, staleness):
    """The first ones are named, also where another worker has found them."""
    path = tmp_path / "bad.vw"
    path.write_text((data / "train.vw").read_text() + "nonsense\n" * 8)
    words = ("learn", path, "--workers", 2, "--staleness", staleness, "--quiet", "--bad-lines")
    ended = run(*words, 7, code=1)
    with fit(str(path), epochs=2, bad_lines=8) as model:
        told = model.report

    first, *named = ended.err.splitlines()
    assert first.startswith("commute learn: more than 7 lines cannot be read (--bad-lines allows")
    assert named[0].startswith(f"  {path}:2001: ") and named[0].endswith(": 'nonsense'")
    assert len(named) == 5
    assert told.bad_lines == 8 and told.examples == 4000


def test_predict_takes_no_bad_line(capfd, trained, tmp_path):
    """A number for each line, or none at all in the file; --bad-lines is not a flag of it."""
    path, scores = tmp_path / "bad.vw", tmp_path / "scores.txt"
    path.write_text("|f a00\nnonsense\n")
    assert main(["predict", str(trained), str(path), "--output", str(scores)]) == 1
    said = capfd.readouterr().err

    assert f"{path}:2: " in said and "--bad-lines" not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.vw"]


def test_scores_beyond_what_floats_hold(data, tmp_path, recwarn):
    """Probabilities of 0 and 1, without a warning."""
    path = tmp_path / "far.vw"
    path.write_text("|f a:1e6\n|f a:-1e6\n")
    train = tmp_path / "train.vw"
    train.write_text("1 |f a\n0 |f b\n" * 100)
    with fit(str(train)) as model:
        assert model.predict(str(path)).tolist() == [1, 0]


# ---- a full disk ----


def test_a_full_device(capfd, data, trained):
    """Reports and scores that cannot be written: the file and why."""
    full = "cannot be written: No space left on device"
    test = str(data / "test.vw")
    words = ["learn", str(data / "day0.vw"), "--workers", "1", "--quiet"]

    assert main([*words, "--json", "/dev/full"]) == 1
    assert capfd.readouterr().err == f"commute learn: /dev/full {full}\n"
    assert main([*words, "--html", "/dev/full"]) == 1
    assert capfd.readouterr().err == f"commute learn: /dev/full {full}\n"
    with Path("/dev/full").open("wb") as out:
        command = [*COMMUTE, "predict", str(trained), test]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, f"commute predict: standard output {full}\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB that is full."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "commute-test", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, timeout=20)
    if made.returncode != 0:
        pytest.skip(f"this machine mounts no disk: {made.stderr.strip()}")
    try:
        try:
            with (folder / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def test_a_full_disk(run, data, trained, small_disk):
    """Models, caches and scores: one sentence each, and nothing half done is left."""
    words = ("learn", data / "train.vw", "--quiet", "--workers", 2)
    ended = run(*words, "--save", small_disk / "model", code=1)
    assert ended.err.count("\n") == 1 and "No space left on device" in ended.err
    with pytest.raises(CommuteError):
        Model.load(small_disk / "model")

    os.truncate(small_disk / "filler", (1 << 20) - (96 << 10))  # room for the data, not the cache
    shutil.copy(data / "train.vw", small_disk)
    ended = run("learn", small_disk / "train.vw", "--quiet", "--workers", 1, "--cache", code=1)
    assert ended.err.count("\n") == 1 and "cannot be written: No space left on device" in ended.err
    assert not list(small_disk.glob("*.cache*"))

    with (small_disk / "filler").open("ab", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    ended = run("predict", trained, data / "test.vw", "-o", small_disk / "scores.txt", code=1)
    assert ended.err.count("\n") == 1 and "No space left on device" in ended.err
    assert not list(small_disk.glob("scores*"))
