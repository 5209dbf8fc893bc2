# SPDX-License-Identifier: Apache-2.0
"""Generated click data: the same bytes however they are made, and as good as it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commute._errors import SettingError
from commute.cli import main
from commute.learn.clicks import EXPONENT, FORMATS, ClickModel, make_clicks

SMALL: dict[str, Any] = {"examples": 1000, "features": 20_000, "fields": 11, "seed": 3}
NAMES = list("abcdefghijk")


@pytest.fixture(scope="module")
def model() -> ClickModel:
    """The model of SMALL."""
    return ClickModel(features=SMALL["features"], fields=SMALL["fields"], seed=SMALL["seed"])


def ranks_and_labels(model: ClickModel, part: str, examples: int) -> tuple[Any, Any]:
    batches = list(model.batches(part, examples=examples))
    ranks = np.concatenate([np.stack(b.ranks) for b in batches], axis=1)
    return ranks, np.concatenate([b.clicks for b in batches])


def parsed(text: str, format: str) -> tuple[list[int], list[dict[str, int]]]:
    """Labels, and each example's ids by field; svm names no fields, so they are numbered."""
    lines = text.splitlines()
    if format == "csv":
        assert lines.pop(0) == "click," + ",".join(NAMES)
        rows = [[int(cell) for cell in line.split(",")] for line in lines]
        return [row[0] for row in rows], [dict(zip(NAMES, row[1:], strict=True)) for row in rows]
    labels, examples = [], []
    for line in lines:
        label, *tokens = line.split(" ")
        labels.append(int(label))
        if format == "vw":
            assert tokens.pop(0) == "|f"
            examples.append({token[0]: int(token[1:]) for token in tokens})
        else:
            pairs = [token.split(":") for token in tokens]
            assert all(value == "1" for _, value in pairs)
            examples.append({n: int(i) for n, (i, _) in zip(NAMES, pairs, strict=True)})
    return labels, examples


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk", [1, 7, 333, 5000])
def test_the_same_bytes_whatever_the_chunks(tmp_path: Path, format: str, chunk: int) -> None:
    """How many examples are made at a time is not to be seen, in either file nor in the facts."""
    for folder, size in (("one", 128), ("other", chunk)):
        (tmp_path / folder).mkdir()
        make_clicks(
            tmp_path / folder / "x",
            **{**SMALL, "examples": 400},
            format=format,
            test=tmp_path / folder / "t",
            test_examples=100,
            chunk=size,
        )

    for name in ("x", "t", "x.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


PROMISED = "-1 |f a1 b1406 c1862 d713\n-1 |f a5 b2600 c2860 d2725\n"


def test_the_first_bytes_are_a_promise(tmp_path: Path) -> None:
    """Seed 1 means these examples, today and on other machines: results are compared by it."""
    make_clicks(tmp_path / "x.vw", examples=2, features=5000, fields=4)

    assert (tmp_path / "x.vw").read_text() == PROMISED


def test_another_seed_is_another_model_and_more_examples_are_not(tmp_path: Path) -> None:
    made = {}
    for name, changed in (("a", {}), ("seed", {"seed": 4}), ("more", {"examples": 1500})):
        make_clicks(tmp_path / name, **{**SMALL, **changed})
        made[name] = (tmp_path / name).read_bytes()

    assert made["more"].startswith(made["a"])
    assert made["seed"][:200] != made["a"][:200]


def test_training_and_test_are_different_draws(model: ClickModel) -> None:
    train, _ = ranks_and_labels(model, "train", 100)
    test, _ = ranks_and_labels(model, "test", 100)

    assert not np.array_equal(train, test)


@pytest.mark.parametrize("features", [22, 100, 20_000, 1_000_000])
def test_fields_own_all_ids_between_them(features: int) -> None:
    """Some small, most large, together what was asked for; every rank is inside its field."""
    model = ClickModel(features=features, fields=11, seed=1)
    sizes = [field.size for field in model.fields]
    ranks, _ = ranks_and_labels(model, "train", 20_000)

    assert sum(sizes) == features
    assert [field.first for field in model.fields] == [0, *np.cumsum(sizes)[:-1]]
    assert [field.name for field in model.fields] == NAMES
    assert all(r.max() < size for r, size in zip(ranks, sizes, strict=True))
    if features > 10_000:
        assert (sizes[0], sizes[8]) == (7, 24)
        assert min(s for i, s in enumerate(sizes) if i not in (0, 8)) > features // 20


@pytest.mark.parametrize("place", [0, 1])
def test_ids_follow_the_law_of_zipf(place: int) -> None:
    """Rank by rank at the head, and in sums over the tail, within five standard deviations."""
    model = ClickModel(features=60_000, fields=2, seed=5)
    model_size = model.fields[place].size
    examples = 300_000
    ranks, _ = ranks_and_labels(model, "train", examples)
    law = np.arange(1, model_size + 1) ** -EXPONENT
    law /= law.sum()
    edges = [e for e in (*range(9), 20, 50, 100, 1000, 2000, 10_000, 30_000) if e < model_size]
    seen = np.add.reduceat(np.bincount(ranks[place], minlength=model_size), edges) / examples
    expected = np.add.reduceat(law, edges)

    # The pieces of the quantile function may move a little between neighbours.
    allowed = 5 * np.sqrt(expected * (1 - expected) / examples) + 5e-5
    assert np.all(np.abs(seen - expected) < allowed), (seen, expected)


def test_the_names_of_ids_are_distinct() -> None:
    """Different ranks of a field never share a number."""
    for field in ClickModel(features=30_000, fields=3, seed=2).fields:
        numbers = field.ids(np.arange(field.size, dtype=np.uint32))
        assert len(np.unique(numbers)) == field.size


def test_the_facts_are_those_of_the_files(tmp_path: Path, model: ClickModel) -> None:
    """Counted again from the text; the true model's figures from its margins, by other means."""
    facts = make_clicks(
        tmp_path / "x.svm", **SMALL, format="svm", test=tmp_path / "t.svm", test_examples=4000
    )
    for path, part, said in (("x.svm", "train", facts.train), ("t.svm", "test", facts.test)):
        assert said is not None
        text = (tmp_path / path).read_text()
        labels, examples = parsed(text, "svm")
        batches = list(model.batches(part, examples=said.examples))
        margins = np.concatenate([b.margins for b in batches])
        clicks = np.array(labels)
        chance = 1 / (1 + np.exp(-margins))
        order = np.argsort(margins)
        places = np.empty(len(order))
        places[order] = np.arange(1, len(order) + 1)
        ones = clicks.sum()
        auc = (places[clicks == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(clicks) - ones))

        assert said.examples == len(labels)
        assert said.bytes == len(text)
        assert said.distinct_ids == len({i for example in examples for i in example.values()})
        assert said.positive_rate == pytest.approx(clicks.mean(), abs=1e-6)
        logloss = -np.mean(np.where(clicks == 1, np.log(chance), np.log1p(-chance)))
        assert said.true_model.logloss == pytest.approx(logloss, abs=1e-6)
        assert said.true_model.auc == pytest.approx(auc, abs=2e-4)

    kept = json.loads((tmp_path / "x.svm.json").read_text())
    assert kept["test"]["true_model"]["logloss"] == facts.best.logloss
    assert kept["train"]["distinct_ids"] == facts.train.distinct_ids


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("features", "fields"), [(10_000_000, 39), (5000, 8)])
def test_the_true_model_is_as_good_as_planned(
    tmp_path: Path, seed: int, features: int, fields: int
) -> None:
    """A log-loss of about 0.45 where three in ten are clicks: neither easy nor hopeless."""
    facts = make_clicks(
        tmp_path / "x", examples=30_000, features=features, fields=fields, seed=seed
    )

    assert facts.best.logloss == pytest.approx(0.45, abs=0.02)
    assert facts.train.positive_rate == pytest.approx(0.3, abs=0.02)
    assert 0.8 < facts.best.auc < 0.87


def test_the_formats_say_the_same(tmp_path: Path, model: ClickModel) -> None:
    """The ranks that were drawn can be read back from each."""
    ranks, clicks = ranks_and_labels(model, "train", SMALL["examples"])
    for format in FORMATS:
        make_clicks(tmp_path / format, **SMALL, format=format)
        labels, examples = parsed((tmp_path / format).read_text(), format)

        assert labels == np.where(clicks, 1, -1 if format == "vw" else 0).tolist()
        for field, drawn in zip(model.fields, ranks, strict=True):
            shown = drawn + field.first + 1 if format == "svm" else field.ids(drawn)
            assert [example[field.name] for example in examples] == shown.tolist()


def test_indices_of_svm_ascend(tmp_path: Path) -> None:
    make_clicks(tmp_path / "x", **SMALL, format="svm")
    _, examples = parsed((tmp_path / "x").read_text(), "svm")

    for example in examples:
        indices = list(example.values())
        assert indices == sorted(set(indices))
        assert 1 <= indices[0] and indices[-1] <= SMALL["features"]


def test_names_of_many_fields() -> None:
    """After z come aa and ab; all are different."""
    names = [field.name for field in ClickModel(features=5000, fields=60, seed=1).fields]

    assert names[:3] + names[25:28] + names[51:53] == ["a", "b", "c", "z", "aa", "ab", "az", "ba"]
    assert len(set(names)) == 60


def test_large_numbers_have_all_their_digits(tmp_path: Path) -> None:
    """Eight digits, and zeros inside a number, are written as they are."""
    make_clicks(tmp_path / "x", examples=3000, features=50_000_000, fields=2, format="svm")
    model = ClickModel(features=50_000_000, fields=2)
    ranks, _ = ranks_and_labels(model, "train", 3000)
    shown = [line.split(" ")[2] for line in (tmp_path / "x").read_text().splitlines()]

    assert shown == [f"{rank + model.fields[1].first + 1}:1" for rank in ranks[1].tolist()]
    assert max(len(text) for text in shown) == 10


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fields": 0}, "expected 1 to 702 fields, got 0"),
        ({"features": 10}, r"expected 22 \(two for each of 11 fields\) to 50,000,000 features"),
        ({"features": 60_000_000}, "got 60,000,000"),
        ({"seed": -1}, "expected a seed from 0"),
        ({"format": "arff"}, "expected one of the formats vw, svm, csv, got 'arff'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make_clicks(tmp_path / "x", **{**SMALL, **changed})

    assert not list(tmp_path.iterdir())


def test_an_interrupted_file_does_not_appear(tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves nothing that looks whole."""

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_clicks(tmp_path / "x", **SMALL, progress=interrupt)

    assert not list(tmp_path.iterdir())


COMMAND = ("generate", "clicks")
FEW = ("--examples", "200", "--features", "5000", "--fields", "9")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes the files and says what is in them, and what can be reached."""
    out, test = str(tmp_path / "x.csv"), str(tmp_path / "t.csv")

    assert main([*COMMAND, out, *FEW, "--test", test, "--test-examples", "50"]) == 0

    said, complaints = capsys.readouterr()
    kept = json.loads((tmp_path / "x.csv.json").read_text())
    best = kept["test"]["true_model"]
    assert complaints == ""
    assert f"{out}: 200 examples" in said and f"{test}: 50 examples" in said
    assert f"log-loss {best['logloss']:.4f}, AUC {best['auc']:.4f}" in said
    assert kept["format"] == "csv"
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 51


def test_the_verb_makes_what_the_library_makes(tmp_path: Path) -> None:
    main([*COMMAND, str(tmp_path / "x.txt"), *FEW, "--seed", "9"])
    make_clicks(tmp_path / "y", examples=200, features=5000, fields=9, seed=9)

    assert (tmp_path / "x.txt").read_bytes() == (tmp_path / "y").read_bytes()


def test_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the examples, nor the test, nor the facts, unless --force says so."""
    out, test = tmp_path / "x.vw", tmp_path / "t.vw"
    for precious in (out, test, tmp_path / "x.vw.json"):
        precious.write_text("mine")
        assert main([*COMMAND, str(out), *FEW, "--test", str(test)]) == 1
        assert f"{precious} already there; add --force to replace" in capsys.readouterr().err
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
        precious.unlink()

    out.write_text("mine")
    assert main([*COMMAND, str(out), *FEW, "--force"]) == 0
    assert out.read_text() != "mine"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """The verb is in the list; its help has lines to copy and says what the formats are."""
    assert main(["--help"]) == 0
    assert "generate  make data to try things with" in capsys.readouterr().out

    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "commute generate clicks train.vw --test test.vw" in said
    assert "-1 |f a3" in said and "click,a,b" in said
    assert max(len(line) for line in said.splitlines()) <= 100


@pytest.mark.parametrize("flag", ["--examples", "--features", "--fields", "--test-examples"])
@pytest.mark.parametrize("text", ["0", "-3", "1e6", "many", ""])
def test_a_bad_number_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, str(tmp_path / "x"), f"{flag}={text}"])

    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert last.endswith(f"argument {flag}: expected a whole number from 1 up, got {text!r}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fields", "9000"], "expected 1 to 702 fields, got 9000"),
        (["--features", "5"], "expected 78 (two for each of 39 fields) to 50,000,000 features"),
        (["--test-examples", "5"], "add --test FILE"),
        (["--test", "{out}"], "name another"),
    ],
)
def test_numbers_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    out = str(tmp_path / "x")

    assert main([*COMMAND, out, *(flag.format(out=out) for flag in flags)]) == 1

    complaint = capsys.readouterr().err
    assert complaint.startswith("commute generate: ") and words in complaint
    assert len(complaint.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, str(tmp_path / "none" / "x.vw"), *FEW]) == 1

    complaint = capsys.readouterr().err
    assert "cannot write" in complaint and "No such file or directory" in complaint
