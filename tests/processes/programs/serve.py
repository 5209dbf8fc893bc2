# SPDX-License-Identifier: Apache-2.0
"""What the clients of test_serve.py do: the first argument says which scenario, the second where.

The token comes from the environment.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import numpy as np
from saying import say, wait_for_file
from store_channels import connections

import commute
from commute.cluster.visit import Visit

SHAPE = (131_072,)  # 1 MB of int64, 16 chunks


def remember_control():
    """From now on the connections that carry beats are known by their own end."""
    kept, take = set(), Visit.take_control

    def remembering(visit):
        kept.add(visit._control.getsockname())
        return take(visit)

    Visit.take_control = remembering
    return kept


def cut_channels(control):
    """Ends all channels of this process, as a network does. How many."""
    done = 0
    for connection, name in connections():
        shared = isinstance(name, bytes) and name.startswith(b"\0commute-")
        if shared or (isinstance(name, tuple) and connection.getsockname() not in control):
            try:
                connection.shutdown(socket.SHUT_RDWR)
                done += 1
            except OSError:  # it had ended
                pass
    return done


def counting(address, me, pushes, cuts):
    """Adds 1 << 20 me to every element, again and again, while its channels are cut."""
    control = remember_control()
    connection = commute.connect(address, timeout=20.0)
    table = connection.store("counts").dense("sum", SHAPE, "int64")
    mine, stop, done = np.full(SHAPE, 1 << 20 * int(me)), threading.Event(), [0]

    def cutter():
        while not stop.wait(0.01):
            done[0] += cut_channels(control)

    if cuts == "cut":
        threading.Thread(target=cutter, daemon=True).start()
    for turn in range(int(pushes)):
        table.push_pull(mine) if turn % 2 else table.push(mine)
    stop.set()
    connection.store("counts").flush()
    connection.close()
    say(me=int(me), fine=True, cuts=done[0])


def pushing(address):
    """Pushes until it is killed."""
    table = commute.connect(address).store("counts").dense("sum", SHAPE, "int64")
    one = np.ones(SHAPE, dtype=np.int64)
    say(ready=os.getpid())
    for turn in range(1 << 30):
        table.push_pull(one)
        if turn % 10 == 0:
            say(committed=turn + 1)


def server_lost(address):
    """Everything raises once the server is gone, and nothing hangs."""
    connection = commute.connect(address)
    table = connection.store().dense("w", SHAPE, "int64")
    table.push(np.ones(SHAPE, dtype=np.int64))
    say(ready=os.getpid())
    errors = []
    try:
        while True:
            table.push_pull(np.ones(SHAPE, dtype=np.int64))
            time.sleep(0.01)
    except commute.CommuteError as error:
        errors.append(error)
    calls = (
        lambda: table.pull(),
        lambda: table.push(np.ones(SHAPE, dtype=np.int64), timeout=5.0),
        lambda: table.pull_async().wait(5.0),
        lambda: connection.store().flush(),
        lambda: connection.store().dense("x", 3),
        lambda: table.norm(),
    )
    for call in calls:
        try:
            call()
        except commute.CommuteError as error:
            errors.append(error)
    say(errors=[{"kind": type(each).__name__, "text": str(each)} for each in errors])
    connection.close()
    say(closed=True)


def ranks(address, token_file):
    """The ranks of a job are clients too, beside a store of the job's own."""
    with (
        commute.init() as world,
        commute.connect(address, token_file=token_file) as connection,
    ):
        own = world.store(staleness=0).dense("w", 3, "int64")
        shared = connection.store("job").dense("w", 3, "int64")
        for _ in range(10):
            own.push_pull(np.ones(3, dtype=np.int64))
            shared.push(np.ones(3, dtype=np.int64))
        connection.store("job").flush()
        world.barrier()
        say(me=world.rank, fine=True, own=own.pull().tolist(), shared=shared.pull().tolist())


def unclosed(address):
    """Ends without closing anything: its last push counts."""
    table = commute.connect(address).store("counts").dense("sum", SHAPE, "int64")
    table.push(np.ones(SHAPE, dtype=np.int64))


def half_declared(address):
    """Asks for a table and never makes it."""
    from commute import _core

    connection = commute.connect(address)
    endpoint = connection._links.endpoint
    spec = _core.TableSpec(6, 3, _core.Update(0), -1, continues=True)
    call = endpoint.declare_table("default/t", spec, f"dense (3,) {spec.describe()}")
    connection._links.finish(call, "asking", 10.0)
    say(ready=os.getpid())
    wait_for_file("never")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
