# SPDX-License-Identifier: Apache-2.0
"""One link to another member, as the connector's loop thread sees it; its life is told there."""

from __future__ import annotations

import asyncio
import enum
import os
import socket
from typing import Final

from commute.cluster.channels import Connected

__all__ = ["NO_SEGMENT", "Link", "State", "close_segment"]

NO_SEGMENT: Final = -1


class State(enum.Enum):
    ABSENT = "absent"
    DIALLING = "dialling"
    INTRODUCED = "introduced"
    READY = "ready"
    TAKEN = "taken"


class Link:
    """One link, as the loop thread sees it; `ready` is set while connection is."""

    def __init__(self) -> None:
        self.state = State.ABSENT
        self.connection: socket.socket | None = None
        self.segment = NO_SEGMENT
        self.dialled = False  # we dialled the connection that made the link
        self.ready = asyncio.Event()
        # A call that was interrupted takes a moment to let go; the next one waits for it.
        self.opening = asyncio.Lock()
        self.failure = "no attempt was made"

    def settle(self, connection: socket.socket, segment: int, *, dialled: bool) -> None:
        assert self.connection is None
        self.connection = connection
        self.segment = segment
        self.dialled = dialled
        self.state = State.READY
        self.ready.set()

    def take(self) -> Connected:
        if self.connection is None:
            raise ValueError("the link is taken already")
        connected = Connected(self.connection.detach(), self.segment, self.dialled)
        self.connection, self.segment = None, NO_SEGMENT
        self.state = State.TAKEN
        return connected

    @property
    def dead(self) -> bool:
        """Whether the other end of a link that nobody uses yet has closed it."""
        if self.connection is None:
            return True
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
        close_segment(self.segment)
        self.connection, self.segment = None, NO_SEGMENT
        self.dialled = False
        self.state = State.ABSENT
        self.ready.clear()


def close_segment(segment: int) -> None:
    """Close the descriptor, if there is one."""
    if segment != NO_SEGMENT:
        os.close(segment)
