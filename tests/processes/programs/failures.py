# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_failures.py do: the first argument says which scenario.

The test waits for the lines that are printed here ("ready", "waiting ..."), injects the fault, and
reads what every rank says about it: one line of JSON after the word "said".
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import commute

LARGE = 2_000_000


def say(**what):
    print("said", json.dumps(what), flush=True)


def report(world, error, **more):
    """What this rank was told, when, and that the next call says the same."""
    at = time.time()
    again = None
    try:
        world.barrier()
    except commute.CommuteError as next_error:
        again = type(next_error).__name__
    say(
        me=world.rank,
        kind=type(error).__name__,
        again=again,
        at=at,
        text=str(error),
        rank=getattr(error, "rank", None),
        host=getattr(error, "host", None),
        pid=getattr(error, "pid", None),
        notes=getattr(error, "__notes__", []),
        **more,
    )


def lost():
    """Rank 2 is killed or stopped by the test while the others wait, each in another way."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends us only after we have spoken
    world = commute.init(peer_timeout=float(sys.argv[2]))
    world.allreduce(np.ones(4))
    waits = {
        0: lambda: world.allreduce(np.ones(LARGE)),
        1: lambda: world.allreduce_async(np.ones(LARGE)).wait(),
        3: lambda: world.recv(np.ones(4), source=0),  # of a rank that lives
    }
    print(f"ready {world.rank} {os.getpid()}", flush=True)
    if world.rank == 2:
        signal.pause()
    try:
        waits[world.rank]()
    except commute.CommuteError as error:
        report(world, error)
    begun = time.monotonic()
    world.close()
    say(me=world.rank, closed_after=time.monotonic() - begun)


def lost_during():
    """Rank 2 is killed by the test in the middle of a call that moves much."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = commute.init()
    counts = [LARGE // 20] * world.size
    known = counts if world.rank == 0 else None  # of the rows that come
    x = world.empty((world.size, LARGE // 20))
    x[:] = 1
    calls = {
        "reductions_in_place": lambda: world.allreduce(x, "max"),
        "rows": lambda: world.alltoall_v(x.reshape(-1), counts, known),
        "blocks": lambda: world.alltoall(x),
    }
    call = calls[sys.argv[2]]
    call()
    print(f"ready {world.rank} {os.getpid()}", flush=True)
    try:
        while True:
            call()
    except commute.CommuteError as error:
        report(world, error)
    world.close()
    say(me=world.rank, left=float(x.min()))  # the array is there, whatever it holds


def cut():
    """The test cuts the link between two hosts while the ranks work; nobody can say goodbye."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = commute.init(peer_timeout=float(sys.argv[2]))
    for _ in range(3):
        world.allreduce(np.ones(LARGE))
        world.barrier()
    print(f"ready {world.rank} {os.getpid()}", flush=True)
    try:
        while True:
            world.allreduce(np.ones(50_000))
    except commute.CommuteError as error:
        report(world, error)
    begun = time.monotonic()
    world.close()
    say(me=world.rank, closed_after=time.monotonic() - begun)


def raises():
    """Rank 1 leaves by an exception: in the with-block, or at the end of the program."""
    where = sys.argv[2]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = commute.init()
    if world.rank == 1:
        world.barrier()  # all have started: what follows is no failure to start
        if where == "block":
            with world:
                raise ValueError("the reason\nin two lines")
        raise ValueError("the reason\nin two lines")
    try:
        world.barrier()
        world.allreduce(np.ones(LARGE))
    except commute.CommuteError as error:
        report(world, error)


def leaves():
    """Rank 0 gives away what it has and ends at once; the others use it when it is long gone."""
    with commute.init() as world:
        x = np.full(2000, world.rank + 1.0)
        pids = world.allgather(np.array(os.getpid()))
        if world.rank == 0:
            world.broadcast(x)
            world.send(x, to=2)
            world.send(np.full(1000, 7.0), to=2)
            return
        while Path(f"/proc/{pids[0]}").exists():
            time.sleep(0.02)
        world.broadcast(x)
        assert x[-1] == 1.0
        if world.rank == 2:
            assert world.recv(np.empty(2000), source=0)[-1] == 1.0
            assert world.recv(np.empty(1000), source=0)[-1] == 7.0
        others_go_on(world, 1, 2)
        say(me=world.rank, fine=True)
        # Both have all they need before the next call breaks the group.
        Path(f"fine{world.rank}").touch()
        while not (Path("fine1").exists() and Path("fine2").exists()):
            time.sleep(0.02)
        try:
            world.allreduce(np.ones(3))
        except commute.PeerLostError as error:
            report(world, error)


def others_go_on(world, sender, receiver):
    """Messages between those who stay still work."""
    if world.rank == sender:
        world.send(np.ones(5), to=receiver)
    else:
        world.recv(np.empty(5), source=sender)


def forgets():
    """Nobody closes anything: the interpreter's end does."""
    world = commute.init()
    world.barrier()
    say(me=world.rank, fine=True)


def large_goodbye():
    """A broadcast of 32 MB whose root ends at once."""
    with commute.init() as world:
        x = np.full(8 << 20, float(world.rank), "float32")
        world.broadcast(x, root=1)
        assert (x == 1.0).all()
    say(me=world.rank, fine=True)


def interpreter_held():
    """Rank 1 holds the interpreter's lock for ten times peer_timeout; nobody takes it for dead."""
    with commute.init(peer_timeout=1) as world:
        world.allreduce(np.ones(4))
        if world.rank == 1:
            begun = time.monotonic()
            ctypes.PyDLL(None).usleep(10_000_000)
            assert time.monotonic() - begun >= 10
        assert world.allreduce(np.ones(4))[0] == world.size
        say(me=world.rank, fine=True)


def loaded():
    """Many ranks on cores that others keep busy, for several times peer_timeout."""
    with commute.init(peer_timeout=1) as world:
        until = time.monotonic() + 6
        rounds = 0
        going = np.ones(1)
        while going[0]:
            assert world.allreduce(np.ones(20_000))[-1] == world.size
            rounds += 1
            going[0] = time.monotonic() < until
            world.broadcast(going)
        say(me=world.rank, fine=True, rounds=rounds)


def interrupted():
    """Rank 0 waits in each way in turn, each in a world of its own; the test presses Ctrl-C."""
    first = commute.init()
    for what in ("allreduce", "recv", "barrier", "wait", "send", "init"):
        world = None if what == "init" else commute.init(name=what)
        if world is not None:
            world.barrier()
        if first.rank == 0:
            wait_for_ctrl_c(world, what)
        elif world is not None:
            after_the_other_was_interrupted(world, what)
        first.barrier()
        if world is not None:
            world.close()
    first.close()
    say(me=first.rank, fine=True)


def wait_for_ctrl_c(world, what):
    big, huge = np.ones(LARGE), np.ones(64 << 20, "uint8")  # made before: it takes a while
    waits = {
        "allreduce": lambda: world.allreduce(big),
        "recv": lambda: world.recv(big, source=1),
        "barrier": lambda: world.barrier(),
        "wait": lambda: world.allreduce_async(big).wait(),
        "send": lambda: world.send(huge, to=1),
        "init": lambda: commute.init(name="never"),
    }
    print(f"waiting {what} {os.getpid()}", flush=True)
    try:
        waits[what]()
    except KeyboardInterrupt:
        say(interrupted=what, at=time.time())


def after_the_other_was_interrupted(world, what):
    """The rank that was not interrupted hears that the other gave up."""
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            world._runner.check()
        except commute.CommuteError as error:
            say(told=what, kind=type(error).__name__, text=str(error))
            return
        time.sleep(0.01)


def forked():
    """A child of fork must not use the group; its parent does not notice."""
    world = commute.init()
    world.allreduce(np.ones(4))
    handle = world.allreduce_async(np.ones(LARGE))
    child = os.fork()
    if child == 0:
        kinds = []
        for call in (world.barrier, lambda: world.allreduce_async(np.ones(2)), handle.wait):
            try:
                call()
                kinds.append("nothing")
            except commute.CommuteError as error:
                kinds.append(type(error).__name__)
        world.close()
        say(child=kinds)
        sys.exit(0)  # runs what is registered atexit, as a multiprocessing child might
    _, status = os.waitpid(child, 0)
    assert handle.wait()[-1] == world.size
    world.barrier()
    assert world.allreduce(np.ones(4))[0] == world.size
    say(me=world.rank, fine=True, status=status)
    world.close()


def closes():
    """close() with operations under way, and twice, and while a thread waits."""
    world = commute.init()
    world.barrier()
    if world.rank == 0:
        handles = [world.allreduce_async(np.ones(LARGE)), world.recv_async(np.ones(3), source=1)]
        thread = threading.Thread(target=lambda: swallow(world.barrier), daemon=True)
        thread.start()
        begun = time.monotonic()
        world.close()
        world.close()
        took = time.monotonic() - begun
        thread.join(5)
        kinds = [swallow(handle.wait) for handle in handles]
        say(me=0, took=took, stuck=thread.is_alive(), kinds=kinds)
    else:
        # Not the allreduce: it might be done before the other closes.
        say(me=1, kind=swallow(lambda: world.recv(np.ones(3), source=0)))
        begun = time.monotonic()
        world.close()
        say(me=1, took=time.monotonic() - begun)


def swallow(call):
    try:
        call()
    except commute.CommuteError as error:
        return type(error).__name__
    return "nothing"


def mismatched():
    """Rank 1 brings an array of another length."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = commute.init()
    world.allreduce(np.ones(6), algorithm="tree")
    world.send(np.ones(2), to=1) if world.rank == 0 else None
    world.recv(np.ones(2), source=0) if world.rank == 1 else None
    try:
        world.allreduce(np.ones(1000 + (world.rank == 1), "float32"))
    except commute.CommuteError as error:
        report(world, error)


def other_plans():
    """Rank 1 forces an algorithm that sends messages; rank 0 may choose one that sends none."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = commute.init()
    try:
        if world.rank == 1:
            world.allreduce(np.ones(6), algorithm="ring")
        else:
            world.allreduce(np.ones(6))
    except commute.CommuteError as error:
        report(world, error)


def interrupted_at_once():
    """A signal that raises comes before the first slice of a short wait has passed."""

    def ring(*_):
        raise KeyboardInterrupt

    world = commute.init()
    x = np.ones(5)
    world.allreduce(x)
    world.barrier()
    try:
        if world.rank == 0:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        else:
            time.sleep(1.0)
        world.allreduce(x)
    except KeyboardInterrupt:
        report(world, KeyboardInterrupt())
    except commute.CommuteError as error:
        report(world, error)
    world.close()


def slow():
    """Rank 1 never comes; rank 0's call has a timeout."""
    world = commute.init()
    world.barrier()
    try:
        if world.rank != 1:
            world.allreduce(np.ones(5), timeout=0.5 if world.rank == 0 else 30)
        else:
            after_the_other_was_interrupted(world, "timeout")
            world.barrier()
    except commute.CommuteError as error:
        report(world, error)
    world.close()


def bothered():
    """Works on while strangers knock at its ports, until the test has made the file `stop`."""
    with commute.init() as world:
        stop = Path(sys.argv[2])
        going, rounds = np.ones(1), 0
        while going[0]:
            assert world.allreduce(np.ones(5000))[-1] == world.size
            rounds += 1
            if rounds == 5:
                print(f"ready {world.rank} {os.getpid()}", flush=True)
            going[0] = not stop.exists()
            world.broadcast(going)
        say(me=world.rank, fine=True, refused=world._wiring._connector.refused)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
