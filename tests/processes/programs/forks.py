# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_forked.py do: the first argument says which part.

Each part prints what it found as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from commute.cluster.children import Guardian, spawn
from commute.cluster.forked import Understudy, fork, has_threads, heed


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def read_all(fd: int) -> str:
    with open(fd) as pipe:
        return pipe.read()


def forked(part: Callable[[], int]) -> tuple[int, str, str]:
    """Its exit status, and what it printed."""
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    process = fork(part, stdout=its_out, stderr=its_err)
    os.close(its_out)
    os.close(its_err)
    printed = read_all(out), read_all(err)
    return process.wait(), *printed


def raising(error: BaseException) -> Callable[[], int]:
    def part() -> int:
        print("before")
        raise error

    return part


def ends() -> None:
    """How it ended, and its last words, are those of a Python process."""
    say(
        returned=forked(lambda: 3),
        raised=forked(raising(ZeroDivisionError("the reason"))),
        exited=forked(raising(SystemExit(4))),
        exited_well=forked(raising(SystemExit())),
        exited_with_words=forked(raising(SystemExit("words"))),
        interrupted=forked(raising(KeyboardInterrupt())),
    )


def state() -> dict[str, Any]:
    """Of this process: open files, signals, place."""
    handled = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
    fds = os.listdir("/proc/self/fd")
    return {
        "files": sorted(int(fd) for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")),
        "stdin": os.readlink("/proc/self/fd/0"),
        "handled": [int(number) for number in handled],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "masked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "wakeup": signal.set_wakeup_fd(-1),
        "leads": os.getpgid(0) == os.getpid(),
        "environment": sorted(os.environ),
    }


def busy_parent() -> list[Any]:
    """Handlers, a mask, a wakeup descriptor and open files, none of which a child may have."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    one, other = socket.socketpair()
    one.setblocking(False)
    signal.set_wakeup_fd(one.fileno())
    return [one, other, os.pipe(), os.open(__file__, os.O_RDONLY)]


def told_state() -> int:
    say(**state())
    return 0


def begins() -> None:
    """A child has nothing of its parent's."""
    kept = busy_parent()
    print(forked(told_state)[1], end="")
    assert kept


def spawned() -> None:
    """A function as a rank: its own group, exactly the given environment, pipes."""
    guardian = Guardian()
    kept = busy_parent()
    env: Mapping[str, str] = {"COMMUTE_RANK": "5", "PATH": "/bin"}
    child = spawn(5, told_state, env, guardian)
    out, err = map(read_all, child.pipes)
    status = child.reap()
    print(json.dumps({**json.loads(out), "status": status, "err": err, "rank": child.rank}))
    guardian.close()
    assert kept


def spawned_and_killed() -> None:
    """The launcher is killed; its rank and what that has started end too."""

    def part() -> int:
        os.system("sleep 300 & echo ready")
        signal.pause()
        return 0

    child = spawn(0, part, os.environ, Guardian())
    with open(child.pipes[0]) as out:
        out.readline()
    os.kill(os.getpid(), signal.SIGKILL)


def unflushed() -> None:
    """What waits in a buffer is written once."""
    sys.stdout.write("once ")
    fork(lambda: 0).wait()
    sys.stdout.write("and no more\n")


def understudies() -> None:
    """One is told, and one is not needed. Ctrl-C does not disturb who waits; it comes later."""

    def part(word: str) -> int:
        came: list[int] = []
        heed(signal.SIGINT, lambda number, frame: came.append(number))
        return len(word) + 100 * len(came)

    told, dismissed, killed = (Understudy(part) for _ in range(3))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(0, signal.SIGINT)
    before = told.poll()
    told.tell("a word with a ü")
    dismissed.dismiss()
    killed.kill()
    killed.wait()
    killed.tell("too late")
    say(
        before=before,
        told=told.wait(),
        dismissed=dismissed.wait(),
        killed=killed.wait(),
        files=len(os.listdir("/proc/self/fd")),
        threads=has_threads(),
    )


def understudies_of_a_killed_process() -> None:
    """They end, all of them, though none was told anything."""
    waiting = [Understudy(lambda word: 1) for _ in range(3)]
    say(waiting=[one.pid for one in waiting])
    os.kill(os.getpid(), signal.SIGKILL)


def server() -> None:
    """A rank whose server was forked before it had threads."""
    from commute.store import start

    start.have_ready(2)
    first, second = start._ready
    if sys.argv[2] == "killed":
        second.kill()
        second.wait()
    import numpy as np

    import commute

    with commute.init() as world:
        store = world.store(staleness=0)
        table = store.dense("w", 4, "float32")
        table.push(np.ones(4, np.float32))
        say(
            value=table.pull().tolist(),
            alone=os.getsid(second.pid) == second.pid,
            called=open(f"/proc/{second.pid}/comm").read().strip(),
            stdout=os.readlink(f"/proc/{second.pid}/fd/1"),
        )
    say(served=second.poll(), waits=first.poll())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
