# SPDX-License-Identifier: Apache-2.0
"""Starting a server of a store: a new process, or an understudy where one waits.

A process that knows that it will start servers may have some ready: forked before it has threads,
with all imported, and told their place when the first store is gathered.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from commute.cluster.forked import Forked, Understudy, heed, name_process

__all__ = ["ServerProcess", "have_ready", "start_server"]

ServerProcess = subprocess.Popen[bytes] | Forked

_ready: list[Understudy] = []


def have_ready(servers: int) -> None:
    """Forks understudies; this process has no thread yet. Those not needed end with it."""
    from commute.store import server  # noqa: F401  here, so that it is not imported in each

    _ready.extend(Understudy(_serve) for _ in range(servers))


def start_server(arguments: Sequence[str], token: str) -> ServerProcess:
    """A server in a session of its own: what ends this process, or the terminal's Ctrl-C, does not
    reach it."""
    if _ready:
        understudy = _ready.pop()
        understudy.tell(msgspec.json.encode([arguments, token]).decode())
        return understudy
    return subprocess.Popen(
        [sys.executable, "-m", "commute.store.server", *arguments],
        env={**os.environ, "COMMUTE_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _serve(word: str) -> int:
    from commute.store import server

    arguments, token = msgspec.json.decode(word, type=tuple[list[str], str])
    os.setsid()
    heed(signal.SIGINT, signal.SIG_IGN)  # the workers decide when it is over
    name_process("commute-server")
    os.dup2(0, 1)
    os.environ["COMMUTE_TOKEN"] = token
    return server.main(arguments)
