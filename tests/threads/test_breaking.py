# SPDX-License-Identifier: Apache-2.0
"""How a group breaks: mismatched calls, timeouts, closing. Every rank hears of it, with names."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commute import (
    AbandonedError,
    ClosedError,
    CommuteError,
    Group,
    MismatchError,
    OperationTimeoutError,
)

# What rank 1 calls (the others call the first), and what the message says of both.
Call = Callable[[Group], Any]
MISMATCHES: dict[str, tuple[Call, Call, str, str]] = {
    "length": (
        lambda group: group.allreduce(np.ones(10)),
        lambda group: group.allreduce(np.ones(11)),
        "allreduce of 10 float64 by sum",
        "allreduce of 11 float64 by sum",
    ),
    "large length": (
        lambda group: group.allreduce(np.ones(300_000)),
        lambda group: group.allreduce(np.ones(3)),
        "allreduce of 300000 float64 by sum",
        "allreduce of 3 float64 by sum",
    ),
    "length zero": (
        lambda group: group.allreduce(np.ones(0)),
        lambda group: group.allreduce(np.ones(1)),
        "allreduce of 0 float64 by sum",
        "allreduce of 1 float64 by sum",
    ),
    "dtype": (
        lambda group: group.allreduce(np.ones(8, "float32")),
        lambda group: group.allreduce(np.ones(8, "int32")),
        "allreduce of 8 float32 by sum",
        "allreduce of 8 int32 by sum",
    ),
    "operation": (
        lambda group: group.allreduce(np.ones(8)),
        lambda group: group.broadcast(np.ones(8)),
        "allreduce of 8 float64 by sum",
        "broadcast of 8 float64 with root 0",
    ),
    "barrier": (
        lambda group: group.barrier(),
        lambda group: group.allreduce(np.ones(8)),
        "barrier",
        "allreduce of 8 float64 by sum",
    ),
    "op": (
        lambda group: group.allreduce(np.ones(8), op="sum"),
        lambda group: group.allreduce(np.ones(8), op="max"),
        "allreduce of 8 float64 by sum",
        "allreduce of 8 float64 by max",
    ),
    "mean": (
        lambda group: group.allreduce(np.ones(8), op="sum"),
        lambda group: group.allreduce(np.ones(8), op="mean"),
        "allreduce of 8 float64 by sum",
        "allreduce of 8 float64 by mean",
    ),
    "gathered length": (
        lambda group: group.allgather(np.ones(5)),
        lambda group: group.allgather(np.ones(4)),
        "allgather of 5 float64",
        "allgather of 4 float64",
    ),
    "scattered dtype": (
        lambda group: group.reduce_scatter(np.ones((group.size, 5), "uint8")),
        lambda group: group.reduce_scatter(np.ones((group.size, 5), "int8")),
        "reduce_scatter of 5 uint8 by sum",
        "reduce_scatter of 5 int8 by sum",
    ),
    "algorithm": (
        lambda group: group.allreduce(np.ones(8), algorithm="ring"),
        lambda group: group.allreduce(np.ones(8), algorithm="tree"),
        "allreduce of 8 float64 by sum",
        "algorithm= and settings on all ranks",
    ),
}


def in_order(group: Group, calls: str) -> None:
    for letter in calls:
        group.barrier() if letter == "b" else group.allreduce(np.ones(4))


def check_all_broken(ended: list[Any], kind: type[CommuteError]) -> list[str]:
    """All ranks raised this kind; the sentences, of which each rank passes on the first it hears.

    Two ranks may notice at the same moment, each in its own words.
    """
    assert [type(error) for error in ended] == [kind] * len(ended), ended
    return [str(error) for error in ended]


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatched_calls(ranks, what, size):
    """All ranks raise one sentence that says who called what, and go on raising it."""
    mine, theirs, said, other = MISMATCHES[what]
    group_of = ranks(size)

    def work(group: Group) -> None:
        group.allreduce(np.ones(3))
        (theirs if group.rank == 1 else mine)(group)

    texts = check_all_broken(group_of(work), MismatchError)

    for text in texts:
        assert said in text and other in text
        assert "operation 2" in text
        assert re.search(r"rank \d called .*rank \d called", text)
    again = group_of(lambda group: group.barrier())
    assert check_all_broken(again, MismatchError) == texts


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("call", ["broadcast", "reduce"])
def test_different_roots(ranks, call, size):
    """Here a rank may have done its part, and left, before anybody can tell: its next call says so.

    With two ranks both may be through: the message that nobody took gives them away.
    """
    group_of = ranks(size)

    def work(group: Group) -> None:
        getattr(group, call)(np.ones(8), root=int(group.rank == 1))
        for _ in range(3):
            group.allgather(np.ones(3))
            group.barrier()

    for text in check_all_broken(group_of(work), MismatchError):
        assert re.search(rf"operation 1\b.*rank \d called {call} of 8 float64.* root [01]", text)


@pytest.mark.parametrize("orders", [("ab", "ba"), ("aab", "aba"), ("bbab", "bbba")])
def test_calls_in_another_order(ranks, orders):
    group_of = ranks(3)
    ended = group_of(lambda group: in_order(group, orders[group.rank == 2]))

    for text in check_all_broken(ended, MismatchError):
        assert "barrier" in text and "allreduce of 4 float64 by sum" in text
        assert "all ranks must make the same calls in the same order" in text


def test_a_call_too_many_names_the_one_that_is_missing(ranks):
    """One rank left out a call: the next one does not fit."""
    group_of = ranks(2)
    ended = group_of(lambda group: in_order(group, "aaab" if group.rank else "aab"))

    for text in check_all_broken(ended, MismatchError):
        assert "rank 0 called" in text and "rank 1 called" in text


def test_mismatch_in_async_calls(ranks):
    """Everything in flight gets the failure, the operations before it are done."""

    def work(group: Group) -> list[Any]:
        handles, ended = [], []
        try:
            for size in [5, 6, 7 + (group.rank == 1), 8, 9]:
                handles.append(group.allreduce_async(np.ones(size)))
        except MismatchError as error:  # the others were so quick that it is broken already
            ended.append(str(error))
        for handle in reversed(handles):
            try:
                ended.append(handle.wait()[0])
            except MismatchError as error:
                ended.append(str(error))
        return ended

    for ended in ranks(3).values(work):
        # One that is ahead may find out while another is still in the operation before.
        assert ended[-1] == 3.0
        assert ended[-2] == 3.0 or "in operation 3" in ended[-2]
        assert all("allreduce of 7 float64" in text for text in ended[:-2])


@pytest.mark.parametrize("other", [np.ones(5), np.ones(4, "float32"), np.ones(0)])
def test_mismatched_messages(ranks, other):
    """send and recv of another length or dtype break the group on all ranks, bystanders too."""
    group_of = ranks(3)

    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(other, to=1)
        elif group.rank == 1:
            group.recv(np.empty(4), source=0)
        group.barrier()

    for text in check_all_broken(group_of(work), MismatchError):
        assert f"from rank 0 to rank 1 has {other.size} {other.dtype}" in text
        assert "expected 4 float64" in text


def test_call_timeout(ranks):
    """Here OperationTimeoutError with who is missing, elsewhere AbandonedError by whom."""
    group_of = ranks(4)
    broken = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 2:  # the slow one finds the group broken when it comes
            broken.wait(20)
            group.allreduce(np.ones(5))
            return
        try:
            group.allreduce(np.ones(5), timeout=0.5 if group.rank == 0 else 20, algorithm="ring")
        finally:
            broken.set()

    ended = group_of(work)

    assert isinstance(ended[0], OperationTimeoutError) and isinstance(ended[0], TimeoutError)
    assert "allreduce of 5 float64" in str(ended[0]) and "timed out after 0.5 s" in str(ended[0])
    assert "waiting for rank" in str(ended[0])
    for error in ended[1:]:
        assert isinstance(error, AbandonedError)
        assert error.rank == 0
        assert "timed out after 0.5 s on rank 0" in str(error)
    again = group_of(lambda group: group.barrier())
    assert [str(error) for error in again] == [str(error) for error in ended]


def test_the_missing_rank_is_named(ranks):
    """Two ranks: there is only one that can be missing."""
    group_of = ranks(2)
    ended = group_of(
        lambda group: group.allreduce(np.ones(5), timeout=0.2) if group.rank == 0 else None
    )

    assert isinstance(ended[0], OperationTimeoutError)
    assert "waiting for rank 1;" in str(ended[0])


def test_timeout_of_an_async_call_and_of_a_send(ranks):
    """The call's timeout counts also when nobody waits; a send that finds no taker times out."""
    group_of = ranks(2)

    def work(group: Group) -> Any:
        return group.barrier_async(timeout=0.2).wait() if group.rank == 0 else None

    assert isinstance(group_of(work)[0], OperationTimeoutError)
    group_of = ranks(2)

    def send(group: Group) -> Any:
        # More than the link holds, and nobody receives.
        return group.send(np.ones(1 << 20), to=1, timeout=0.2) if group.rank == 0 else None

    ended = group_of(send)
    assert isinstance(ended[0], OperationTimeoutError)
    assert "waiting for rank 1" in str(ended[0])


def test_closed(ranks):
    """After close every call says so; close is idempotent; handles of before say it too."""
    group_of = ranks(2)
    group_of.values(lambda group: group.allreduce(np.ones(4)))
    handle = group_of.groups[0].allreduce_async(np.ones(4))
    for group in group_of.groups:
        group.close()
        group.close()

    with pytest.raises(ClosedError, match="closed while this call waited"):
        handle.wait()
    group = group_of.groups[0]
    for call in (
        lambda: group.allreduce(np.ones(4)),
        lambda: group.barrier(),
        lambda: group.send(np.ones(4), to=1),
        lambda: group.recv(np.ones(4), source=1),
        lambda: group.allgather_async(np.ones(4)),
    ):
        with pytest.raises(ClosedError, match=re.escape("make a new one with commute.init()")):
            call()
    assert "closed" in repr(group)


def test_close_while_others_wait_in_this_process(ranks):
    """Another thread of the rank waits in a call: it gets ClosedError, close returns."""
    group = ranks(2).groups[0]
    begun, ended = threading.Event(), []

    def wait() -> None:
        begun.set()
        try:
            group.barrier()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait(10)
    group.close()
    thread.join(10)

    assert not thread.is_alive()
    assert [type(error) for error in ended] == [ClosedError]


def test_the_recorder_is_dumped_once_per_break(ranks, tmp_path):
    """The error's note names a file with the last operations, oldest first, the broken one last."""
    group_of = ranks(2, records=str(tmp_path / "records"))

    def work(group: Group) -> None:
        group.allreduce(np.ones(3), algorithm="tree")
        group.send(np.ones(2), to=1) if group.rank == 0 else group.recv(np.ones(2), source=0)
        group.allreduce(np.ones(3 + group.rank, "int16"), op="max")

    for rank, error in enumerate(group_of(work)):
        (note,) = error.__notes__
        prefix = f"the last operations of rank {rank}: "
        path = Path(note.removeprefix(prefix))
        rows = [json.loads(line) for line in path.read_text().splitlines()]

        assert note.startswith(prefix) and path.parent == tmp_path / "records"
        assert path.stat().st_mode & 0o077 == 0
        operations = [row["operation"] for row in rows]
        assert operations == ["allreduce", "recv" if rank else "send", "allreduce"]
        assert [row["state"] for row in rows] == ["done", "done", "failed"]
        assert rows[0]["algorithm"] == "tree" and rows[2]["op"] == "max"
        assert rows[2]["dtype"] == "int16" and rows[2]["count"] == 3 + rank
        assert [row["sequence"] for row in (rows[0], rows[2])] == [1, 2]
        assert rows[0]["begun_ns"] <= rows[0]["ended_ns"] <= rows[2]["ended_ns"]


def test_the_recorder_keeps_the_last_4096(ranks):
    group_of = ranks(2)

    def work(group: Group) -> list[dict[str, Any]]:
        for _ in range(4100):
            group.barrier()
        return group.records()

    for rows in group_of.values(work):
        assert len(rows) == 4096
        assert [rows[0]["number"], rows[-1]["number"]] == [5, 4100]
