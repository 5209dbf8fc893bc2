# SPDX-License-Identifier: Apache-2.0
"""A store after its end: every call says that it was left, closed, or forked, and does nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import commute
from commute import ClosedError, CommuteError, ForkedError

ONE = np.ones(3, "float32")
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "push": lambda store, w: w.push(ONE),
    "push_async": lambda store, w: w.push_async(ONE),
    "push a piece": lambda store, w: w.push(ONE, accumulate=True),
    "pull": lambda store, w: w.pull(),
    "fresh pull": lambda store, w: w.pull(fresh=True),
    "pull_async": lambda store, w: w.pull_async(),
    "push_pull": lambda store, w: w.push_pull(ONE),
    "push_pull_async": lambda store, w: w.push_pull_async(ONE),
    "store.push": lambda store, w: store.push("w", ONE),
    "store.pull": lambda store, w: store.pull("w"),
    "set": lambda store, w: w.set(lr=0.5),
    "norm": lambda store, w: w.norm(),
    "sum": lambda store, w: w.sum(),
    "nonzero": lambda store, w: w.nonzero(),
    "top": lambda store, w: w.top(2),
    "tick": lambda store, w: store.tick(),
    "flush": lambda store, w: store.flush(),
    "dense": lambda store, w: store.dense("new", (2,)),
    "dense again": lambda store, w: store.dense("w", (3,), update=commute.SGD(lr=1.0)),
}


@pytest.fixture
def pair(stores: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """Two ranks' stores and their table, one round old."""
    workers = stores(2)
    tables = workers.tables("w", (3,), update=commute.SGD(lr=1.0))
    tables[1].push(ONE)
    assert tables[0].push_pull(ONE).tolist() == [-2, -2, -2]
    return workers, tables


def told(kind: type[CommuteError], store: Any, w: Any, words: str) -> None:
    for name, call in CALLS.items():
        with pytest.raises(kind) as raised:
            call(store, w)
        assert words in str(raised.value), name


def test_after_leaving(pair):
    """The other worker goes on, and sees nothing of what was tried."""
    workers, (a, b) = pair
    workers[0].leave()
    told(ClosedError, workers[0], a, "this worker has left the store 'main'")
    workers[0].leave()  # again is nothing

    assert b.push_pull(ONE).tolist() == [-3, -3, -3]
    assert a.info().clock == 1 and b.info().update == "SGD(lr=1)"


def test_after_closing(pair):
    workers, (a, b) = pair
    workers.groups[0].close()
    told(ClosedError, workers[0], a, "the store is closed")
    with pytest.raises(ClosedError, match="the group is closed"):
        workers.groups[0].store("new")
    workers[0].leave()
    workers.groups[0].close()

    assert b.push_pull(ONE).tolist() == [-3, -3, -3]
    assert b.info().update == "SGD(lr=1)"


def test_after_closing_a_world_of_one():
    with commute.init() as world:
        store = world.store()
        w = store.dense("w", (3,), update=commute.SGD(lr=1.0))
        handle = w.push_pull_async(ONE)
    told(ClosedError, store, w, "the store is closed")

    assert handle.done() and handle.wait().tolist() == [-1, -1, -1]


def test_after_an_error_inside_the_block(pair):
    """The group of a program that failed is closed, too."""
    workers, (a, _) = pair
    with pytest.raises(ZeroDivisionError), workers.groups[0]:
        raise ZeroDivisionError

    told(ClosedError, workers[0], a, "the store is closed")


def test_handles_under_way_at_the_close(pair):
    """They are done, and say why; waiting for them does not wait."""
    workers, (a, _) = pair
    a.push(ONE)
    handles = [a.pull_async(), a.push_async(ONE), a.push_pull_async(ONE)]
    workers.settle()
    assert not any(handle.done() for handle in handles)
    with pytest.raises(ZeroDivisionError), workers.groups[0]:
        raise ZeroDivisionError  # an ordinary close would wait for the push to be taken

    for handle in handles:
        assert handle.done()
        with pytest.raises(ClosedError, match="the store is closed"):
            handle.wait()
        assert repr(handle).endswith(", done>")


def in_child(work: Callable[[], list[str]]) -> list[str]:
    """What work returns in a forked child; it is ended if it hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            os.write(writing, "\n".join(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        found = lines.read().splitlines()
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0, found
    return found


@pytest.mark.parametrize("where", ["threads", "embedded"])
def test_after_a_fork(request, where):
    """The child is told, the parent does not notice, also with a call under way."""
    if where == "embedded":
        world = commute.init()
        request.addfinalizer(world.close)
        store = world.store()
        w = store.dense("w", (3,), update=commute.SGD(lr=1.0))
        handle = None
    else:
        workers, (w, other) = request.getfixturevalue("pair")
        world, store = workers.groups[0], workers[0]
        w.push(ONE)
        handle = w.pull_async()

    def work() -> list[str]:
        calls = {**CALLS, "leave": lambda store, w: store.leave()}
        calls["open"] = lambda store, w: world.store("new")
        if handle is not None:
            calls["wait"] = lambda store, w: handle.wait()
        lines = []
        for name, call in calls.items():
            try:
                call(store, w)
                lines.append(f"{name} returned")
            except ForkedError as error:
                lines.append("told" if "made before a fork" in str(error) else str(error))
            except BaseException as error:
                lines.append(f"{name} raised {error!r}")
        world.close()  # nothing
        return lines

    lines = in_child(work)

    assert set(lines) == {"told"} and len(lines) >= len(CALLS)
    if handle is None:
        assert w.push_pull(ONE).tolist() == [-1, -1, -1]
    else:
        other.push(ONE)
        assert handle.wait().tolist() == [-4, -4, -4]
        for turn in (3, 4, 5):  # what the child tried has taken nobody's place
            other.push(ONE)
            assert w.push_pull(ONE).tolist() == [-2 * turn] * 3


def test_forks_while_another_thread_calls(pair):
    """Whatever that thread holds at the moment of the fork, the child is told and does not hang."""
    workers, (w, _) = pair
    free = workers[0].dense("free", (50_000,), staleness=None)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            free.pull()

    def work() -> list[str]:
        lines = []
        for name, call in CALLS.items():
            with contextlib.suppress(ForkedError):
                call(workers[0], w)
                lines.append(f"{name} was not told")
        return lines

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        found = [in_child(work) for _ in range(10)]
    finally:
        stop.set()
        thread.join(20)

    assert found == [[]] * 10
