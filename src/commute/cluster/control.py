# SPDX-License-Identifier: Apache-2.0
"""The bytes between a member and the coordinator, after the handshake (see auth).

First the join, once in each direction:

    message = length u4 | msgpack of that many bytes
    member -> coordinator   Hello     at most 1 MiB
    coordinator -> member   Welcome or Refused, at most 16 MiB
    observer -> server      Observe   at most 1 MiB
    server -> observer      Admitted or Refused

After a Welcome the connection carries control frames only, both ways, little endian:

    frame = magic "cmtc" | kind u1 | code u1 | text_bytes u2 | rank i4 | by i4 | op u8 | group u8
            | text
    text is UTF-8 of text_bytes (at most 2048) bytes; the header has 32 bytes

    kind        rank            by              code                    op          text
    0 BEAT      -               -               0                       0           -
    1 LEAVE     who leaves      the same        0 finished, 1 failed    0           why
    2 LOST      who is lost     who says so     0                       0           cause
    3 ABANDON   culprit or -1   who gave up     1 mismatch, 2 timeout,  the         full
                                                3 interrupted,          operation   message
                                                4 peer lost, 5 protocol
    `by` is -1 when the coordinator says so itself. Ranks are those of the world; LEAVE and ABANDON
    may be about one group of it, whose id is in `group`, else 0. core/control.h holds the same
    grammar.

Whatever does not fit the grammar raises ControlError, and the connection it came from is closed.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

__all__ = [
    "HELLO_BYTES_MAX",
    "LENGTH_BYTES",
    "REPLY_BYTES_MAX",
    "SIZE_MAX",
    "TEXT_BYTES_MAX",
    "Abandoned",
    "Admitted",
    "ControlError",
    "Decoder",
    "Frame",
    "Hello",
    "Kind",
    "Leave",
    "Member",
    "Observe",
    "Refused",
    "Welcome",
    "decode_admission",
    "decode_hello",
    "decode_length",
    "decode_observe",
    "decode_reply",
    "encode",
    "encode_message",
]

MAGIC: Final = b"cmtc"
HEADER: Final = struct.Struct("<4sBBHiiQQ")
TEXT_BYTES_MAX: Final = 2048
LENGTH_BYTES: Final = 4
HELLO_BYTES_MAX: Final = 1 << 20
# A welcome lists all members; 4096 of them with the longest names and addresses fit.
REPLY_BYTES_MAX: Final = 16 << 20
SIZE_MAX: Final = 4096


class ControlError(Exception):
    """Bytes that do not fit the grammar; the text says which rule they break."""


class Kind(enum.IntEnum):
    BEAT = 0
    LEAVE = 1
    LOST = 2
    ABANDON = 3


class Leave(enum.IntEnum):
    """The codes of a LEAVE frame."""

    FINISHED = 0
    FAILED = 1


class Abandoned(enum.IntEnum):
    """The codes of an ABANDON frame."""

    MISMATCH = 1
    TIMEOUT = 2
    INTERRUPTED = 3
    PEER_LOST = 4
    PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One control frame; the meaning of each field depends on the kind (see above)."""

    kind: Kind
    code: int = 0
    rank: int = -1
    by: int = -1
    op: int = 0
    text: str = ""
    group: int = 0


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; a text that is too long is cut, at a whole character."""
    text = frame.text.encode("utf-8", "replace")
    if len(text) > TEXT_BYTES_MAX:
        text = text[:TEXT_BYTES_MAX].decode("utf-8", "ignore").encode()
    return (
        HEADER.pack(
            *(MAGIC, frame.kind, frame.code, len(text), frame.rank, frame.by, frame.op, frame.group)
        )
        + text
    )


class Decoder:
    """Turns a stream of bytes, cut anywhere, into frames.

    It holds at most one incomplete frame. After it raised it must not be fed again.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, received: bytes) -> list[Frame]:
        """The frames that these bytes complete.

        Raises:
            ControlError: wrong magic, unknown kind, text too long or not UTF-8.
        """
        self._held += received
        frames: list[Frame] = []
        at = 0
        while len(self._held) - at >= HEADER.size:
            magic, kind, code, text_bytes, rank, by, op, group = HEADER.unpack_from(self._held, at)
            _check_header(magic, kind, text_bytes)
            end = at + HEADER.size + text_bytes
            if len(self._held) < end:
                break
            text = _text(self._held[at + HEADER.size : end])
            frames.append(Frame(Kind(kind), code, rank, by, op, text, group))
            at = end
        del self._held[:at]
        # Garbage shorter than a header is noticed now, not when the rest of it comes.
        if not MAGIC.startswith(self._held[: len(MAGIC)]):
            raise ControlError(f"expected a frame, got {bytes(self._held[:4])!r}")
        return frames


def _check_header(magic: bytes, kind: int, text_bytes: int) -> None:
    if magic != MAGIC:
        raise ControlError(f"expected a frame, got {magic!r}")
    if kind > max(Kind):
        raise ControlError(f"expected a kind from 0 to {max(Kind):d}, got {kind}")
    if text_bytes > TEXT_BYTES_MAX:
        raise ControlError(f"expected a text of at most {TEXT_BYTES_MAX} bytes, got {text_bytes}")


def _text(encoded: bytearray) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise ControlError("expected a text in UTF-8") from None


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Version = Annotated[str, msgspec.Meta(max_length=64)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Addresses = Annotated[tuple[tuple[_Name, _Port], ...], msgspec.Meta(max_length=8)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=SIZE_MAX)]
# An upper bound also refuses "not a number" and infinity, which would never expire.
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=30 * 86400)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What a process says to become a member; join_timeout is what is left of its patience."""

    name: _Name
    rank: _Rank
    size: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]
    host: _Name
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    addresses: _Addresses
    commute_version: _Version
    python_version: _Version
    peer_timeout: _Seconds
    join_timeout: _Seconds


class Member(msgspec.Struct, frozen=True):
    """A member as all others know it."""

    rank: int
    host: str
    pid: int
    addresses: tuple[tuple[str, int], ...]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The world is complete; members are sorted by rank."""

    epoch: int
    members: tuple[Member, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The process cannot become a member; the reason is a whole message for its user."""

    reason: str
    roster: str = ""


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """What a process says to become an observer of a server."""

    host: _Name
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    commute_version: _Version
    python_version: _Version


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """It is one; epoch and world are this life of the server, known to whoever was let in."""

    observer: int
    epoch: int
    world: str
    shards: int
    host: str
    pid: int


def encode_message(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_length(prefix: bytes, *, limit: int) -> int:
    """How many bytes the message has; raises ControlError above the limit."""
    length = int.from_bytes(prefix, "little")
    if length > limit:
        raise ControlError(f"expected a message of at most {limit} bytes, got {length}")
    return length


def decode_hello(body: bytes) -> Hello:
    """The Hello in these bytes; raises ControlError."""
    try:
        return msgspec.msgpack.decode(body, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed hello: {error}") from None


def decode_observe(body: bytes) -> Observe:
    """The Observe in these bytes; raises ControlError."""
    try:
        return msgspec.msgpack.decode(body, type=Observe)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed hello: {error}") from None


def decode_admission(body: bytes) -> Admitted | Refused:
    """A server's answer in these bytes; raises ControlError."""
    try:
        return msgspec.msgpack.decode(body, type=Admitted | Refused)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed answer: {error}") from None


def decode_reply(body: bytes) -> Welcome | Refused:
    """The coordinator's answer in these bytes; raises ControlError."""
    try:
        return msgspec.msgpack.decode(body, type=Welcome | Refused)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(f"malformed answer: {error}") from None
