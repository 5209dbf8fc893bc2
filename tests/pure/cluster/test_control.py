# SPDX-License-Identifier: Apache-2.0
"""The bytes of control frames and of the join, whole, cut and broken."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commute import _core
from commute.cluster.control import (
    HELLO_BYTES_MAX,
    TEXT_BYTES_MAX,
    ControlError,
    Decoder,
    Frame,
    Hello,
    Kind,
    Member,
    Refused,
    Welcome,
    decode_hello,
    decode_length,
    decode_reply,
    encode,
    encode_message,
)

FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    code=st.integers(0, 255),
    rank=st.integers(-(2**31), 2**31 - 1),
    by=st.integers(-(2**31), 2**31 - 1),
    op=st.integers(0, 2**64 - 1),
    text=st.text(st.characters(codec="utf-8"), max_size=64),
    group=st.integers(0, 2**64 - 1),
)
HELLO = Hello(
    name="world",
    rank=1,
    size=4,
    host="hosta",
    pid=7,
    addresses=(("10.0.0.1", 4000),),
    commute_version="0.1.0",
    python_version="3.12.1",
    peer_timeout=5.0,
    join_timeout=300.0,
)


def test_frame_bytes_are_as_documented() -> None:
    """The grammar at the top of the file, byte for byte: C++ reads and writes the same."""
    frame = Frame(Kind.LEAVE, 0, 3, -1, 5, "gone", 6)
    numbers = struct.pack("<iiQQ", 3, -1, 5, 6)

    assert encode(frame) == b"cmtc" + bytes([1, 0, 4, 0]) + numbers + b"gone"
    assert len(encode(Frame(Kind.BEAT))) == 32


@given(FRAMES)
def test_the_core_writes_and_reads_the_same(frame: Frame) -> None:
    """Health threads in C++ and the coordinator in Python agree on every byte."""
    fields = (frame.kind, frame.code, frame.rank, frame.by, frame.op, frame.text, frame.group)

    assert _core.encode_control(*map(_plain, fields)) == encode(frame)
    assert _core.decode_control(encode(frame)) == fields


def _plain(field: object) -> object:
    return int(field) if isinstance(field, int) else field


@given(st.lists(FRAMES, max_size=8), st.randoms())
def test_frames_survive_any_cut(frames: list[Frame], random: object) -> None:
    """However the stream is cut, the same frames come out, in order."""
    stream = b"".join(map(encode, frames))
    decoder, decoded = Decoder(), []
    at = 0
    while at < len(stream):
        step = random.randint(1, 40)  # type: ignore[attr-defined]
        decoded += decoder.feed(stream[at : at + step])
        at += step

    assert decoded == frames


@given(st.binary(max_size=400), st.lists(FRAMES, max_size=2))
def test_garbage_raises_or_waits(garbage: bytes, before: list[Frame]) -> None:
    """Arbitrary bytes give frames, or a ControlError, and nothing else; memory is bounded."""
    decoder = Decoder()
    decoder.feed(b"".join(map(encode, before)))
    try:
        decoder.feed(garbage)
    except ControlError:
        return

    assert len(decoder._held) < 32 + TEXT_BYTES_MAX


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "expected a frame, got b'GET '"),
        (b"x", "expected a frame, got b'x'"),
        (struct.pack("<4sBBH24x", b"cmtc", 4, 0, 0), "expected a kind from 0 to 3, got 4"),
        (
            struct.pack("<4sBBH24x", b"cmtc", 0, 0, 2049),
            "expected a text of at most 2048 bytes, got 2049",
        ),
        (struct.pack("<4sBBH24x", b"cmtc", 0, 0, 1) + b"\xff", "expected a text in UTF-8"),
    ],
)
def test_bad_frames_are_refused(garbage: bytes, message: str) -> None:
    """Wrong magic (at its first byte), kind, length, text."""
    with pytest.raises(ControlError, match=message):
        Decoder().feed(garbage)


def test_long_text_is_cut_at_a_whole_character() -> None:
    """An error message of any length still travels."""
    (frame,) = Decoder().feed(encode(Frame(Kind.LEAVE, text="ä" * 3000)))
    (odd,) = Decoder().feed(encode(Frame(Kind.LEAVE, text="x" + "ä" * 3000)))

    assert frame.text == "ä" * 1024
    assert odd.text == "x" + "ä" * 1023


def test_lone_surrogates_do_not_stop_a_message() -> None:
    """Python has texts that UTF-8 has not, such as undecodable file names."""
    (frame,) = Decoder().feed(encode(Frame(Kind.LEAVE, text="a\udc80b")))

    assert frame.text == "a?b"


def test_messages_come_back() -> None:
    """Length first, then the message."""
    member = Member(0, "hosta", 7, (("10.0.0.1", 4000),))
    for message in (Welcome(1, (member,)), Refused("no", "waiting for rank 1")):
        encoded = encode_message(message)

        assert decode_length(encoded[:4], limit=100) == len(encoded) - 4
        assert decode_reply(encoded[4:]) == message
    assert decode_hello(encode_message(HELLO)[4:]) == HELLO


def test_oversized_message_is_refused() -> None:
    """The length alone decides, before anything is read or allocated."""
    with pytest.raises(ControlError, match="expected a message of at most 1048576 bytes"):
        decode_length(b"\xff\xff\xff\xff", limit=HELLO_BYTES_MAX)


@given(st.binary(max_size=200))
def test_garbage_is_no_message(garbage: bytes) -> None:
    """Arbitrary bytes are a ControlError, whatever msgpack makes of them."""
    with pytest.raises(ControlError):
        decode_hello(garbage)
    with pytest.raises(ControlError):
        decode_reply(garbage)


def test_deep_nesting_is_no_message() -> None:
    """Nested arrays do not exhaust the stack."""
    with pytest.raises(ControlError):
        decode_hello(b"\x91" * 100_000)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"size": 0},
        {"size": 4097},
        {"name": ""},
        {"name": "n" * 256},
        {"host": "h" * 256},
        {"addresses": (("a", 0),)},
        {"addresses": (("a", 1),) * 9},
        {"peer_timeout": 0.0},
        {"peer_timeout": float("nan")},
        {"join_timeout": float("inf")},
        {"pid": -1},
    ],
    ids=str,
)
def test_hello_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    """Every field has a limit."""
    fields = {**msgspec.structs.asdict(HELLO), **change}

    with pytest.raises(ControlError, match="malformed hello"):
        decode_hello(encode_message(Hello(**fields))[4:])
