# SPDX-License-Identifier: Apache-2.0
"""`commute learn`, `commute predict` and `commute show model` between real processes."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from commute import SettingError
from commute.cli import main
from commute.learn import Model, fit
from learning import SEED, Clicks, predicted, weights_of

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("servers", [1, 3])
def test_cache(run, data, tmp_path, servers):
    """The same weights from the cache; a file that has changed makes a new one, and it is said."""
    train = tmp_path / "train.vw"
    shutil.copy(data / "train.vw", train)
    words = ("learn", train, "--workers", 2, "--servers", servers)
    words += ("--staleness", 0, "--deterministic", "--batch", 100)
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
