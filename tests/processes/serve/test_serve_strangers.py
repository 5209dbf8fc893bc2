# SPDX-License-Identifier: Apache-2.0
"""Who may not come to a `commute serve`, and what `commute status` tells of it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading

import numpy as np
import pytest

import commute
from commute import _core
from commute.cluster.visit import Visit
from serving import COMMUTE, HOST, eventually

# ---- strangers ----


def test_wrong_token(serve, job):
    """Told at once, by connect and by status; the server counts it and goes on."""
    server = serve()
    with pytest.raises(commute.AuthenticationError, match="does not accept this token"):
        commute.connect(server.address, token="ab" * 32)
    ended = job([*COMMUTE, "status", server.address], env={"COMMUTE_TOKEN": "ab" * 32}).wait()

    assert ended.code == 1
    assert ended.err.count("\n") == 1 and "does not accept this token" in ended.err
    assert server.status()["refused"] == 3


def test_no_token(serve, job, tmp_path):
    """What to pass is said; a file that others may read is not used."""
    server = serve()
    (tmp_path / "open").write_text("ab" * 32)
    (tmp_path / "open").chmod(0o644)

    with pytest.raises(commute.AuthenticationError, match="pass token= or token_file="):
        commute.connect(server.address)
    with pytest.raises(commute.AuthenticationError, match="chmod 600"):
        commute.connect(server.address, token_file=str(tmp_path / "open"))
    with pytest.raises(commute.SettingError, match="give one of them"):
        commute.connect(server.address, token="ab" * 32, token_file="x")
    assert job([*COMMUTE, "status", server.address]).wait().code == 1


def test_garbage_at_the_port(serve):
    """Whatever strangers send, clients are served, and the server tells how many were refused."""
    server = serve()
    host, _, port = server.address.rpartition(":")
    strangers = []
    for size in (0, 1, 39, 160, 5000):
        stranger = socket.create_connection((host, int(port)), 5.0)
        stranger.sendall(secrets.token_bytes(size))
        strangers.append(stranger)
    with server.connect() as connection:
        value = connection.store().dense("w", 2).push_pull(np.ones(2, "f4"))
        status = server.status()
        for stranger in strangers:
            stranger.close()

    assert value.tolist() == [1, 1]
    assert status["refused"] >= 2  # those that said enough; the others have their 10 seconds


def test_nobody_speaks_for_another(serve):
    """A channel carries messages of the client that opened it, and of no other."""
    server = serve()
    with server.connect() as connection:
        w = connection.store().dense("w", 2)
        thief = Visit(server.address, server.token_file.read_text().strip())
        thief.enter(10.0)
        forged = _core.StoreEndpoint(connection.number, 1)
        found = thief.open_channel(0, 10.0, None)
        forged.add_channel(0, found.socket, found.segment)
        spec = _core.TableSpec(6, 3, _core.Update(0), -1, continues=True)
        call = forged.declare_table("default/stolen", spec, "x")
        eventually(lambda: forged.wait(call, 0.1) or forged.broken(), "the channel is still there")
        answered = forged.wait(call, 0.0)
        forged.close()
        thief.close()

        assert not answered
        assert w.push_pull(np.ones(2, "f4")).tolist() == [1, 1]
        assert [t["name"] for t in server.status()["stores"][0]["tables"]] == ["w"]


@pytest.mark.parametrize("kind", ["nobody", "silent", "http", "closes", "name"])
def test_not_a_server(job, kind):
    """One sentence each, from connect and from status."""
    says = {
        "nobody": "connection refused",
        "silent": "does not answer as a commute server",
        "http": "is not a commute server",
        "closes": "there is no commute server",
        "name": "the name cannot be resolved",
    }[kind]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        address = "no-such-host.invalid:7077" if kind == "name" else f"127.0.0.1:{port}"
        if kind == "nobody":
            listener.close()
        elif kind in ("http", "closes"):
            word = b"HTTP/1.1 400 Bad Request\r\n" + b" " * 40 if kind == "http" else b""
            threading.Thread(target=answer, args=(listener, word), daemon=True).start()
        with pytest.raises((commute.JoinError, commute.AuthenticationError), match=says):
            commute.connect(address, token="ab" * 32, timeout=0.5)
        ended = job([*COMMUTE, "status", address], env={"COMMUTE_TOKEN": "ab" * 32}).wait()

    assert ended.code == 1
    assert ended.err.count("\n") == 1 and says in ended.err


def answer(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            connection.sendall(word)
            connection.close()
        except OSError:
            return


# ---- status ----


def test_status(serve, job):
    """Stores, tables, slots and clients, as text and as JSON."""
    server = serve("--shards", "2")
    with server.connect() as connection:
        store = connection.store("mine")
        w = store.dense("w", (1000, 100), update=commute.Adam(lr=0.1))
        store.dense("b", 3, "int64")
        w.push_pull(np.ones((1000, 100), "f4"))
        shown = job([*COMMUTE, "status", server.address, "--token-file", server.token_file]).wait()
        status = server.status()
    (store_status,) = status["stores"]
    one, other = store_status["tables"]
    (client,) = status["clients"]

    assert shown.code == 0, shown.err
    assert re.search(r"^mine +w +dense +\(1000, 100\) float32 +Adam\(.* +None ", shown.out, re.M)
    assert re.search(rf"^1 +{HOST} +{os.getpid()} ", shown.out, re.M)
    assert (status["pid"], status["shards"], status["slots"]) == (server.pid, 2, 1024)
    assert status["address"] == server.address and status["uptime_s"] > 0
    assert (one["name"], one["bytes"], one["state_bytes"]) == ("w", 400_000, 800_000)
    assert one["updates"] == 1 and one["clocks"] == {} and one["whole"]
    assert sum(one["slots"].values()) == 7 and set(one["slots"]) == {"0", "1"}
    assert (other["name"], other["shape"], other["dtype"]) == ("b", "(3,)", "int64")
    assert (client["number"], client["pid"]) == (1, os.getpid())
    assert client["messages"] >= 9 and client["bytes"] >= 400_000
