# SPDX-License-Identifier: Apache-2.0
"""`commute serve` and `commute.connect` between real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import threading
from typing import Any

import numpy as np
import pytest

import commute
from commute.store import observer as observer_module
from serving import COMMUTE, HOST, PROGRAM, eventually, said

# ---- the command ----


def test_what_a_user_sees(serve, tmp_path):
    """A token is made, two lines tell how to connect, clients are logged, SIGTERM ends it well."""
    server = serve()
    with server.connect() as connection:
        connection.store().dense("w", 3)
        shown = repr(connection)
    ended = server.end(signal.SIGTERM)
    made, listens, connects = ended.out.splitlines()

    assert made == f"commute serve: made a new token in {server.token_file} (mode 600)"
    assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
    assert listens.startswith(f"commute serve: listening on {server.address}, pid {server.pid}, ")
    assert f"commute.connect('{server.address}', token_file='{server.token_file}')" in connects
    assert shown.startswith(f"<Connection to the server at {server.address} (pid {server.pid} on")
    assert f"client 1 (pid {os.getpid()} on {HOST}) has come" in ended.err
    assert f"client 1 (pid {os.getpid()} on {HOST}) has left" in ended.err
    assert "SIGTERM: the server ends" in ended.err
    assert ended.code == 0
    assert server.token_file.read_text().strip() not in ended.out + ended.err


def test_ctrl_c(serve):
    """As with every command: 130."""
    ended = serve().end(signal.SIGINT)

    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_port_that_is_taken(serve, job):
    """One sentence, and the server that has it goes on."""
    server = serve()
    port = server.address.rpartition(":")[2]
    command = [*COMMUTE, "serve", "--port", port, "--token-file", server.token_file]
    ended = job(command).wait()

    assert ended.code == 1
    assert ended.err.count("\n") == 1 and "address already in use; choose another" in ended.err
    assert server.status()["clients"] == []


@pytest.mark.parametrize(
    ("flags", "env", "code", "says"),
    [
        ([], {}, 2, "there is no token; add --token-file FILE"),
        (["--port", "x"], {}, 2, "expected a port from 0 to 65535, got 'x'"),
        (["--shards", "0"], {}, 2, "expected a number from 1 to 1024, got '0'"),
        ([], {"COMMUTE_TOKEN": "short"}, 1, "must be 64 hexadecimal digits"),
        (["--bind", "no.such.host.invalid"], {"COMMUTE_TOKEN": "ab" * 32}, 1, "cannot listen on"),
        (["--help"], {}, 0, "commute.connect("),
    ],
)
def test_command_lines(job, flags, env, code, says):
    """What cannot be is one sentence; --help teaches."""
    ended = job([*COMMUTE, "serve", "--port", "0", *flags], env=env).wait()

    assert ended.code == code, ended.err
    assert says in (ended.out if code == 0 else ended.err)
    assert "Traceback" not in ended.err


# ---- stores ----


def test_every_verb(serve, transport):
    """As on a worker, with NumPy's answers."""
    server = serve("--shards", "2")
    with server.connect() as connection:
        store = connection.store("mine")
        w = store.dense("w", (300, 100), "float64", update=commute.SGD(lr=0.5), init=1.0)
        g = np.arange(30_000.0).reshape(300, 100)
        first = w.push_pull(g)
        w.push(g, accumulate=True)
        store.tick()
        store.push("w", g)
        out = np.empty_like(g)
        second = store.pull("w", out=out)
        third = store.push_pull("w", np.zeros_like(g))
        store.push_async("w", g).wait()
        fourth = store.pull_async("w").wait()
        w.set(lr=1.0)
        fifth = store.push_pull_async("w", g).wait()
        store.flush()
        info, norm, total = w.info(), w.norm(), w.sum()
        index, value = w.top(1)

        assert np.array_equal(first, 1 - 0.5 * g)
        assert second is out and np.array_equal(second, 1 - 1.5 * g)
        assert np.array_equal(third, second)
        assert np.array_equal(fourth, 1 - 2 * g) and np.array_equal(fifth, 1 - 3 * g)
        assert norm == pytest.approx(np.linalg.norm(fifth)) and total == pytest.approx(fifth.sum())
        assert (index.tolist(), value.tolist()) == ([29_999], [1 - 3 * 29_999.0])
        assert w.nonzero() == 30_000
        assert store.tables() == [w] and info.staleness is None
        assert sum(info.slots.values()) == 4 and len(info.slots) == 2
        assert all(server.address in place for place in info.slots)
    server.end()


def test_leaving_does_no_harm(serve):
    """A with-block may be entered again and again, as notebooks do."""
    with serve().connect() as connection:
        for turn in range(3):
            with connection.store() as store:
                value = store.dense("w", 2).push_pull(np.ones(2, "f4"))
            with pytest.raises(commute.ClosedError):
                store.push("w", np.ones(2, "f4"))

            assert value.tolist() == [turn + 1] * 2


@pytest.mark.parametrize(
    "asked", [{"staleness": 0}, {"staleness": 3}, {"reduce": "mean"}, {"deterministic": True}]
)
def test_what_needs_rounds_is_refused(serve, asked):
    """With the reason and what to do; nothing was made."""
    server = serve()
    with server.connect() as connection:
        with pytest.raises(commute.SettingError, match=r"there\s+are no rounds.*commute.init\(\)"):
            connection.store().dense("w", 3, **asked)

    assert server.status()["stores"] == []


def test_stores_never_touch_each_other(serve):
    """Two of them with a table of the same name, of other shapes."""
    server = serve()
    with server.connect() as one, server.connect() as two:
        a = one.store("a").dense("w", 3, "int64", init=5)
        b = two.store("b").dense("w", (2, 2), "float32")
        a.push(np.ones(3, dtype=np.int64))
        b.push(np.ones((2, 2), "f4"))
        one.store("a").flush()
        b.push(np.ones((2, 2), "f4"))

        assert a.pull().tolist() == [6, 6, 6]
        assert two.store("a").dense("w", 3, "int64").pull().tolist() == [6, 6, 6]
        assert b.pull().tolist() == [[2, 2], [2, 2]]
        assert [s["name"] for s in server.status()["stores"]] == ["a", "b"]


def test_values_outlive_clients(serve):
    """Who comes later finds them, whatever its own init; the optimizer goes on where it was."""
    server = serve("--shards", "2")
    update = commute.Momentum(lr=1.0, momentum=0.5)
    for turn, expected in enumerate([-1.0, -2.5, -4.25]):
        with server.connect() as connection:
            w = connection.store().dense(
                "w", 20_000, update=update, init=np.full(20_000, turn, "f4")
            )
            value = w.push_pull(np.ones(20_000, "f4"))

        assert np.unique(value).tolist() == [expected]
    server.end()


def test_declarations_must_agree(serve):
    """Both are shown, and by whom; the connection can be used on."""
    server = serve()
    with server.connect() as one, server.connect() as two:
        one.store().dense("w", 3)
        with pytest.raises(commute.MismatchError) as caught:
            two.store().dense("w", 4, update="max")

        assert "client 1 declared dense (3,) float32 with sum" in str(caught.value)
        assert "client 2 dense (4,) float32 with max" in str(caught.value)
        assert two.store().dense("w", 3).pull().tolist() == [0, 0, 0]


def test_from_within_an_event_loop(serve):
    """As in a notebook, whose cells run in one."""
    server = serve()

    async def cell() -> list[float]:
        with server.connect() as connection:
            return connection.store().dense("w", 2).push_pull(np.ones(2, "f4")).tolist()

    assert asyncio.run(cell()) == [1, 1]


def test_a_store_keeps_its_connection(serve):
    """`connect(...).store()` in one line; it ends when nobody has it any more."""
    server = serve()
    store = server.connect().store()
    w = store.dense("w", 2)
    value = w.push_pull(np.ones(2, "f4"))
    before = len(server.status()["clients"])
    del store, w
    import gc

    gc.collect()
    eventually(lambda: not server.status()["clients"], "the connection is still there")

    assert value.tolist() == [1, 1] and before == 1


def test_ranks_of_a_job_are_clients_too(serve, job):
    """Each connects by itself, beside a store of the job; COMMUTE_TOKEN is the job's there."""
    server = serve()
    command = [*COMMUTE, "run", "-n", "2", PROGRAM, "ranks", server.address, server.token_file]
    ended = job(command, timeout=50.0).wait()
    told = [json.loads(line) for line in re.findall(r"said (\{.*\})$", ended.out, re.M)]

    assert ended.code == 0, ended.err
    assert [line["own"] for line in told] == [[20] * 3] * 2
    assert [line["shared"] for line in told] == [[20] * 3] * 2


# ---- several at once, and faults ----


@pytest.mark.parametrize("cuts", ["cut", "whole"])
def test_many_clients_count_once(serve, transport, cuts):
    """Three processes push at once while their channels break; every push counts once."""
    server = serve("--shards", "2")
    pushes = 60
    clients = [server.client("counting", me, pushes, cuts) for me in range(3)]
    ended = [client.wait() for client in clients]
    with server.connect() as connection:
        value = connection.store("counts").dense("sum", (131_072,), "int64").pull()
    told = [line for client in clients for line in said(client, "fine")]
    server.end()

    assert [each.code for each in ended] == [0, 0, 0], [each.err for each in ended]
    assert np.unique(value).tolist() == [pushes | pushes << 20 | pushes << 40]
    print([line["cuts"] for line in told])
    assert all((line["cuts"] > 3) == (cuts == "cut") for line in told), told


def test_a_killed_client_is_no_loss(serve, transport):
    """What it committed is there; its channels are let go; others do not notice."""
    server = serve()
    with server.connect() as connection:
        mine = connection.store("other").dense("w", 100, "int64")
        victim = server.client("pushing")
        eventually(lambda: len(said(victim, "committed")) >= 3, victim.out)
        fds = len(os.listdir(f"/proc/{server.pid}/fd"))
        os.kill(victim.process.pid, signal.SIGKILL)
        for _ in range(50):
            value = mine.push_pull(np.ones(100, dtype=np.int64))
        server.job.wait_for("is gone without a goodbye")
        eventually(
            lambda: len(os.listdir(f"/proc/{server.pid}/fd")) < fds, "its channels are still there"
        )
        committed = said(victim, "committed")[-1]["committed"]
        left = connection.store("counts").dense("sum", (131_072,), "int64").pull()
        status = server.status()
    victim.wait()
    server.end()

    assert value.tolist() == [50] * 100
    assert committed <= left.min() <= left.max() <= committed + 12
    assert [client["number"] for client in status["clients"]] == [1]


def test_a_client_that_ends_without_closing(serve):
    """Its last push counts, and it is no loss."""
    server = serve()
    ended = server.client("unclosed").wait()
    with server.connect() as connection:
        value = connection.store("counts").dense("sum", (131_072,), "int64").pull()

    assert ended.code == 0, ended.err
    assert np.unique(value).tolist() == [1]
    assert "client 1" in server.job.err and "has left" in server.job.err


def test_nothing_grows_with_clients(serve):
    """Hundreds come and go: descriptors and threads of the server are as before."""
    server = serve()

    def held() -> tuple[int, int]:
        here = f"/proc/{server.pid}"
        return len(os.listdir(f"{here}/fd")), len(os.listdir(f"{here}/task"))

    def visit() -> None:
        with server.connect() as connection:
            connection.store().dense("w", 10).push(np.ones(10, "f4"))

    visit()
    eventually(lambda: "client 1 (pid" in server.job.err and "has left" in server.job.err, "")
    before = held()
    for _ in range(100):
        visit()
    eventually(lambda: held() <= before, f"{before} has become {held()}")
    with server.connect() as connection:
        assert connection.store().dense("w", 10).pull().tolist() == [101] * 10


@pytest.mark.parametrize("how", ["killed", "stopped", "ended"])
def test_a_server_that_goes(serve, transport, how):
    """Every call of every client raises SlotLostError that names it; nobody hangs."""
    server = serve()
    env = {"COMMUTE_PEER_TIMEOUT": "1"} if how == "stopped" else {}
    clients = [server.client("server_lost", env=env) for _ in range(2)]
    for client in clients:
        client.wait_for("ready")
    number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "ended": signal.SIGTERM}[how]
    os.kill(server.pid, number)
    ended = [client.wait() for client in clients]

    assert [each.code for each in ended] == [0, 0], ended[0].err
    for client in clients:
        (told,) = said(client, "errors")
        assert said(client, "closed")
        assert len(told["errors"]) == 7, told
        for error in told["errors"]:
            assert error["kind"] == "SlotLostError", told
            assert f"the server at {server.address} (pid {server.pid} on {HOST})" in error["text"]
        assert how != "ended" or "it was ended by SIGTERM" in told["errors"][0]["text"]
        assert how != "stopped" or "nothing was heard from it" in told["errors"][0]["text"]


def test_a_server_that_comes_back_is_another(serve):
    """On the same port with the same token: its old clients are told, and touch nothing of it."""
    server = serve()
    port = int(server.address.rpartition(":")[2])
    old = server.connect()
    w = old.store().dense("w", 2)
    w.push_pull(np.ones(2, "f4"))
    os.kill(server.pid, signal.SIGKILL)
    server.job.wait()
    again = serve(port=port)
    with again.connect() as new:
        fresh = new.store().dense("w", 2)
        with pytest.raises(commute.SlotLostError, match="start it again"):
            for _ in range(100):
                w.push_pull(np.ones(2, "f4"), timeout=5.0)
        value = fresh.pull().tolist()
    old.close()

    assert again.address == server.address
    assert value == [0, 0]


def test_makers_that_go(serve):
    """A client that asked for a table and was killed before it made it: another makes it."""
    server = serve("--shards", "2")
    victim = server.client("half_declared")
    victim.wait_for("ready")
    made: list[Any] = []

    def declare() -> None:
        with server.connect() as connection:
            table = connection.store().dense("t", 3, "int64", init=7, timeout=30.0)
            made.append(table.pull().tolist())

    waiting = [threading.Thread(target=declare) for _ in range(2)]
    for thread in waiting:
        thread.start()
    server.job.wait_for("client 3 ")
    os.kill(victim.process.pid, signal.SIGKILL)
    for thread in waiting:
        thread.join(25.0)
    victim.wait()
    server.end()

    assert made == [[7, 7, 7]] * 2


def test_makers_that_do_not_come_to_it(serve, monkeypatch):
    """One that was interrupted, and lives: others wait for it for a while."""
    server = serve()
    idle = server.client("half_declared")
    idle.wait_for("ready")
    monkeypatch.setattr(observer_module, "PATIENCE_SECONDS", 0.3)
    with server.connect() as connection:
        table = connection.store().dense("t", 3, "int64", init=7, timeout=30.0)

        assert table.pull().tolist() == [7, 7, 7]
        assert len(server.status()["clients"]) == 2
