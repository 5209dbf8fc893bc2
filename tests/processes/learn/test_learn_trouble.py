# SPDX-License-Identifier: Apache-2.0
"""`commute learn` interrupted, robbed of a process, given what cannot be, or on a full disk."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commute import CommuteError
from commute.cli import main
from commute.learn import Model, fit
from learning import predicted
from serving import COMMUTE, eventually

pytestmark = pytest.mark.timeout(120)

FOREVER = ["--epochs", "1000000"]


# ---- ending early ----


def name_of(pid: int) -> str:
    """As `ps` shows it; empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def unread(fd: int) -> int:
    """Bytes that wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


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

    def pids(self, name: str) -> list[int]:
        """The processes of this run that have a name."""
        return sorted(pid for pid in self.job.pids() if name_of(pid) == name)

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
    """Here workers wait for a server that does not answer; nothing is saved then."""
    model = tmp_path / "model"
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2, "--save", model)
    [server] = run.pids("commute-server")
    os.kill(server, signal.SIGSTOP)
    run.job.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more kills them" in run.output(), "the launcher has not heard it")
    run.job.process.send_signal(signal.SIGINT)
    eventually(lambda: not run.pids("commute-worker"), "workers are left")
    os.kill(server, signal.SIGCONT)
    ended = run.ended()

    assert (ended.code, ended.out) == (130, "")
    assert not (model / "model.json").exists()


def test_terminated(job, data, tmp_path):
    """By SIGTERM, as a batch system does it: at once, and nothing is left."""
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2)
    run.job.process.terminate()
    ended = run.ended()

    assert (ended.code, ended.out) == (143, "")


def test_a_launcher_that_dies(job, data, tmp_path):
    """One sentence, and nothing is left."""
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2)
    os.kill(run.pids("commute-job")[0], signal.SIGKILL)
    ended = run.ended()

    assert ended.code == 1 and ended.err.count("\n") == 1
    assert "ended without a result, or what has started them was killed" in ended.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_ended_before_there_is_a_plan(job, tmp_path, number, code):
    """While the first lines are waited for, the job waits too; it ends with the command.

    The command has read the beginning of a line: it waits for the rest, and imports nothing. Python
    dies by SIGINT instead of exiting, whoever catches it, when it comes in code made from a string,
    as the making of a dataclass is.
    """
    fifo = tmp_path / "lines"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)
    os.write(held, b"1 |f a")
    learn = ["sh", "-c", 'exec "$@" < "$0"', str(fifo), *COMMUTE, "learn", "-", "--format", "vw"]
    run = job(learn, timeout=60.0)
    eventually(lambda: unread(held) == 0, "nothing is read")
    eventually(lambda: "commute-job" in map(name_of, run.pids()), "no job")
    run.process.send_signal(number)
    ended = run.wait()
    os.close(held)

    assert (ended.code, ended.err) == (code, "")
    eventually(lambda: not run.pids(), "processes are left")


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
    victim = run.pids("commute-worker")[-1]
    os.kill(victim, signal.SIGKILL)
    ended = run.ended()

    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert f"pid {victim}" in ended.err and ended.err.startswith("commute learn: ")


def test_a_server_that_dies(job, data, tmp_path):
    """The weights are gone with it: one message."""
    run = Training(job, tmp_path, data / "train.vw", "--workers", 2, "--servers", 2)
    os.kill(run.pids("commute-server")[-1], signal.SIGKILL)
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
