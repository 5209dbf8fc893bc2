# SPDX-License-Identifier: Apache-2.0
"""commute.connect: from any Python process to a server of `commute serve`, as an observer.

visit       the handshake; the server gives this client a number
health      a thread of the core: heartbeats, and the server's end
channels    one to each shard, through shared memory on the server's host, else TCP
"""

from __future__ import annotations

import contextlib
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Final

from commute import _core
from commute._errors import AuthenticationError, CommuteError, SettingError
from commute._runner import GOODBYE_SECONDS
from commute._settings import Settings
from commute.store.links import seconds
from commute.store.observer import ObserverLinks, ObserverStore
from commute.store.store import Store

if TYPE_CHECKING:
    from commute.cluster.visit import Visit

__all__ = ["Connection", "connect"]

MEND_SECONDS: Final = 0.5
# What a connection that nobody closed may take to have its last pushes committed.
LAST_SECONDS: Final = 5.0


def connect(
    address: str,
    *,
    token: str | None = None,
    token_file: str | None = None,
    timeout: float = 30.0,
) -> Connection:
    """Connect to a server that `commute serve` keeps up, from a notebook or any other process.

    Args:
        address: "host:port", as the server prints it.
        token, token_file: the server's token, or the file (mode 600) it is in; by default those of
            COMMUTE_TOKEN and COMMUTE_TOKEN_FILE.
        timeout: seconds to wait for the server to come up.

    Raises:
        JoinError: nobody answers at this address, or what does is no server.
        AuthenticationError: there is no token, or the server has another one.
    """
    from commute.cluster.visit import Visit  # here, so that `import commute` is quick

    limit = seconds(timeout)
    settings = Settings(None, None, None, None, None, None, None)
    visit = Visit(address, _token(token, token_file))
    try:
        visit.enter(limit)
        return Connection(_dialled(visit, settings, limit), visit.address, settings.timeout)
    except BaseException:
        visit.close()
        raise


def _token(token: str | None, token_file: str | None) -> str:
    from commute.cluster.auth import check_token, read_token

    if token is not None and token_file is not None:
        raise SettingError("token= and token_file= say the same; give one of them")
    if token is not None:
        check_token(token, source="token=")
        return token
    where = {"COMMUTE_TOKEN_FILE": os.path.expanduser(token_file)} if token_file else os.environ
    found = read_token(where)
    if found is None:
        raise AuthenticationError(
            "connecting needs the server's token; pass token= or token_file=, or set COMMUTE_TOKEN"
            " or COMMUTE_TOKEN_FILE; `commute serve` prints where its token is"
        )
    return found


def _dialled(visit: Visit, settings: Settings, limit: float) -> ObserverLinks:
    """The links of an observer, with a channel to every shard."""
    admitted = visit.admitted
    segment = _core.channel_segment if settings.shared_memory else None
    endpoint = _core.StoreEndpoint(admitted.observer, admitted.shards)
    health = _core.watch_endpoint(endpoint, admitted.observer, 0, settings.peer_timeout)
    health.add(visit.take_control(), 0)

    def dial(shard: int, within: float) -> None:
        found = visit.open_channel(shard, within, segment)
        endpoint.add_channel(shard, found.socket, found.segment)

    def mend(shard: int) -> bool:
        with contextlib.suppress(CommuteError, OSError):
            dial(shard, MEND_SECONDS)
            return True
        return False  # it will be tried again, until the health thread says that the server died

    def close(well: bool, lost: bool) -> None:
        health.close(not well, "" if well else "it failed", GOODBYE_SECONDS)
        visit.close()

    server = f"the server at {visit.address} (pid {admitted.pid} on {admitted.host})"
    alone = admitted.shards == 1
    links = ObserverLinks(
        endpoint,
        admitted.observer,
        mend=mend,
        where=lambda shard: server if alone or shard < 0 else f"shard {shard} of {server}",
        on_close=close,
        server=server,
        address=visit.address,
    )
    try:
        for shard in range(admitted.shards):
            dial(shard, limit)
    except BaseException:
        links.close(well=False)
        raise
    return links


class Connection:
    """A client of a server. Made by `commute.connect`; close it, or use it in a with-block.

    The tables stay on the server when the connection is closed.

    Attributes:
        address: of the server, "host:port".
        number: of this client, as the server's log and `commute status` show it.
    """

    def __init__(self, links: ObserverLinks, address: str, timeout: float) -> None:
        self.address = address
        self.number = links.rank
        self._links = links
        self._timeout = timeout
        # Also when it is let go without close(), and at the end of the process.
        self._finalizer = weakref.finalize(self, _end, links, LAST_SECONDS)

    def __repr__(self) -> str:
        state = "" if self._links.usable else ", closed"
        return f"<Connection to {self._links.server} as client {self.number}{state}>"

    def store(self, name: str = "default", *, timeout: float | None = None) -> Store:
        """A named set of tables on the server; clients that name the same one share its tables.

        Args:
            timeout: seconds after which a call is given up (1800; COMMUTE_TIMEOUT).
        """
        self._links.check()
        limit = self._timeout if timeout is None else seconds(timeout)
        return ObserverStore(self, self._links, name, limit)

    def close(self) -> None:
        """Wait until what was pushed is committed, and go. Idempotent.

        Where the server is gone nothing is waited for.
        """
        self._finalizer.detach()
        _end(self._links, self._timeout)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error what is under way gets a moment, not all the time there is.
        self.close() if kind is None else self._finalizer()


def _end(links: ObserverLinks, flush_s: float) -> None:
    if links.usable:
        with contextlib.suppress(CommuteError):
            links.flush(flush_s)
    links.close()
