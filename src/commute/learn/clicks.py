# SPDX-License-Identifier: Apache-2.0
"""Click data to try things with: made from a model that is known, so the best result is known too.

An example has one id per field. The fields share all ids among them: some have few (weekday: 7),
most have many. Within a field the id of rank k (0 is the most frequent) comes up with probability
proportional to (k + 1) ** -1.1. Each id has a hidden true weight, a normal number that follows from
a hash of seed, field and rank. An example is a click with probability sigmoid(intercept + scale *
sum of its ids' weights); scale and intercept are set so that the true model has a log-loss of 0.45
and three of ten examples are clicks. No learner can do better than the true model.

The same settings always make the same bytes:
- Every field of every part (training, test, trial) draws from a PCG64 of its own, seeded by
  (seed, part, field); the last one draws the labels. Example i takes the i-th number of each. So
  it does not matter how many examples are made at a time.
- NumPy promises that PCG64's raw numbers stay as they are. What is made of them is whole numbers
  and IEEE products and sums; scale and intercept are rounded to six digits.

Text is made without an object per example. A line is a row of 8-byte words in a grid: in front of
each id a word with what precedes it (blank, name of the field), then a word with its digits, all
padded with NUL. Dropping every NUL leaves the text.

    vw   `-1 |f a3 b51243 ...`   the letters name the field, the number its id, in no order of rank
    svm  `0 4:1 12345:1 ...`     numbers from 1 over all fields, ascending
    csv  `click,a,b,...`, then `0,3,51243,...`
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from commute._errors import SettingError

__all__ = ["FORMATS", "Batch", "ClickFacts", "ClickModel", "SetFacts", "TrueFacts", "make_clicks"]

FORMATS = ("vw", "svm", "csv")
EXPONENT = 1.1
TRUE_LOGLOSS, POSITIVE_RATE = 0.45, 0.3
# What eight digits can write, with room for the ids of vw and csv, which are spread out.
FEATURES_MAX, SPREAD_MAX = 50_000_000, 1 << 26
FIELDS_MAX = 26 + 26 * 26
# Every eighth field is one of these, in turn.
SMALL_SIZES = (7, 24, 5, 100, 1000)
SMALL_EVERY = 8

# Examples at a time: the grid and what it is made of stay in a core's cache.
CHUNK = 4096
TRIAL_EXAMPLES = 1 << 15
_TRAIN, _TEST, _TRIAL, _SALT = range(4)

# Pieces of a field's quantile function, and the ids whose probability is added up one by one.
_PIECES_BITS = 12
_PIECES = 1 << _PIECES_BITS
_HEAD = 1024
_LEVELS_BITS = 12
# Bins of the true probability, for the AUC.
_BINS = 1 << 14

Ranks = NDArray[np.uint32]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Field:
    """One column of the data: `size` ids, which are `first` to `first + size - 1` of all."""

    name: str
    size: int
    first: int
    salt: int
    spread: int  # the ids of vw and csv lie below this power of two; 0: they are the ranks

    def ids(self, ranks: Ranks) -> Ranks:
        """The numbers that vw and csv show. An odd factor keeps different ranks different."""
        if not self.spread:
            return ranks
        scattered = ranks * np.uint32(0x9E3779B1) + np.uint32(self.salt)
        scattered &= np.uint32(self.spread - 1)
        return scattered

    def normals(self, ranks: Ranks, levels: NDArray[np.float32]) -> NDArray[np.float32]:
        """The hidden normal number of each id: the finalizer of MurmurHash3 picks a level."""
        mixed = ranks ^ np.uint32(self.salt)
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(0xC2B2AE35)
        return levels.take(mixed >> np.uint32(32 - _LEVELS_BITS))


@dataclass(frozen=True)
class Batch:
    """Some examples: a row of ranks per field, the true model's margin of each, and its label."""

    ranks: list[Ranks]
    margins: Floats
    clicks: NDArray[np.bool_]


class TrueFacts(msgspec.Struct, frozen=True):
    """What the hidden model itself reaches: the best that a learner can hope for."""

    logloss: float
    auc: float
    intercept: float
    scale: float


class SetFacts(msgspec.Struct, frozen=True):
    """One file."""

    file: str
    examples: int
    bytes: int
    distinct_ids: int
    positive_rate: float
    true_model: TrueFacts


class ClickFacts(msgspec.Struct, frozen=True):
    """All that is known of generated data; beside OUT it is kept as OUT.json."""

    format: str
    seed: int
    fields: int
    features: int
    exponent: float
    train: SetFacts
    test: SetFacts | None

    @property
    def best(self) -> TrueFacts:
        """Of the test set, or where there is none, of the training set."""
        return (self.test or self.train).true_model


class ClickModel:
    """The hidden model behind the data.

    >>> model = ClickModel(features=1000, fields=5, seed=7)
    >>> [field.size for field in model.fields]
    [7, 180, 270, 361, 182]
    >>> batch = next(model.batches("test", examples=3))
    >>> len(batch.ranks), batch.clicks.shape
    (5, (3,))
    """

    def __init__(self, *, features: int = 10_000_000, fields: int = 39, seed: int = 1) -> None:
        _check(features, fields, seed)
        self.features, self.seed = features, seed
        self.fields = _fields(features, fields, seed)
        by_size = {field.size: _quantiles(field.size) for field in self.fields}
        self._quantiles = [by_size[field.size] for field in self.fields]
        normal = statistics.NormalDist()
        steps = 1 << _LEVELS_BITS
        levels = [normal.inv_cdf((i + 0.5) / steps) for i in range(steps)]
        self._levels = np.array(levels, np.float32)
        self.scale, self.intercept = 1.0, 0.0
        trial = next(self._draw(_TRIAL, TRIAL_EXAMPLES, TRIAL_EXAMPLES))
        self.scale, self.intercept = _calibrate(trial.margins)

    def batches(self, part: str, *, examples: int, chunk: int = CHUNK) -> Iterator[Batch]:
        """`examples` fresh ones of the part "train" or "test", `chunk` at a time."""
        return self._draw({"train": _TRAIN, "test": _TEST}[part], examples, chunk)

    def _draw(self, part: int, examples: int, chunk: int) -> Iterator[Batch]:
        places = range(len(self.fields) + 1)
        streams = [np.random.PCG64([self.seed, part, place]) for place in places]
        for start in range(0, examples, chunk):
            yield self._batch(streams, min(chunk, examples - start))

    def _batch(self, streams: list[np.random.PCG64], count: int) -> Batch:
        sums = np.zeros(count, np.float64)
        ranks = []
        for field, (base, slope), stream in zip(
            self.fields, self._quantiles, streams, strict=False
        ):
            # 53 bits as a float64 are exact: its whole part is the piece.
            bits = stream.random_raw(count) >> np.uint64(11)
            at = bits.astype(np.float64)
            at *= 2.0 ** (_PIECES_BITS - 53)
            piece = (bits >> np.uint64(53 - _PIECES_BITS)).astype(np.intp)
            at *= slope.take(piece)
            at += base.take(piece)
            # A product that was rounded up must not lead out of the field.
            np.clip(at, 0, field.size - 1, out=at)
            ranks.append(at.astype(np.uint32))
            sums += field.normals(ranks[-1], self._levels)
        sums *= self.scale
        sums += self.intercept
        chances = (streams[-1].random_raw(count) >> np.uint64(11)).astype(np.float64)
        chances *= 2.0**-53
        return Batch(ranks, sums, chances < _sigmoid(sums))


def make_clicks(
    path: Path,
    *,
    examples: int = 500_000,
    features: int = 10_000_000,
    fields: int = 39,
    seed: int = 1,
    format: str = "vw",
    test: Path | None = None,
    test_examples: int = 50_000,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> ClickFacts:
    """Write training examples to `path`, fresh ones to `test`, and the facts to `path`.json.

    A file appears under its name when it is complete; one that was there is replaced. `progress` is
    told after each chunk how many examples are done, of how many.
    """
    if format not in FORMATS:
        raise SettingError(f"expected one of the formats {', '.join(FORMATS)}, got {format!r}")
    model = ClickModel(features=features, fields=fields, seed=seed)
    parts = [("train", path, examples)] + ([("test", test, test_examples)] if test else [])
    total, done = sum(count for _, _, count in parts), 0
    made = []
    for part, target, count in parts:
        tally = _Tally(model)
        lines = _Lines(model, format, min(chunk, count))
        with _Replacing(target) as file:
            file.write(lines.heading)
            for batch in model.batches(part, examples=count, chunk=chunk):
                tally.add(batch)
                file.write(lines.text(batch))
                done += len(batch.clicks)
                progress(done, total)
            size = file.tell()
        made.append(tally.facts(target.name, size))
    facts = ClickFacts(
        format, seed, fields, features, EXPONENT, made[0], made[1] if len(made) > 1 else None
    )
    with _Replacing(path.with_name(path.name + ".json")) as file:
        file.write(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
    return facts


def _check(features: int, fields: int, seed: int) -> None:
    if not 1 <= fields <= FIELDS_MAX:
        raise SettingError(f"expected 1 to {FIELDS_MAX} fields, got {fields}")
    if not 2 * fields <= features <= FEATURES_MAX:
        raise SettingError(
            f"expected {2 * fields:,} (two for each of {fields} fields) to {FEATURES_MAX:,} "
            f"features, got {features:,}"
        )
    if not 0 <= seed < 1 << 64:
        raise SettingError(f"expected a seed from 0 to 2**64 - 1, got {seed}")


def _fields(features: int, count: int, seed: int) -> list[Field]:
    sizes = _sizes(features, count)
    first, made = 0, []
    for number, size in enumerate(sizes):
        salt = int(np.random.SeedSequence([seed, _SALT, number]).generate_state(1)[0])
        room = min(SPREAD_MAX, 1 << (2 * size - 1).bit_length())
        spread = room if size > max(SMALL_SIZES) else 0
        made.append(Field(_name(number), size, first, salt, spread))
        first += size
    return made


def _sizes(features: int, count: int) -> list[int]:
    """Small fields take what they need, at most their even share; the others divide the rest."""
    even = features // count
    small = {
        place: min(even, SMALL_SIZES[place // SMALL_EVERY % len(SMALL_SIZES)])
        for place in range(0, count if count > 1 else 0, SMALL_EVERY)
    }
    others = [place for place in range(count) if place not in small]
    # Two, three or four parts of the rest, in turn.
    parts = {place: 2 + number % 3 for number, place in enumerate(others)}
    rest, whole = features - sum(small.values()), sum(parts.values())
    sizes = [small.get(place) or rest * parts[place] // whole for place in range(count)]
    sizes[others[-1]] += features - sum(sizes)
    return sizes


def _name(number: int) -> str:
    """a to z, then aa, ab and so on, as a spreadsheet has it."""
    letter = chr(ord("a") + number % 26)
    return letter if number < 26 else _name(number // 26 - 1) + letter


def _quantiles(size: int) -> tuple[Floats, Floats]:
    """The rank as a function of a number from 0 to _PIECES: in each piece, base + slope * number.

    Where probabilities are added up one by one the function is exact at the ends of a piece. For
    the many behind, the sum of k ** -s from a to b is the integral from a - 0.5 to b + 0.5.
    """
    head, power = min(size, _HEAD), 1.0 - EXPONENT
    sums = np.concatenate([[0.0], np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -EXPONENT)])
    begin = (head + 0.5) ** power
    total = sums[-1] + (begin - (size + 0.5) ** power) / -power
    wanted = np.linspace(0.0, total, _PIECES + 1)
    ends = np.interp(wanted, sums, np.arange(head + 1, dtype=np.float64))
    behind = wanted > sums[-1]
    ends[behind] = (begin + power * (wanted[behind] - sums[-1])) ** (1.0 / power) - 0.5
    ends[-1] = size
    # Coarser than what two machines' powers differ by.
    ends = np.round(ends * 2.0**20) * 2.0**-20
    slope = np.diff(ends)
    return ends[:-1] - slope * np.arange(_PIECES), slope


def _sigmoid(margins: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-margins))


def _losses(margins: Floats, clicks: Floats | NDArray[np.bool_]) -> Floats:
    """The log-loss of each margin; `clicks` may also be the chance of a click."""
    expected: Floats = np.logaddexp(0.0, margins) - clicks * margins
    return expected


def _calibrate(sums: Floats) -> tuple[float, float]:
    """The scale and the intercept with which such sums give the wanted log-loss and rate.

    Where the fields are so few that no scale does, the largest that is tried is the answer.
    """
    quantiles = np.quantile(sums, (np.arange(2048) + 0.5) / 2048)
    centre, width = float(quantiles.mean()), float(quantiles.std()) or 1.0
    normed = (quantiles - centre) / width

    def intercept(scale: float) -> float:
        def rate(shift: float) -> float:
            return float(_sigmoid(scale * normed + shift).mean())

        return _bisect(lambda shift: rate(shift) < POSITIVE_RATE, -100.0, 100.0)

    def is_too_weak(scale: float) -> bool:
        margins = scale * normed + intercept(scale)
        return float(_losses(margins, _sigmoid(margins)).mean()) > TRUE_LOGLOSS

    scale = _bisect(is_too_weak, 0.0, 20.0)
    shift = intercept(scale)
    return round(scale / width, 6), round(shift - scale * centre / width, 6)


def _bisect(is_too_low: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return (low + high) / 2


class _Tally:
    """What is counted of a set while it is written."""

    def __init__(self, model: ClickModel) -> None:
        self._model = model
        self._seen = np.zeros(model.features, np.bool_)
        self._loss = 0.0
        # By bin of the true probability: examples without a click, and with one.
        self._bins = np.zeros((2, _BINS), np.int64)

    def add(self, batch: Batch) -> None:
        for field, ranks in zip(self._model.fields, batch.ranks, strict=True):
            self._seen[field.first : field.first + field.size][ranks] = True
        self._loss += float(_losses(batch.margins, batch.clicks).sum())
        bins = (_sigmoid(batch.margins) * _BINS).astype(np.intp)
        np.minimum(bins, _BINS - 1, out=bins)
        both = np.bincount(bins + _BINS * batch.clicks, minlength=2 * _BINS)
        self._bins += both.reshape(2, _BINS)

    def facts(self, file: str, size: int) -> SetFacts:
        examples, clicks = int(self._bins.sum()), int(self._bins[1].sum())
        return SetFacts(
            file=file,
            examples=examples,
            bytes=size,
            distinct_ids=int(np.count_nonzero(self._seen)),
            positive_rate=round(clicks / examples, 6),
            true_model=TrueFacts(
                logloss=round(self._loss / examples, 6),
                auc=round(self._auc(), 6),
                intercept=self._model.intercept,
                scale=self._model.scale,
            ),
        )

    def _auc(self) -> float:
        """How often a click has the higher score; half of the pairs within a bin count."""
        without, clicked = self._bins
        pairs = int(without.sum()) * int(clicked.sum())
        below = np.cumsum(without) - without
        return float((clicked * (below + 0.5 * without)).sum() / pairs) if pairs else 0.5


class _Lines:
    """Makes text of batches: a grid of words that is filled in and stripped of its padding."""

    def __init__(self, model: ClickModel, format: str, most: int) -> None:
        self._fields, self._format = model.fields, format
        names = [field.name for field in model.fields]
        self.heading = f"click,{','.join(names)}\n".encode() if format == "csv" else b""
        before = {
            "vw": [f" {name}" for name in names],
            "svm": [" "] + [":1 "] * (len(names) - 1),
            "csv": [","] * len(names),
        }[format]
        after = ":1\n" if format == "svm" else "\n"
        labels = ("-1 |f", "1 |f") if format == "vw" else ("0", "1")
        self._labels = np.array([_word(label) for label in labels], "<u8")
        # label, (what precedes an id, its digits) of every field, end of line
        row = [0, *(word for text in before for word in (_word(text), 0)), _word(after)]
        self._grid = np.tile(np.array(row, "<u8"), (most, 1))
        self._four, self._last = _digit_words()

    def text(self, batch: Batch) -> bytes:
        grid = self._grid[: len(batch.clicks)]
        grid[:, 0] = self._labels.take(batch.clicks)
        for place, (field, ranks) in enumerate(zip(self._fields, batch.ranks, strict=True)):
            if self._format == "svm":
                numbers, limit = ranks + np.uint32(field.first + 1), field.first + field.size + 1
            else:
                numbers, limit = field.ids(ranks), field.spread or field.size
            grid[:, 2 + 2 * place] = self._digits(numbers, limit)
        return grid.tobytes().translate(None, b"\0")

    def _digits(self, numbers: Ranks, limit: int) -> Words:
        """The digits of each, below `limit`, as a word that begins with NULs."""
        if limit <= 10_000:
            return self._last.take(numbers)
        high = numbers // np.uint32(10_000)
        low = numbers - high * np.uint32(10_000)
        # Behind other digits the last four keep their zeros: the table's second half.
        low += (high > 0) * np.uint32(10_000)
        return self._last.take(low) | self._four.take(high)


def _word(text: str) -> int:
    return int.from_bytes(text.encode().rjust(8, b"\0"), "little")


def _digit_words() -> tuple[Words, Words]:
    """The first four digits of eight; and the last four, without and with leading zeros."""
    bare = [_word(str(i)) for i in range(10_000)]
    full = [_word(f"{i:04}") for i in range(10_000)]
    first = np.array([0, *bare[1:]], "<u8") >> np.uint64(32)
    return first, np.array(bare + full, "<u8")


class _Replacing:
    """A file that takes its name when it is whole: nobody reads half of it after a Ctrl-C."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")

    def __enter__(self) -> BinaryIO:
        try:
            self._file = self._part.open("wb")
        except OSError as error:
            raise SettingError(f"cannot write {self._path}: {error.strerror}") from error
        return self._file

    def __exit__(self, kind: object, *rest: Any) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._part, self._path)
        else:
            self._part.unlink(missing_ok=True)
