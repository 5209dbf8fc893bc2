# SPDX-License-Identifier: Apache-2.0
"""Workers that leave, are lost, or keep others waiting: who goes on, who is told, and what."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import numpy as np
import pytest

import commute
from commute import ClosedError, CommuteError, OperationTimeoutError, PeerLostError
from commute.store import links

ONE = np.ones(3, "int64")
SHORT = 0.05  # seconds, where waiting in vain is the point


# ---- leave ----


def test_leaving_ends_the_wait_for_me(stores):
    """A pull and a push that wait for the one who leaves go on, and so do all later rounds."""
    workers = stores(2)
    a, _ = workers.tables("w", (3,), "int64")
    pushes = [a.push_async(ONE) for _ in range(3)]
    pull = a.pull_async()
    workers.settle()
    assert [push.done() for push in pushes] == [True, False, False] and not pull.done()
    workers[1].leave()

    assert pull.wait().tolist() == [3, 3, 3]
    assert a.push_pull(ONE).tolist() == [4, 4, 4]


def test_what_was_pushed_before_leaving_counts(stores):
    """In the open round too, with the mean over those that pushed in each."""
    workers = stores(3)
    a, b, c = workers.tables("w", (2,), "float64", reduce="mean")
    c.push(np.full(2, 6.0))
    workers[2].leave()
    a.push(np.full(2, 1.0))
    b.push(np.full(2, 2.0))
    first = a.pull().tolist()
    a.push(np.full(2, 1.0))
    b.push(np.full(2, 2.0))

    assert first == [3.0, 3.0]
    assert b.pull().tolist() == [4.5, 4.5]


def test_pieces_that_nobody_completes_do_not_count(stores):
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    b.push(ONE * 100, accumulate=True)
    workers[1].leave()

    assert a.push_pull(ONE).tolist() == [1, 1, 1]


def test_leaving_from_far_behind_and_far_ahead(stores):
    """The bound follows those who are still there."""
    workers = stores(3, staleness=1)
    a, b, c = workers.tables("w", (3,), "int64")
    for _ in range(2):
        a.push(ONE)
        b.push(ONE)
    pull = a.pull_async(fresh=True)
    workers.settle()
    assert not pull.done()
    workers[2].leave()  # at clock 0
    assert pull.wait().tolist() == [4, 4, 4]
    b.push(ONE)
    b.push(ONE)
    workers[1].leave()  # at clock 4, with a at 2
    for _ in range(5):
        a.push(ONE, timeout=20)

    assert a.pull(fresh=True).tolist() == [11, 11, 11]
    assert c.info().clock == 0


def test_the_block_of_a_store_leaves(stores):
    """At its end; an error inside is no leaving."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    with pytest.raises(ZeroDivisionError), workers[1]:
        raise ZeroDivisionError
    a.push(ONE)
    pull = a.pull_async()
    workers.settle()
    assert not pull.done()
    with workers[1] as same:
        assert same is workers[1]
    workers[1].leave()  # again

    assert pull.wait().tolist() == [1, 1, 1]
    with pytest.raises(ClosedError, match="has left the store 'main'"):
        b.push(ONE)


def test_leaving_one_store_is_not_leaving_another(stores):
    workers = stores(2)
    others = [group.store("other") for group in workers.groups]
    workers.tables("w", (3,), "int64")
    a, b = (store.dense("w", (3,), "int64") for store in others)
    workers[1].leave()
    a.push(ONE)
    pull = a.pull_async()
    workers.settle()
    assert not pull.done()
    b.push(ONE)

    assert pull.wait().tolist() == [2, 2, 2]


def test_leaving_before_a_table_is_declared(stores):
    """Who has left the store is waited for in none of its tables, also in those it never saw."""
    workers = stores(2)
    old = workers[0].dense("old", (3,), "int64")
    workers[1].leave()
    new = workers[0].dense("new", (3,), "int64")

    assert old.push_pull(ONE, timeout=2).tolist() == [1, 1, 1]
    assert new.push_pull(ONE, timeout=2).tolist() == [1, 1, 1]


def test_closing_the_group_leaves_its_stores(stores):
    """Also a rank that has never declared the table; nobody is told of a loss."""
    workers = stores(3)
    a, _ = (workers[rank].dense("w", (3,), "int64") for rank in (0, 1))
    a.push(ONE)
    pull = a.pull_async()
    workers.groups[1].close()
    workers.settle()
    assert not pull.done()
    workers.groups[2].close()

    assert pull.wait().tolist() == [1, 1, 1]
    assert a.push_pull(ONE).tolist() == [2, 2, 2]


def test_a_rank_that_comes_late_finds_the_others_gone(ranks):
    """The servers stay until all ranks have come: what was pushed before is there."""
    first, second = ranks(2, timeout=5.0).groups
    with first:
        first.store().dense("w", (3,), "int64").push(ONE)
    w = second.store().dense("w", (3,), "int64")

    assert w.push_pull(ONE).tolist() == [2, 2, 2]


# ---- loss ----


def test_a_loss_at_0_is_told_to_all(stores):
    """By default: to who waits, and to who comes later; free tables of the store go on."""
    workers = stores(3)
    tables = workers.tables("w", (3,), "int64")
    free = workers.tables("free", (3,), "int64", staleness=None)
    for w in tables:
        w.push(ONE)
    before = tables[0].pull()
    tables[0].push(ONE)
    pull = tables[0].pull_async()
    ahead = tables[0].push_async(ONE)
    workers.settle()
    assert not pull.done() and not ahead.done()
    workers.lose(2)
    for handle in (pull, ahead):
        with pytest.raises(PeerLostError, match="'w': rank 2 was lost") as lost:
            handle.wait()
        assert lost.value.rank == 2 and handle.done()
    for call in (tables[1].pull, lambda: tables[1].push_pull(ONE), tables[1].norm):
        with pytest.raises(PeerLostError, match=r"'w'.*rank 2 was lost"):
            call()

    assert before.tolist() == [3, 3, 3]
    assert free[0].push_pull(ONE).tolist() == [1, 1, 1] == free[1].pull().tolist()


@pytest.mark.parametrize("call", ["push", "tick", "flush"])
def test_a_push_that_nobody_waited_for_is_not_lost_in_silence(stores, call):
    """The next call that could tell tells."""
    workers = stores(2)
    a, _ = workers.tables("w", (3,), "int64")
    workers.lose(1)
    a.push(ONE)
    workers.settle()
    calls = {"push": lambda: a.push(ONE), "tick": workers[0].tick, "flush": workers[0].flush}

    with pytest.raises(PeerLostError, match="an earlier push to 'w': rank 1 was lost"):
        calls[call]()


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_going_on_without_the_lost(stores, staleness):
    """With "continue": what arrived whole stays, later rounds do not wait."""
    workers = stores(3, staleness=staleness, on_loss="continue")
    a, b, c = workers.tables("w", (3,), "int64")
    c.push(ONE * 100)
    c.push_async(ONE * 10_000, accumulate=True)  # never completed
    workers[2].flush() if staleness != 0 else workers.settle()
    a.push(ONE)
    pull = a.pull_async(fresh=True)
    workers.lose(2)
    b.push(ONE)
    a_saw = pull.wait().tolist()
    b_saw = b.pull(fresh=True).tolist()

    assert b_saw == [102, 102, 102]
    assert a_saw == b_saw if staleness == 0 else a_saw in ([101] * 3, [102] * 3)
    for turn in range(1, 4):
        pushes = [w.push_async(ONE) for w in (a, b)]
        for push in pushes:
            push.wait()
        assert a.pull(fresh=True).tolist() == [102 + 2 * turn] * 3


@pytest.mark.parametrize("staleness, on_loss, goes_on", [
    (0, None, False), (1, None, True), (None, None, True),
    (0, "continue", True), (1, "raise", False), (None, "raise", False),
])  # fmt: skip
def test_what_a_loss_does_by_default(stores, staleness, on_loss, goes_on):
    """At 0 it raises, otherwise it goes on; on_loss= says otherwise, for all tables."""
    workers = stores(2, staleness=staleness, on_loss=on_loss)
    a, _ = workers.tables("w", (3,), "int64")
    workers.lose(1)
    if goes_on:
        for turn in range(1, 5):
            assert a.push_pull(ONE).tolist() == [turn] * 3
    else:
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            a.push_pull(ONE)


def test_a_loss_before_it_has_declared(stores):
    """The table waits for a rank that never comes; its loss ends that."""
    workers = stores(2)
    a = workers[0].dense("w", (3,), "int64")
    a.push(ONE)
    pull = a.pull_async()
    workers.settle()
    assert not pull.done()
    workers.lose(1)
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        pull.wait()
    late = workers[0].dense("declared after it", (3,), "int64")

    with pytest.raises(PeerLostError, match=r"'declared after it'.*rank 1 was lost"):
        late.push_pull(ONE)


def test_who_has_left_is_not_lost_any_more(stores):
    """An error after `leave` harms nobody in this store."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    b.push(ONE)
    workers[1].leave()
    workers.lose(1)

    assert a.push_pull(ONE).tolist() == [2, 2, 2]
    assert a.push_pull(ONE).tolist() == [3, 3, 3]


def test_leaving_after_a_loss(stores):
    """Survivors leave and close without waiting."""
    workers = stores(3)
    workers.tables("w", (3,), "int64")
    workers.lose(2)
    workers[0].leave(timeout=5)

    assert workers.groups[0].close() is None


# ---- who holds it up ----


class Lines(logging.Handler):
    """The log's lines; `first` is set by the first one that has the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.first = threading.Event()
        self.line = ""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if self.text in line and not self.first.is_set():
            self.line = line
            self.first.set()


def line_of(call: Any, text: str, then: Any) -> str:
    """The line that a waiting call logs; afterwards `then` ends its wait."""
    lines = Lines(text)
    log = logging.getLogger("commute")
    log.addHandler(lines)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        assert lines.first.wait(20)
    finally:
        log.removeHandler(lines)
        then()
        thread.join(20)

    assert not thread.is_alive()
    return lines.line


def test_who_holds_up_a_round_is_named(stores, monkeypatch):
    """After 10 seconds, by rank and what it has not done."""
    assert links.SLOW_SECONDS == 10.0
    monkeypatch.setattr(links, "SLOW_SECONDS", SHORT)
    workers = stores(3)
    a, b, c = workers.tables("w", (3,), "int64")
    for w in (a, b, c):
        w.push(ONE)
    a.push(ONE)
    c.push(ONE)
    line = line_of(a.pull, "has waited", lambda: b.push(ONE))

    assert re.fullmatch(
        r"rank 0: pull of 'w' has waited \d+ s; rank 1 has not pushed or ticked it"
        r" \(clock 1, mine is 2\)",
        line,
    )


def test_who_has_not_declared_is_named(stores, monkeypatch):
    monkeypatch.setattr(links, "SLOW_SECONDS", SHORT)
    workers = stores(2)
    a = workers[0].dense("w", (3,), "int64")
    line = line_of(
        lambda: a.push_pull(ONE),
        "has waited",
        lambda: workers[1].dense("w", (3,), "int64").push(ONE),
    )

    assert line.startswith("rank 0: push_pull of 'w' has waited")
    assert line.endswith("; rank 1 has not declared it (clock 0, mine is 1)")


def test_whom_a_push_waits_for_is_named(stores, monkeypatch):
    monkeypatch.setattr(links, "SLOW_SECONDS", SHORT)
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    line = line_of(lambda: a.push(ONE), "push to 'w'", lambda: b.push(ONE))

    assert "; rank 1 has not pushed or ticked it (clock 0, mine is 1)" in line


# ---- timeouts ----


def test_a_timeout_names_who_is_missing(stores):
    """And is a TimeoutError; nothing is broken, the value comes when it is there."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    message = (
        "pull of 'w' has not finished after 0.05 s on rank 0;"
        " rank 1 has not pushed or ticked it (clock 0, mine is 1)"
    )
    with pytest.raises(OperationTimeoutError, match=re.escape(message)) as raised:
        a.pull(timeout=SHORT)
    b.push(ONE)

    assert isinstance(raised.value, TimeoutError) and isinstance(raised.value, CommuteError)
    assert a.pull().tolist() == [2, 2, 2]


def test_the_call_goes_on_after_a_timeout(stores):
    """A pull still writes into its array; a push_pull has been contributed, once."""
    workers = stores(2)
    a, b = workers.tables("w", (60_000,), "int64")
    one = np.ones(60_000, "int64")
    out, other = np.zeros(60_000, "int64"), np.zeros(60_000, "int64")
    with pytest.raises(OperationTimeoutError, match="push_pull of 'w'"):
        a.push_pull(one, out=out, timeout=SHORT)
    with pytest.raises(OperationTimeoutError, match="pull of 'w'"):
        a.pull(out=other, timeout=SHORT)
    b.push(one)
    workers.settle()

    assert np.unique(out).tolist() == np.unique(other).tolist() == [2]
    assert a.push_async(one).wait() is None
    assert np.unique(b.push_pull(one)).tolist() == [4]


def test_a_handle_can_be_waited_for_again(stores):
    """Its own timeout says only how long to wait this time; the arrays stay the operation's."""
    workers = stores(2)
    a, b = workers.tables("w", (40_000,), "float64")
    a.push(np.ones(40_000))
    push = a.push_async(np.full(40_000, 2.0))  # of round 2: it must wait, and keeps the array
    exchange = a.push_pull_async(np.full(40_000, 4.0))
    for handle in (push, exchange, push, exchange):
        with pytest.raises(OperationTimeoutError):
            handle.wait(timeout=SHORT)
        assert not handle.done()
    junk = [np.full(40_000, 99.0) for _ in range(8)]  # would take the memory if it were free
    for _ in range(3):
        b.push(np.ones(40_000))
    push.wait()

    assert np.unique(exchange.wait()).tolist() == [10.0] and len(junk) == 8


def test_the_timeout_of_a_store(ranks):
    """Holds for all its calls that do not say otherwise; by default it is the group's."""
    groups = ranks(2, timeout=30.0).groups
    store = groups[0].store(timeout=SHORT)
    groups[1].store()
    w = store.dense("w", (3,), "int64")
    with pytest.raises(OperationTimeoutError, match=r"after 0.05 s"):
        w.push_pull(ONE)

    assert store.timeout == SHORT and groups[0].store("other").timeout == 30.0


def test_flush_waits_for_commits_only(stores):
    """Never for other workers (D7), also where the push came with a pull."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    workers[0].flush(timeout=20)
    b.push(ONE)
    exchange = a.push_pull_async(ONE)
    workers[0].flush(timeout=2)
    assert not exchange.done()
    b.push(ONE)

    assert exchange.wait().tolist() == [4, 4, 4]


def test_flush_times_out_while_a_push_may_not_come(stores):
    """A push too far ahead is not committed; flush says so and can be called again."""
    workers = stores(2)
    a, b = workers.tables("w", (3,), "int64")
    a.push(ONE)
    ahead = a.push_async(ONE)
    with pytest.raises(OperationTimeoutError, match=r"flush has not finished after 0.05 s"):
        workers[0].flush(timeout=SHORT)
    b.push(ONE)
    workers[0].flush(timeout=20)

    assert ahead.done()


def test_a_waiting_thread_is_told_of_the_close(stores):
    """It raises ClosedError at once; the handle of a call under way is done, and says the same."""
    workers = stores(2)
    a, _ = workers.tables("w", (3,), "int64")
    a.push(ONE)
    handle = a.pull_async()
    raised: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(commute.ClosedError) as caught:
            a.pull()
        raised.append(caught.value)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    workers.settle()
    workers.groups[0].close()
    thread.join(20)

    assert len(raised) == 1 and not thread.is_alive()
    assert handle.done()
    with pytest.raises(ClosedError, match="the store is closed"):
        handle.wait()
