# SPDX-License-Identifier: Apache-2.0
"""The error tree: what messages say, and that errors survive a trip to another process."""

import copy
import pickle

import pytest

from commute import _errors
from commute._errors import (
    AbandonedError,
    CommuteError,
    JoinError,
    OperationTimeoutError,
    PeerLostError,
)

SAMPLES = [
    JoinError("cannot join", roster="waiting for rank 1"),
    PeerLostError(rank=2, host="hosta", pid=7, last_operation="allreduce 41", cause="it died"),
    AbandonedError(rank=3, operation="allreduce 41", cause="timeout"),
    OperationTimeoutError("too late"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_copies_keep_message_and_attributes(error: CommuteError) -> None:
    """A pool of processes hands exceptions on by pickling them."""
    copies = [pickle.loads(pickle.dumps(error)), copy.copy(error)]

    for other in copies:
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert other.__dict__ == error.__dict__


def test_peer_lost_composes_its_message() -> None:
    """Who, where, when and why, as far as it is known."""
    assert str(SAMPLES[1]) == ("rank 2 (pid 7, host hosta) was lost during allreduce 41: it died")
    assert str(PeerLostError(rank=2)) == "rank 2 was lost"
    assert str(PeerLostError("my words", rank=2)) == "my words"


def test_abandoned_composes_its_message() -> None:
    """Who gave up what, and why."""
    assert str(SAMPLES[2]) == "rank 3 gave up allreduce 41: timeout"
    assert str(AbandonedError(rank=3)) == "rank 3 gave up an operation"


def test_one_tree() -> None:
    """Everything can be caught as CommuteError; a timeout also as TimeoutError."""
    classes = [getattr(_errors, name) for name in _errors.__all__]

    assert all(issubclass(kind, CommuteError) for kind in classes)
    assert issubclass(OperationTimeoutError, TimeoutError)
