# SPDX-License-Identifier: Apache-2.0
"""What a line means: guessed from a file's first lines, or said by flags."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from commute import SettingError
from commute.learn.recipe import Column, Recipe, crosses_of, guess, split_cells
from commute.learn.settings import Training, checked

pytestmark = pytest.mark.timeout(30)

PEOPLE = [
    "age,work,member,income,hours\n",
    "39,State-gov,0,<=50K,40\n",
    "50,Private,1,<=50K,13\n",
    '38,"Private, own",0,>50K,40\n',
    "53,?,1,<=50K,\n",
]


def guessed(lines: list[str] = PEOPLE, **flags: Any) -> Recipe:
    return guess(lines, **{"format": "csv", "label": "income", **flags})[0]


def kinds(recipe: Recipe) -> dict[str, str]:
    return {column.name: column.kind for column in recipe.columns}


def column(recipe: Recipe, name: str) -> Column:
    return next(c for c in recipe.columns if c.name == name)


def features(recipe: Recipe, line: bytes, header: tuple[str, ...] = (), **options: Any) -> Any:
    array = np.frombuffer(line, np.uint8)
    examples = recipe.parser(header, **options).parse(array.ctypes.data, array.size, 100, True)
    assert not examples.bad
    return examples


# ---- guessing ----


def test_categories_and_numbers():
    """Numbers of more than two values are numbers; two values are codes, and so is any text."""
    assert kinds(guessed()) == {
        "age": "number",
        "work": "category",
        "member": "category",
        "income": "label",
        "hours": "category",  # 40 and 13 only, and one that is missing
    }


def test_missing_cells_say_nothing_about_a_column():
    """An empty cell, a question mark and nan are what the parser takes for missing."""
    lines = ["x,label\n", *(f"{cell},1\n" for cell in ("1.5", "", "?", "nan", "NaN", "2", "3"))]
    found = column(guess(lines, format="csv")[0], "x")

    assert found.kind == "number"
    assert found.shift == pytest.approx(np.mean([1.5, 2, 3]))
    assert found.scale == pytest.approx(1 / np.std([1.5, 2, 3]))


def test_what_was_guessed_is_said():
    """The label, the text that means 1, and the columns by kind."""
    _, said = guess(PEOPLE, format="csv", kinds={"hours": "ignore"}, positive=(), label="income")

    assert said == [
        "label 1: '>50K', the rarer one (guessed; --positive says another)",
        "2 columns of categories: work, member",
        "1 columns of numbers: age",
    ]


@pytest.mark.parametrize(
    ("header", "label"),
    [
        ("a,b,c", "c"),
        ("a,Label,c", "Label"),
        ("click,b,target", "click"),
        ("a,outcome,label", "outcome"),  # the first one
    ],
)
def test_the_label_by_name_or_last(header, label):
    """A usual name wins, wherever it is; else it is the last column."""
    recipe, said = guess([f"{header}\n", "1,0,1\n"], format="csv")

    assert [c.name for c in recipe.columns if c.kind == "label"] == [label]
    assert said[0] == f"label: column {label!r} (guessed; --label says another)"


def test_a_column_with_a_kind_is_not_guessed_to_be_the_label():
    """Neither the last one nor one with a usual name, if flags say what it is."""
    lines = ["a,y,w\n", "1,0,2\n"]

    assert kinds(guess(lines, format="csv", weight="w")[0])["w"] == "weight"
    found = kinds(guess(lines, format="csv", weight="w", kinds={"y": "ignore"})[0])
    assert found == {"a": "label", "y": "ignore", "w": "weight"}


def test_a_kind_may_be_the_label():
    """--column income:label is --label income."""
    assert kinds(guess(PEOPLE, format="csv", kinds={"income": "label"})[0])["income"] == "label"


def test_the_rarer_text_is_positive():
    """Of two texts; numbers need none, and what is said holds."""
    assert guessed().positive == (">50K",)
    assert guessed(positive=["<=50K"]).positive == ("<=50K",)
    assert guessed(label="member").positive == ()
    labels = features(guessed(), b"1,a,0,>50K,1\n1,a,0,<=50K,1\n").labels
    assert labels.tolist() == [1, 0]


def test_three_texts_with_positive():
    """--positive says which of many mean 1."""
    lines = ["a,label\n", "1,x\n", "2,y\n", "3,z\n"]
    recipe, _ = guess(lines, format="csv", positive=["x", "z"])

    assert features(recipe, b"1,x\n1,y\n1,z\n").labels.tolist() == [1, 0, 1]


def test_regression_needs_no_positive():
    """Labels are numbers as they are."""
    recipe, _ = guess(["a,y\n", "u,2.5\n", "v,-3\n"], format="csv", binary=False)

    assert recipe.positive == () and not recipe.binary
    assert features(recipe, b"u,2.5\nv,-3\n").labels.tolist() == [2.5, -3]


def test_names_make_the_first_line_data():
    """A file without a header; the same line with one would be eaten."""
    recipe, _ = guess(["5,a,1\n", "6,b,0\n", "7,b,0\n"], format="csv", names=["x", "c", "label"])

    assert not recipe.header
    assert kinds(recipe) == {"x": "number", "c": "category", "label": "label"}
    assert column(recipe, "x").shift == pytest.approx(6)
    assert guessed().header


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    """Spreadsheets write one at the front of a file."""
    from commute.learn.sources import find, first_lines

    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbflabel,b\n1,x\n0,y\n")
    recipe, _ = guess(first_lines(find([str(path)])[0]), format="csv")

    assert kinds(recipe) == {"label": "label", "b": "category"}


def test_tsv():
    """Tabs; commas are text."""
    recipe, _ = guess(["a\tlabel\n", "x,y\t1\n"], format="tsv")

    assert recipe.separator == "\t" and kinds(recipe) == {"a": "category", "label": "label"}
    assert features(recipe, b"x,y\t1\n").count == 1


def test_lines_of_another_length_are_left_out():
    """They will be bad lines; the guess is made from the others."""
    recipe, _ = guess(["a,label\n", "1,2,3\n", "\n", "q,1\n"], format="csv")

    assert kinds(recipe) == {"a": "category", "label": "label"}


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("a,b", ["a", "b"]),
        ("a,,b\r\n", ["a", "", "b"]),
        ('"a ""b""",c', ['a "b"', "c"]),
        (' x , "y, z" ', ["x", "y, z"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_cells(line, cells):
    """As the parser of the core splits them."""
    assert split_cells(line, ",") == cells


# ---- bins and logarithms ----


def test_bins_are_of_distinct_values():
    """A column that is mostly 0 has bins for its other values all the same."""
    lines = ["x,label\n", *["0,1\n"] * 90, *(f"{i},0\n" for i in range(1, 11))]
    found = column(guess(lines, format="csv", bins={"x": 4})[0], "x")

    assert found.edges == tuple(np.quantile(np.arange(11.0), [0.25, 0.5, 0.75]))
    assert (found.shift, found.scale, found.log) == (0, 1, False)


def test_a_bin_is_a_category():
    """Values of one bin have the same feature, others another; it can be crossed."""
    lines = ["x,c,label\n", *(f"{i},k,{i % 2}\n" for i in range(10))]
    recipe, _ = guess(lines, format="csv", bins={"x": 2}, crosses=[["x", "c"]])
    keys = features(recipe, b"1,k,0\n2,k,0\n8,k,0\n").keys.reshape(3, -1)

    assert recipe.crosses == (("x", "c"),)
    assert keys[0].tolist() == keys[1].tolist() != keys[2].tolist()
    assert len(keys[0]) == 4  # bin, category, cross, constant


def test_few_values_make_fewer_bins():
    """Edges are distinct; a column without a number has none."""
    lines = ["x,y,label\n", "1,,1\n", "1,,0\n"]
    recipe, _ = guess(lines, format="csv", bins={"x": 10, "y": 3})

    assert column(recipe, "x").edges == (1.0,)
    assert column(recipe, "y").edges == ()


def test_logarithms():
    """Of the magnitude and with the sign; mean and deviation are those of the logarithms."""
    values = [-100.0, 0.0, 3.0, 1000.0]
    lines = ["x,label\n", *(f"{v},1\n" for v in values)]
    recipe, _ = guess(lines, format="csv", logs=["x"])
    logs = np.sign(values) * np.log1p(np.abs(values))
    made = features(recipe, "".join(f"{v},1\n" for v in values).encode()).values.reshape(4, 2)

    np.testing.assert_allclose(made[:, 0], (logs - logs.mean()) / logs.std(), rtol=1e-5)


def test_a_constant_column_is_not_divided_by_its_deviation():
    """Which is 0."""
    recipe, _ = guess(["x,label\n", "7,1\n", "7,0\n"], format="csv", kinds={"x": "number"})

    assert (column(recipe, "x").shift, column(recipe, "x").scale) == (7.0, 1.0)


# ---- crosses ----


def test_every_pair_and_every_triple():
    """`*:*` is written out, in the order of the columns, each once."""
    assert guessed(crosses=[["*", "*"]]).crosses == (
        ("work", "member"),
        ("work", "hours"),
        ("member", "hours"),
    )
    assert guessed(crosses=[["*", "*", "*"]]).crosses == (("work", "member", "hours"),)
    assert crosses_of([["a", "b"], ["*", "*"]], ["a", "b", "c"]) == (
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    )


def test_crosses_that_are_named():
    """Two and three columns; a number can be crossed once it has bins."""
    recipe = guessed(bins={"age": 2}, crosses=[["age", "work"], ["age", "work", "member"]])

    assert recipe.crosses == (("age", "work"), ("age", "work", "member"))


def test_namespaces_are_crossed_by_name():
    """Any name may come up in a file of Vowpal Wabbit."""
    recipe, said = guess(["1 |a x |b y\n"], format="vw", crosses=[["a", "b"], ["a", "b", "c"]])

    assert recipe.crosses == (("a", "b"), ("a", "b", "c")) and said == []


# ---- a file's own header ----


def test_columns_are_found_by_name():
    """Another order gives the same features; a column that is new is left out."""
    recipe = guessed()
    usual = features(recipe, b"39,Private,0,<=50K,40\n")
    mixed = ("hours", "extra", "income", "work", "age", "member")
    other = features(recipe, b"40,x,<=50K,Private,39,0\n", mixed)

    assert sorted(usual.keys.tolist()) == sorted(other.keys.tolist())
    assert other.labels.tolist() == [0]


def test_predicting_needs_no_label_and_no_weight():
    """Where labels are not needed, their column may be missing."""
    recipe = guessed(kinds={"hours": "weight"})
    header = ("age", "work", "member")
    made = features(recipe, b"39,Private,0\n", header, labels_needed=False)

    assert made.count == 1 and made.weights.tolist() == [1]
    assert made.keys.tolist() == features(recipe, b"39,Private,0,<=50K,2\n").keys.tolist()


def test_an_ignored_column_may_be_missing():
    """It says nothing anyway."""
    recipe = guessed(kinds={"hours": "ignore"})

    assert features(recipe, b"39,Private,0,<=50K\n", ("age", "work", "member", "income")).count == 1


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        (PEOPLE, {"format": "xml"}, "expected a format of svm, vw, csv, tsv, got 'xml'"),
        (PEOPLE, {"label": "no"}, "there is no column 'no'; there are age, work, member, income,"),
        (PEOPLE, {"weight": "no"}, "there is no column 'no'"),
        (PEOPLE, {"logs": ["no"]}, "there is no column 'no'"),
        (PEOPLE, {"bins": {"no": 3}}, "there is no column 'no'"),
        (PEOPLE, {"bins": {"age": 1}}, "expected 2 bins or more for column 'age', got 1"),
        (
            PEOPLE,
            {"kinds": {"age": "text"}},
            "expected column 'age' to be category, number, label, weight or ignore, got 'text'",
        ),
        (PEOPLE, {"kinds": {"age": "label"}}, "expected one label, got age, income"),
        (["a,a\n"], {"label": None}, "expected each column to have a name of its own"),
        ([], {}, "the file is empty; expected a line with the names of its columns"),
        (["\n", "\n"], {}, "the file is empty"),
        (
            ["a,b\n"],
            {"label": None, "kinds": {"a": "number", "b": "number"}},
            "there is no column left to be the label",
        ),
        (PEOPLE, {"label": "work"}, "expected the label to be a number or one of two texts, got 4"),
        (PEOPLE, {"crosses": [["work"]]}, "expected names like a:b to be crossed, got 'work'"),
        (
            PEOPLE,
            {"crosses": [["work", "age"]]},
            "there is no column of categories 'age' to be crossed; there are work, member, hours",
        ),
        (PEOPLE, {"crosses": [["work", "*"]]}, "there is no column of categories '*'"),
        (["1 1:2\n"], {"format": "svm", "label": "y"}, "in the format svm has no columns"),
        (["1 |a b\n"], {"format": "vw", "label": None, "logs": ["a"]}, "the format vw has no col"),
        (
            ["1 |a b\n"],
            {"format": "vw", "label": None, "crosses": [["*", "*"]]},
            "'*' to be crossed needs a file with columns",
        ),
        (
            ["1 1:2\n"],
            {"format": "svm", "label": None, "crosses": [["1", "2"]]},
            "there is no column of categories '1' to be crossed; there are none",
        ),
    ],
)
def test_recipes_that_cannot_be(lines, flags, says):
    """Each is a sentence that says what was expected and what was got."""
    with pytest.raises(SettingError) as error:
        guessed(lines, **flags)

    assert says in str(error.value)


def test_a_file_without_a_column_of_the_model():
    """The message names what is missing, and where it is looked for."""
    with pytest.raises(SettingError, match=r"the file has no work, hours\. Its first line must"):
        guessed().parser(("age", "member", "income"))
    with pytest.raises(SettingError, match="the file has no income"):
        guessed().parser(("age", "member", "work", "hours"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "tree"}, "model to be one of lr, linear, svm, perceptron; got 'tree'"),
        ({"optimizer": "x"}, "optimizer to be one of ftrl, adagrad, adam, sgd; got 'x'"),
        ({"epochs": 0}, "expected epochs to be 1 or more, got 0"),
        ({"admit": 0}, "expected admit to be 1 or more, got 0"),
        ({"workers": 0}, "expected workers to be 1 or more, got 0"),
        ({"batch": -1}, "expected batch to be 0 or more, got -1"),
        ({"servers": -1}, "expected servers to be 0 or more, got -1"),
        ({"save_every": -1}, "expected save_every to be 0 or more"),
        ({"bad_lines": -1}, "expected bad_lines to be 0 or more"),
        ({"staleness": -1}, "expected staleness to be 0 or more"),
        ({"l1": -1.0}, "expected l1 to be 0 or more, got -1.0"),
        ({"l2": float("nan")}, "expected l2 to be 0 or more, got nan"),
        ({"lr": 0.0}, "expected lr to be above 0, got 0.0"),
        ({"lr": float("inf")}, "expected lr to be above 0, got inf"),
        ({"l1": 1.0, "optimizer": "sgd"}, "l1 needs the optimizer ftrl, got sgd"),
        ({"workers": 2}, "2 workers need a server to share: --servers 1"),
        ({"deterministic": True}, "deterministic needs staleness 0: all workers in step"),
        ({"workers": 2, "servers": 1, "streams": 3}, "multiple of the 2 workers, got 3"),
        ({"wire": "int8"}, "expected wire to be float16 or bfloat16, got 'int8'"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    """Checked before anything is started."""
    with pytest.raises(SettingError) as error:
        checked(Training(**settings))

    assert says in str(error.value)


# ---- digests ----


def test_digests():
    """The same recipe has the same one, also after a journey as JSON; any change another one."""
    recipe = guessed(bins={"age": 3}, crosses=[["*", "*"]])
    again = msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe)
    replaced = msgspec.structs.replace
    first = replaced(recipe.columns[0], edges=(1.0, 2.0))
    others = [
        replaced(recipe, separator=";"),
        replaced(recipe, positive=("x",)),
        replaced(recipe, binary=False),
        replaced(recipe, constant=False),
        replaced(recipe, crosses=recipe.crosses[1:]),
        replaced(recipe, columns=(first, *recipe.columns[1:])),
    ]

    assert (
        again.digest() == recipe.digest() == guessed(bins={"age": 3}, crosses=[["*", "*"]]).digest()
    )
    assert len({recipe.digest(), *(other.digest() for other in others)}) == 1 + len(others)
