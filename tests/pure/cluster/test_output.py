# SPDX-License-Identifier: Apache-2.0
"""What the ranks print becomes lines with a prefix; which rank failed first is told."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commute.cluster.control import Frame, Kind, Leave
from commute.cluster.failures import Failures, excerpt
from commute.cluster.nodes import failure_report
from commute.cluster.output import LineCutter, prefix, wants_colour


def cut(*parts: bytes, limit: int = 100) -> bytes:
    cutter = LineCutter(b"[2] ", line_bytes_max=limit)
    return b"".join(cutter.feed(part) for part in parts) + cutter.rest()


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([b"one\ntwo\n"], b"[2] one\n[2] two\n"),
        ([b"o", b"ne\nt", b"wo\n"], b"[2] one\n[2] two\n"),
        ([b"no end"], b"[2] no end\n"),
        ([b"\n\n"], b"[2] \n[2] \n"),
        ([b""], b""),
        ([b"windows\r\n"], b"[2] windows\n"),
        ([b"\r10%\r50%\r100%\n"], b"[2] 100%\n"),
        ([b"\xff\x00\xfe\n"], b"[2] \xff\x00\xfe\n"),
    ],
)
def test_lines(parts, shown):
    assert cut(*parts) == shown


def test_a_very_long_line_is_cut():
    assert (
        cut(b"x" * 250)
        == b"[2] " + b"x" * 100 + b"\n[2] " + b"x" * 100 + b"\n[2] " + b"x" * 50 + b"\n"
    )


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_where_the_bytes_are_cut_does_not_matter(parts):
    whole = b"".join(parts)

    assert cut(*parts, limit=10_000) == cut(whole, limit=10_000)


def test_prefixes():
    assert prefix(2, coloured=False) == b"[2] "
    assert prefix(2, coloured=True) == b"\x1b[35m[2]\x1b[0m "
    assert not wants_colour(0, {"NO_COLOR": "1"})


TRACEBACK = b"Traceback (most recent call last):\n  File x\n"
CAUSE = b"\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        (b"", b""),
        (b"log\n" + TRACEBACK + b"ValueError: a\n", TRACEBACK + b"ValueError: a"),
        (
            b"log\n" + TRACEBACK + b"KeyError: a\n" + CAUSE + TRACEBACK + b"ValueError: b\n",
            TRACEBACK + b"KeyError: a\n" + CAUSE + TRACEBACK + b"ValueError: b",
        ),
        (TRACEBACK + b"KeyError: handled\nlog\n" + TRACEBACK + b"B\n", TRACEBACK + b"B"),
        (b"".join(b"%d\n" % i for i in range(100)), b"\n".join(b"%d" % i for i in range(60, 100))),
    ],
)
def test_excerpt(tail, shown):
    """The last traceback with its chain, or else the last lines."""
    assert excerpt(tail) == shown


def no_tail(rank: int) -> bytes:
    return b""


def test_no_failure():
    assert Failures("hosta").first(no_tail) is None


def test_the_first_exit_counts():
    failures = Failures("hosta")
    failures.add_own(3, 300, 4)
    failures.add_own(1, 100, 1)
    first = failures.first(lambda rank: TRACEBACK + b"Error: %d" % rank)

    assert first is not None
    assert (first.rank, first.code) == (3, 4)
    assert first.text().startswith(
        "commute: rank 3 failed first (exit code 4, on host hosta, pid 300):\n"
    )
    assert first.text().endswith("Error: 3")


def test_the_coordinators_word_counts_more():
    """Rank 1 was lost, rank 3 failed because of it and was faster to exit."""
    failures = Failures("hosta")
    failures.add_own(3, 300, 1)
    failures.add_told(Frame(Kind.LOST, rank=1, text="closed"))
    failures.add_told(Frame(Kind.LOST, rank=3, text="closed"))
    failures.add_own(1, 100, -signal.SIGSEGV)
    first = failures.first(no_tail)

    assert first is not None
    assert (first.rank, first.code) == (1, 139)
    assert "killed by SIGSEGV" in first.text()
    assert "wrote nothing to stderr" in first.text()


def test_a_rank_that_fell_silent():
    """It never exited by itself: its loss is told, the code is that of the first who did."""
    failures = Failures("hosta")
    failures.add_told(Frame(Kind.LOST, rank=1, text="it was silent for 5.2 s"))
    failures.add_own(0, 100, 1)
    first = failures.first(no_tail)

    assert first is not None
    assert (first.rank, first.code) == (0, 1)
    assert first.text().startswith("commute: rank 1 was lost before: it was silent for 5.2 s\n")


def test_a_rank_that_failed_and_was_slow_to_exit():
    failures = Failures("hosta")
    failures.add_told(Frame(Kind.LEAVE, Leave.FAILED, rank=1, by=1, text="ValueError: a"))
    failures.add_own(0, 100, 1)
    first = failures.first(lambda rank: TRACEBACK + b"ValueError: a" if rank == 1 else b"")

    assert first is not None
    assert (first.rank, first.details) == (1, TRACEBACK + b"ValueError: a")


def test_another_nodes_failure():
    failures = Failures("hosta")
    failures.add_told(
        failure_report(5, 3, "exit code 3, on host hostb, pid 7\nTraceback\nError: x")
    )
    first = failures.first(no_tail)

    assert first is not None
    assert first.code == 3
    assert first.text() == (
        "commute: rank 5 failed first (exit code 3, on host hostb, pid 7):\nTraceback\nError: x"
    )


def test_another_nodes_failure_is_never_a_success():
    failures = Failures("hosta")
    failures.add_told(failure_report(5, 0, "odd"))
    first = failures.first(no_tail)

    assert first is not None
    assert first.code == 1
