# SPDX-License-Identifier: Apache-2.0
"""The handshake that every connection begins with: both ends prove that they hold the token.

Fixed sizes, little endian; nothing else is read before it has passed:

    acceptor -> dialer   greeting, 40 bytes: magic "commute1" | nonce 32
    dialer -> acceptor   introduction, 160 bytes:
                         magic "commute1" | nonce 32 | role u1 | purpose u1 | rank i4 | target i4
                         | epoch u4 | group u8 | run 32, padded with zeros | proof 32 | zeros 34
    acceptor -> dialer   proof, 32 bytes

    proof = HMAC-SHA256(token, label | greeting | introduction up to its proof)
    with the label "commute1 dialer" or "commute1 acceptor", each followed by a zero byte

What a proof binds: both nonces are fresh, so a recorded handshake is worth nothing; the labels
differ, so a proof cannot be reflected; run, role, purpose, rank, target and group are inside, so
an introduction to one process of one job opens nothing else. The traffic that follows is neither
encrypted nor signed: whoever can change packets on the way is not kept out (see SECURITY.md).

A failure tells the other end nothing but a closed connection.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from commute._errors import AuthenticationError

__all__ = [
    "GREETING_BYTES",
    "INTRODUCTION_BYTES",
    "PROOF_BYTES",
    "HandshakeError",
    "Introduction",
    "Purpose",
    "Role",
    "accept_handshake",
    "acceptor_proof",
    "check_run",
    "check_token",
    "dial_handshake",
    "greet",
    "introduce",
    "make_token_file",
    "mint_token",
    "read_exactly",
    "read_token",
    "verify_greeting",
    "verify_introduction",
]

MAGIC: Final = b"commute1"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
GREETING_BYTES: Final = len(MAGIC) + NONCE_BYTES
INTRODUCTION_BYTES: Final = 160
RUN_BYTES_MAX: Final = 32
TOKEN_CHARACTERS: Final = 64

_CLAIMS: Final = struct.Struct("<8s32sBBiiIQ32s")
_DIALER: Final = b"commute1 dialer\0"
_ACCEPTOR: Final = b"commute1 acceptor\0"
_TOKEN_FILE_BYTES_MAX: Final = 4096


class Role(enum.IntEnum):
    """Who dials."""

    MEMBER = 0
    LAUNCHER = 1
    OBSERVER = 2


class Purpose(enum.IntEnum):
    """What the connection is for."""

    JOIN = 0
    COLLECTIVE = 1
    PAIR = 2
    CONTROL = 3
    OUTBOX = 4
    SHARED_COLLECTIVE = 5
    SHARED_PAIR = 6
    STORE = 7
    SHARED_STORE = 8
    STATUS = 9


class HandshakeError(Exception):
    """A handshake that did not pass.

    Attributes:
        impostor: the other end answered, and does not hold the token (or is not commute at all).
        rejected: the other end read our introduction and closed the connection.
        hung_up: the other end closed the connection without a word.
    """

    def __init__(
        self,
        reason: str,
        *,
        impostor: bool = False,
        rejected: bool = False,
        hung_up: bool = False,
    ) -> None:
        super().__init__(reason)
        self.impostor = impostor
        self.rejected = rejected
        self.hung_up = hung_up


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a dialer claims and proves: target is the rank dialled, -1 for the coordinator.

    group: the id of the group of the world that the link is for, 0 for the world itself.
    """

    role: Role
    purpose: Purpose
    rank: int
    target: int
    epoch: int
    run: str
    group: int = 0


def mint_token() -> str:
    """A new token: 256 random bits as 64 hexadecimal digits."""
    return secrets.token_hex(TOKEN_CHARACTERS // 2)


def check_token(token: str, *, source: str = "the token") -> bytes:
    """The key in a token; raises AuthenticationError, which never shows the token itself."""
    try:
        key = bytes.fromhex(token)
    except ValueError:
        key = b""
    if len(token) != TOKEN_CHARACTERS or len(key) != TOKEN_CHARACTERS // 2:
        raise AuthenticationError(
            f"{source} must be {TOKEN_CHARACTERS} hexadecimal digits, got {len(token)} characters;"
            " make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def check_run(run: str) -> bytes:
    """The bytes of a run id; raises ValueError."""
    if not run or not run.isascii() or not run.isprintable() or len(run) > RUN_BYTES_MAX:
        raise ValueError(
            f"a run id must be 1 to {RUN_BYTES_MAX} printable ASCII characters, got {run!r}"
        )
    return run.encode("ascii")


def read_token(env: Mapping[str, str]) -> str | None:
    """The token of COMMUTE_TOKEN, else of the file COMMUTE_TOKEN_FILE names, else None.

    Raises:
        AuthenticationError: the token is malformed, or the file cannot be read, or others may
            read it.
    """
    if token := env.get("COMMUTE_TOKEN", "").strip():
        check_token(token, source="COMMUTE_TOKEN")
        return token
    if path := env.get("COMMUTE_TOKEN_FILE", ""):
        token = _read_token_file(path)
        check_token(token, source=f"the token in {path} (COMMUTE_TOKEN_FILE)")
        return token
    return None


def make_token_file(path: str) -> bool:
    """Make a file with a new token that only its owner may read; False if there is one.

    Raises:
        AuthenticationError: it cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise AuthenticationError(
            f"cannot make the token file {path}: {error.strerror}; name another file"
        ) from None
    try:
        os.write(fd, f"{mint_token()}\n".encode())
    finally:
        os.close(fd)
    return True


def _read_token_file(path: str) -> str:
    # Without O_NONBLOCK a pipe under this name would make the open wait for its writer.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"cannot read the token file {path} (COMMUTE_TOKEN_FILE): {error.strerror}"
        ) from None
    try:
        # The open file is asked, not the path: the path may name another file by now.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"the token file {path} must be a regular file")
        if status.st_mode & 0o077:
            raise AuthenticationError(
                f"the token file {path} has mode {stat.S_IMODE(status.st_mode):04o}, others may"
                f" read it; run: chmod 600 {path}"
            )
        return os.read(fd, _TOKEN_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def greet() -> bytes:
    """A greeting with a fresh nonce."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def verify_greeting(greeting: bytes) -> None:
    """Raises HandshakeError when the acceptor does not speak this protocol."""
    if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
        raise HandshakeError(
            f"expected a greeting that begins with {MAGIC!r}, got {greeting[: len(MAGIC)]!r}",
            impostor=True,
        )


def introduce(key: bytes, greeting: bytes, introduction: Introduction) -> bytes:
    """The dialer's answer to a greeting."""
    claims = _CLAIMS.pack(
        MAGIC,
        secrets.token_bytes(NONCE_BYTES),
        introduction.role,
        introduction.purpose,
        introduction.rank,
        introduction.target,
        introduction.epoch,
        introduction.group,
        check_run(introduction.run),
    )
    return (claims + _prove(key, _DIALER, greeting, claims)).ljust(INTRODUCTION_BYTES, b"\0")


def verify_introduction(key: bytes, run: str, greeting: bytes, received: bytes) -> Introduction:
    """What the dialer claims, once it is proved; raises HandshakeError."""
    claims, proof = received[: _CLAIMS.size], received[_CLAIMS.size :][:PROOF_BYTES]
    # The proof comes first: no claim is looked at, and no difference shows, before it holds.
    if not hmac.compare_digest(proof, _prove(key, _DIALER, greeting, claims)):
        raise HandshakeError("the dialer does not hold the token")
    magic, _, role, purpose, rank, target, epoch, group, run_bytes = _CLAIMS.unpack(claims)
    if magic != MAGIC or any(received[_CLAIMS.size + PROOF_BYTES :]):
        raise HandshakeError("malformed introduction")
    if run_bytes.rstrip(b"\0") != run.encode():
        raise HandshakeError(f"the dialer belongs to another run than {run!r}")
    if role not in set(Role) or purpose not in set(Purpose):
        raise HandshakeError(f"unknown role {role} or purpose {purpose}")
    return Introduction(Role(role), Purpose(purpose), rank, target, epoch, run, group)


def acceptor_proof(key: bytes, greeting: bytes, received: bytes) -> bytes:
    """What the acceptor answers to a verified introduction, and what the dialer expects."""
    return _prove(key, _ACCEPTOR, greeting, received[: _CLAIMS.size])


def _prove(key: bytes, label: bytes, greeting: bytes, claims: bytes) -> bytes:
    return hmac.digest(key, label + greeting + claims, hashlib.sha256)


async def accept_handshake(connection: socket.socket, key: bytes, run: str) -> Introduction:
    """The acceptor's end; raises HandshakeError or OSError. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    greeting = greet()
    await loop.sock_sendall(connection, greeting)
    received = await read_exactly(connection, INTRODUCTION_BYTES)
    introduction = verify_introduction(key, run, greeting, received)
    await loop.sock_sendall(connection, acceptor_proof(key, greeting, received))
    return introduction


async def dial_handshake(connection: socket.socket, key: bytes, introduction: Introduction) -> None:
    """The dialer's end; raises HandshakeError or OSError. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    greeting = await read_exactly(connection, GREETING_BYTES)
    verify_greeting(greeting)
    sent = introduce(key, greeting, introduction)
    await loop.sock_sendall(connection, sent)
    try:
        proof = await read_exactly(connection, PROOF_BYTES)
    except HandshakeError:
        raise HandshakeError("our introduction was rejected", rejected=True) from None
    if not hmac.compare_digest(proof, acceptor_proof(key, greeting, sent)):
        raise HandshakeError("the other end does not hold the token", impostor=True)


async def read_exactly(connection: socket.socket, count: int) -> bytes:
    """This many bytes and not one more: what follows them belongs to the next reader."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        try:
            part = await loop.sock_recv(connection, min(count - len(received), 1 << 16))
        except ConnectionError:  # closed with what we sent still unread
            part = b""
        if not part:
            reason = f"closed after {len(received)} of {count} bytes"
            raise HandshakeError(reason, hung_up=not received)
        received += part
    return bytes(received)
