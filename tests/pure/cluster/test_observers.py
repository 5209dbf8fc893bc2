# SPDX-License-Identifier: Apache-2.0
"""Who observes a server, told as stories: who comes, who goes, who hears of it."""

import stat
from pathlib import Path

import msgspec
import pytest

import commute
from commute._errors import AuthenticationError
from commute.cluster.auth import make_token_file, read_token
from commute.cluster.control import (
    Admitted,
    ControlError,
    Frame,
    Kind,
    Leave,
    Observe,
    Refused,
    decode_admission,
    decode_observe,
    encode_message,
)
from commute.cluster.coordinator import Close, Closed, Received, Send, Tick
from commute.cluster.observers import (
    OBSERVERS_MAX,
    SILENCE_SECONDS,
    Arrived,
    Came,
    Gone,
    Observers,
    Place,
    Stop,
)

BEAT = Frame(Kind.BEAT)
PLACE = Place(epoch=7, world="w", shards=2, host="hosta", pid=1)
LAPTOP = Observe("laptop", 42, commute.__version__, "3.12.1")


def with_two() -> Observers:
    """Connections 10 and 11 are clients 1 and 2."""
    observers = Observers(PLACE)
    observers.step(Arrived(10, LAPTOP), 0.0)
    observers.step(Arrived(11, LAPTOP), 0.0)
    return observers


def test_the_shards_know_before_the_client_does() -> None:
    """Came is before Admitted, which names the number and this life of the server."""
    came, sent = Observers(PLACE).step(Arrived(10, LAPTOP), 0.0)

    assert isinstance(came, Came) and came.observer.number == 1
    assert str(came.observer) == "client 1 (pid 42 on laptop)"
    assert sent == Send(10, Admitted(1, 7, "w", 2, "hosta", 1))


def test_numbers_are_never_given_out_twice() -> None:
    """Who comes after somebody went gets a new one."""
    observers = with_two()
    observers.step(Closed(11), 1.0)
    came, _ = observers.step(Arrived(12, LAPTOP), 2.0)

    assert isinstance(came, Came) and came.observer.number == 3
    assert [observers.is_in(number) for number in range(5)] == [False, True, False, True, False]


def test_beats_are_answered() -> None:
    """So that a client knows that the server lives."""
    assert with_two().step(Received(10, BEAT), 1.0) == [Send(10, BEAT)]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Frame(Kind.LEAVE, rank=1, by=1), "has left"),
        (Frame(Kind.LEAVE, Leave.FAILED, 1, 1, 0, "KeyError"), "has failed: KeyError"),
        (Frame(Kind.LEAVE, rank=2, by=2), "broke the protocol by a frame of kind 1"),
        (Frame(Kind.LOST, rank=2, by=1), "broke the protocol by a frame of kind 2"),
    ],
)
def test_ways_to_go(frame: Frame, why: str) -> None:
    """Each is told once; nobody may speak for another; the others hear nothing."""
    observers = with_two()
    gone, close = observers.step(Received(10, frame), 1.0)
    later = observers.step(Closed(10), 2.0) + observers.step(Received(10, BEAT), 2.0)

    assert isinstance(gone, Gone) and (gone.observer.number, gone.why) == (1, why)
    assert close == Close(10)
    assert later == []
    assert [observer.number for observer in observers.present] == [2]


def test_a_killed_client_is_gone_at_once() -> None:
    """Its connection closes; the cause is told where there is one."""
    gone, again = with_two().step(Closed(10, "reset"), 1.0), with_two().step(Closed(99), 1.0)

    assert [effect.why for effect in gone if isinstance(effect, Gone)] == [
        "is gone without a goodbye: reset"
    ]
    assert again == []


def test_silence() -> None:
    """Judged by ticks; who is given up is told, in case it comes back."""
    observers = with_two()
    for second in range(1, int(SILENCE_SECONDS) + 2):
        observers.step(Received(11, BEAT), float(second))
        effects = observers.step(Tick(), float(second))
    sent, gone, close = effects

    assert isinstance(sent, Send) and isinstance(sent.message, Frame)
    assert (sent.connection, sent.message.kind, sent.message.rank) == (10, Kind.LOST, 1)
    assert isinstance(gone, Gone) and gone.observer.number == 1
    assert close == Close(10)


def test_time_asleep_is_no_silence() -> None:
    """A server that was stopped forgives everyone once."""
    observers = with_two()
    observers.step(Tick(), 1.0)

    assert observers.step(Tick(), 1000.0) == []
    assert observers.step(Tick(), 1001.0) == []


def test_a_server_that_ends_says_so() -> None:
    """As a failure, so that no client waits for it."""
    effects = with_two().step(Stop("it was ended by Ctrl-C"), 1.0)
    sent = [effect.message for effect in effects if isinstance(effect, Send)]

    assert [type(effect) for effect in effects] == 2 * [Send, Gone, Close]
    assert sent == 2 * [Frame(Kind.LEAVE, Leave.FAILED, 0, 0, 0, "it was ended by Ctrl-C")]


def test_another_version_is_refused() -> None:
    """Before it has a number."""
    observers = Observers(PLACE)
    old = msgspec.structs.replace(LAPTOP, commute_version="0.0.1")
    sent, close = observers.step(Arrived(10, old), 0.0)

    assert isinstance(sent, Send) and isinstance(sent.message, Refused)
    assert "this client 0.0.1; install the same version" in sent.message.reason
    assert close == Close(10)
    assert observers.present == []


def test_there_is_a_limit() -> None:
    """One too many is told so."""
    observers = Observers(PLACE)
    for connection in range(OBSERVERS_MAX):
        observers.step(Arrived(connection, LAPTOP), 0.0)
    sent, _ = observers.step(Arrived(OBSERVERS_MAX, LAPTOP), 0.0)

    assert isinstance(sent, Send) and isinstance(sent.message, Refused)


def test_messages_survive_the_wire() -> None:
    """And what is none is refused."""
    admitted = Admitted(1, 7, "w", 2, "hosta", 1)

    assert decode_observe(encode_message(LAPTOP)[4:]) == LAPTOP
    assert decode_admission(encode_message(admitted)[4:]) == admitted
    for garbage in (b"", b"\xff", encode_message(Refused("no"))[4:]):
        with pytest.raises(ControlError):
            decode_observe(garbage)
    with pytest.raises(ControlError):
        decode_admission(encode_message(LAPTOP)[4:])


def test_a_token_file_is_made_once(tmp_path: Path) -> None:
    """For its owner only; one that is there stays as it is."""
    path = tmp_path / "token"
    first = make_token_file(str(path))
    token = read_token({"COMMUTE_TOKEN_FILE": str(path)})

    assert first and not make_token_file(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token == read_token({"COMMUTE_TOKEN_FILE": str(path)})
    with pytest.raises(AuthenticationError, match="cannot make the token file"):
        make_token_file(str(tmp_path / "no such folder" / "token"))
