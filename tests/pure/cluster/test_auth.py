# SPDX-License-Identifier: Apache-2.0
"""The handshake: what passes, and everything that must not."""

import asyncio
import dataclasses
import os
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commute._errors import AuthenticationError
from commute.cluster.auth import (
    GREETING_BYTES,
    INTRODUCTION_BYTES,
    HandshakeError,
    Introduction,
    Purpose,
    Role,
    accept_handshake,
    acceptor_proof,
    check_run,
    check_token,
    dial_handshake,
    greet,
    introduce,
    mint_token,
    read_token,
    verify_greeting,
    verify_introduction,
)

TOKEN = "ab" * 32
KEY = check_token(TOKEN)
CLAIM = Introduction(
    Role.MEMBER, Purpose.COLLECTIVE, rank=3, target=1, epoch=2, run="run-1", group=5
)
T = TypeVar("T")


def test_introduction_passes() -> None:
    """What was claimed is what is understood; sizes are as documented."""
    greeting = greet()
    sent = introduce(KEY, greeting, CLAIM)

    assert len(greeting) == GREETING_BYTES == 40
    assert len(sent) == INTRODUCTION_BYTES == 160
    assert verify_introduction(KEY, "run-1", greeting, sent) == CLAIM


def test_other_token_is_refused() -> None:
    """The proof depends on the token."""
    greeting = greet()
    sent = introduce(check_token(mint_token()), greeting, CLAIM)

    with pytest.raises(HandshakeError, match="does not hold the token"):
        verify_introduction(KEY, "run-1", greeting, sent)


def test_other_run_is_refused() -> None:
    """A leftover process of an earlier run does not get in, even with the same token."""
    greeting = greet()
    sent = introduce(KEY, greeting, dataclasses.replace(CLAIM, run="run-0"))

    with pytest.raises(HandshakeError, match="another run than 'run-1'"):
        verify_introduction(KEY, "run-1", greeting, sent)


def test_replayed_introduction_is_refused() -> None:
    """A recorded introduction answers a nonce that is not used again."""
    recorded = introduce(KEY, greet(), CLAIM)

    with pytest.raises(HandshakeError, match="does not hold the token"):
        verify_introduction(KEY, "run-1", greet(), recorded)


def test_proofs_cannot_be_reflected() -> None:
    """The two ends prove different things."""
    greeting = greet()
    sent = introduce(KEY, greeting, CLAIM)

    assert acceptor_proof(KEY, greeting, sent) not in sent


@given(st.integers(0, INTRODUCTION_BYTES * 8 - 1))
def test_every_bit_counts(bit: int) -> None:
    """No changed bit passes, in claims, proof or padding."""
    greeting = greet()
    sent = bytearray(introduce(KEY, greeting, CLAIM))
    sent[bit // 8] ^= 1 << bit % 8

    with pytest.raises(HandshakeError):
        verify_introduction(KEY, "run-1", greeting, bytes(sent))


@given(st.binary(max_size=200))
def test_garbage_is_no_introduction(garbage: bytes) -> None:
    """Arbitrary bytes are refused, and nothing else happens."""
    with pytest.raises(HandshakeError):
        verify_introduction(KEY, "run-1", greet(), garbage)
    with pytest.raises(HandshakeError) as caught:
        verify_greeting(garbage)

    assert caught.value.impostor


@pytest.mark.parametrize("field", ["role", "purpose"])
def test_unknown_role_and_purpose_are_refused(field: str) -> None:
    """Also when they are proved: an older or newer commute."""
    greeting = greet()
    unknown: dict[str, Any] = {field: 99}
    claim = dataclasses.replace(CLAIM, **unknown)

    with pytest.raises(HandshakeError, match="unknown role"):
        verify_introduction(KEY, "run-1", greeting, introduce(KEY, greeting, claim))


def shake(dialer: Awaitable[T], acceptor: Awaitable[object]) -> list[object]:
    async def both() -> list[object]:
        async with asyncio.timeout(5):
            return list(await asyncio.gather(dialer, acceptor, return_exceptions=True))

    return asyncio.run(both())


def test_both_ends_agree() -> None:
    """Over a real socket, and what follows the handshake is left unread."""
    dialer, acceptor = socket.socketpair()
    with dialer, acceptor:
        dialer.setblocking(False)
        acceptor.setblocking(False)
        result = shake(dial_handshake(dialer, KEY, CLAIM), accept_handshake(acceptor, KEY, "run-1"))
        dialer.send(b"next")

        assert result == [None, CLAIM]
        assert acceptor.recv(10) == b"next"


def test_dialer_notices_an_impostor() -> None:
    """An acceptor that does not hold the token cannot make up its proof."""
    dialer, acceptor = socket.socketpair()
    with dialer, acceptor:
        dialer.setblocking(False)
        acceptor.sendall(greet() + bytes(32))

        async def nothing() -> None: ...

        (error, _) = shake(dial_handshake(dialer, KEY, CLAIM), nothing())

    assert isinstance(error, HandshakeError)
    assert error.impostor


def test_dialer_notices_a_rejection() -> None:
    """Closed after the introduction is something else than closed before it."""

    async def reject(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, greet())
        await asyncio.get_running_loop().sock_recv(connection, INTRODUCTION_BYTES)
        connection.close()

    dialer, acceptor = socket.socketpair()
    with dialer:
        dialer.setblocking(False)
        acceptor.setblocking(False)
        (error, _) = shake(dial_handshake(dialer, KEY, CLAIM), reject(acceptor))

    assert isinstance(error, HandshakeError)
    assert error.rejected
    assert not error.impostor


def test_minted_tokens_are_valid_and_differ() -> None:
    """256 bits as hexadecimal digits."""
    first, second = mint_token(), mint_token()

    assert len(check_token(first)) == 32
    assert first != second


@pytest.mark.parametrize("token", ["", "short", "zz" * 32, "ab" * 33, "ab " * 21 + "a"])
def test_bad_token_is_refused_and_not_shown(token: str) -> None:
    """The message says what is expected and how to make one."""
    with pytest.raises(AuthenticationError, match="must be 64 hexadecimal digits") as caught:
        check_token(token)

    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("run", ["", "x" * 33, "ü", "a\nb"])
def test_bad_run_is_refused(run: str) -> None:
    """It must fit its field in the introduction, and a line of a log."""
    with pytest.raises(ValueError, match="a run id must be 1 to 32 printable ASCII"):
        check_run(run)


def test_token_of_the_environment(tmp_path: Path) -> None:
    """The variable goes before the file; without both there is none."""
    path = tmp_path / "token"
    path.write_text("cd" * 32 + "\n")
    path.chmod(0o600)

    assert read_token({}) is None
    assert read_token({"COMMUTE_TOKEN": TOKEN, "COMMUTE_TOKEN_FILE": str(path)}) == TOKEN
    assert read_token({"COMMUTE_TOKEN_FILE": str(path)}) == "cd" * 32


def test_malformed_variable_is_named() -> None:
    """The user learns which variable to mend."""
    with pytest.raises(AuthenticationError, match="COMMUTE_TOKEN must be 64"):
        read_token({"COMMUTE_TOKEN": "password"})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_token_file_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """With the command that mends it."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)

    with pytest.raises(AuthenticationError, match=f"has mode {mode:04o}, .*; run: chmod 600"):
        read_token({"COMMUTE_TOKEN_FILE": str(path)})


def test_unusable_token_files(tmp_path: Path) -> None:
    """Missing, no regular file (not even opened for good), or with something else inside."""
    pipe, other = tmp_path / "pipe", tmp_path / "other"
    os.mkfifo(pipe, 0o600)
    other.touch(0o600)
    other.write_bytes(b"\xff" * 64)

    for path, message in [
        (tmp_path / "none", "cannot read the token file .*: No such file"),
        (pipe, "must be a regular file"),
        (tmp_path, "must be a regular file"),
        (other, r"the token in .* \(COMMUTE_TOKEN_FILE\) must be 64"),
    ]:
        with pytest.raises(AuthenticationError, match=message):
            read_token({"COMMUTE_TOKEN_FILE": str(path)})
