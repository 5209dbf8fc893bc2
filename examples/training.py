# SPDX-License-Identifier: Apache-2.0
"""What the two nets share: their options, their data, and the line that tells how it goes."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from commute.store.store import Store

LINES_IN_A_LOG = 10
LIVE_SECONDS = 0.1


def options(text: str, *, lr: float, steps: int) -> argparse.Namespace:
    """The command line; `text` is shown by --help."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--staleness",
        type=staleness_of,
        default=0,
        metavar="0|N|none",
        help="how many steps a worker may be ahead of the slowest (default 0); none: never wait",
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"default {steps}")
    parser.add_argument(
        "--batch", type=int, default=128, help="images per step, of all workers together (128)"
    )
    parser.add_argument("--lr", type=float, default=lr, help=f"the learning rate (default {lr})")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="with IDX files as MNIST's, train-images-idx3-ubyte[.gz] and so on; by default"
        " scikit-learn's digits (1,797 images of 8x8)",
    )
    parser.add_argument(
        "--losses", type=Path, metavar="FILE.json", help="write the loss of every step there"
    )
    return parser.parse_args()


def staleness_of(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0, a whole number or none, got {text!r}")
    return int(text)


# ---- data ----


class Images(NamedTuple):
    """Pixels from 0 to 1, (count, side, side), and labels from 0 to 9."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]


def images(folder: Path | None) -> Images:
    """The digits, or what the IDX files of a folder hold."""
    if folder is None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            sys.exit("the digits come with scikit-learn: pip install scikit-learn, or use --data")
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x = (digits.images[order] / 16).astype(np.float32)
        y = digits.target[order].astype(np.int64)
        return Images(x[:1500], y[:1500], x[1500:], y[1500:])
    train, test = (_labelled(folder, start) for start in ("train", "t[!r]"))
    return Images(*train, *test)


def _labelled(folder: Path, start: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    pixels, labels = (
        _idx(folder, f"{start}*-{kind}-ubyte*") for kind in ("images-idx3", "labels-idx1")
    )
    return (pixels / 255).astype(np.float32), labels.astype(np.int64)


def _idx(folder: Path, pattern: str) -> NDArray[np.uint8]:
    """IDX: two zero bytes, the type (8: uint8), the number of axes, their lengths, the elements."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        sys.exit(f"no file {pattern} in {folder}")
    data = paths[0].read_bytes()
    data = gzip.decompress(data) if paths[0].suffix == ".gz" else data
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        sys.exit(f"{paths[0]} is no IDX file of bytes")
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


# ---- how it goes ----


class Progress:
    """Loss, accuracy, bytes and time per step: one line that lives, or some lines in a log.

    The store adds up the loss, the hits and the number of images of all workers; what came in since
    the last look is what is shown. At staleness 0 that is exactly one joined batch.
    """

    def __init__(self, store: Store, given: argparse.Namespace, *, shown: bool) -> None:
        self._store = store
        self._steps = given.steps
        self._file = given.losses
        self._losses: list[float] = []
        self._accuracy = 0.0
        self._totals = np.zeros(3)
        self._shown = shown
        self._terminal = _terminal() if shown else None
        self._begun = self._looked = time.perf_counter()

    def step(self, totals: NDArray[np.float64]) -> None:
        """A step is over; the sums of loss, hits and images are now these."""
        loss, hits, count = totals - self._totals
        self._totals = totals.copy()
        if count:  # a pull that was answered from what this worker held brings nothing new
            self._losses.append(float(loss / count))
            self._accuracy = float(hits / count)
        else:
            self._losses.append(self._losses[-1] if self._losses else float("nan"))
        if not self._shown:
            return
        steps, now = len(self._losses), time.perf_counter()
        every = max(1, self._steps // LINES_IN_A_LOG)
        if self._terminal is None and (steps % every == 0 or steps == self._steps):
            print(self._line(now), flush=True)
        elif self._terminal is not None and now - self._looked > LIVE_SECONDS:
            self._looked = now
            os.write(self._terminal, f"\r\x1b[K{self._line(now)}".encode())

    def end(self, test_accuracy: float) -> None:
        """The last line, and the file of losses."""
        if self._terminal is not None:
            os.write(self._terminal, f"\r\x1b[K{self._line(time.perf_counter())}\n".encode())
        if self._shown:
            print(f"accuracy on images never seen: {test_accuracy:.1%}", flush=True)
        if self._shown and self._file:
            self._file.write_text(json.dumps(self._losses))

    def _line(self, now: float) -> str:
        steps = len(self._losses)
        # Both ways; a pull that was answered from what this worker held moved nothing.
        infos = [table.info() for table in self._store.tables()]
        moved = sum(info.bytes * (2 * info.clock - info.cache_hits) for info in infos) / steps
        seconds = (now - self._begun) / steps
        return (
            f"step {steps:4}/{self._steps}  loss {self._losses[-1]:.4f}"
            f"  accuracy {self._accuracy:6.1%}"
            f"  {moved / 1e3:.1f} KB/step  {seconds * 1e3:.2f} ms/step"
        )


def _terminal() -> int | None:
    """The terminal that somebody watches this on, if there is one.

    Under commute run our output is a pipe, of which the launcher shows whole lines; what the
    launcher itself writes to tells.
    """
    if os.environ.get("TERM") == "dumb":
        return None
    if sys.stdout.isatty():
        return 1
    if "COMMUTE_RANK" not in os.environ:
        return None
    try:
        fd = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    if not os.isatty(fd):
        os.close(fd)
        return None
    os.set_blocking(fd, True)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` would stop us
    return fd
