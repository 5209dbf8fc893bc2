# SPDX-License-Identifier: Apache-2.0
"""A `commute serve` of its own for a test: a port from the kernel, a token, and its clients."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commute

COMMUTE = [sys.executable, "-m", "commute"]
PROGRAM = Path(__file__).parent / "processes" / "programs" / "serve.py"
HOST = socket.gethostname()


def eventually(condition: Callable[[], Any], what: str, within: float = 20.0) -> Any:
    """Waits until the condition holds, and returns what it gave."""
    until = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < until, what
        time.sleep(0.02)
    return found


class Server:
    """A `commute serve`, and what its clients need."""

    def __init__(self, job: Callable[..., Any], folder: Path, *flags: str, port: int = 0) -> None:
        self.token_file = folder / "token"
        self.replays = folder / "replays"
        self.replays.mkdir(exist_ok=True)
        command = [*COMMUTE, "serve", "--port", port, "--token-file", self.token_file, *flags]
        self._start = job
        self.job = job(command, env={"COMMUTE_REPLAYS": str(self.replays)}, timeout=55.0)
        self.job.wait_for("connect with:")
        self.address = re.search(r"listening on (\S+),", self.job.out)[1]
        self.pid = self.job.process.pid

    def connect(self, **options: Any) -> commute.Connection:
        return commute.connect(self.address, token_file=str(self.token_file), **options)

    def client(self, scenario: str, *arguments: object, env: dict[str, str] | None = None) -> Any:
        """A client process."""
        command = [sys.executable, PROGRAM, scenario, self.address, *map(str, arguments)]
        return self._start(command, env={**self.env, **(env or {})}, timeout=50.0)

    @property
    def env(self) -> dict[str, str]:
        return {"COMMUTE_TOKEN_FILE": str(self.token_file)}

    def status(self) -> dict[str, Any]:
        """As `commute status --json` prints it."""
        asked = self._start([*COMMUTE, "status", self.address, "--json"], env=self.env).wait()
        assert asked.code == 0, asked.err
        return json.loads(asked.out)

    def end(self, number: int = signal.SIGTERM) -> Any:
        """Ends it by a signal; its slots must be what their ops make."""
        self.job.process.send_signal(number)
        ended = self.job.wait(15.0)
        reports = [path.read_text() for path in self.replays.glob("*.replay")]
        assert reports and all(report.endswith(", equal") for report in reports), reports
        return ended


def said(started: Any, key: str) -> list[dict[str, Any]]:
    lines = re.findall(r"said (\{.*\})$", started.out, re.M)
    return [line for line in map(json.loads, lines) if key in line]
