# SPDX-License-Identifier: Apache-2.0
"""The store of an observer: a client of `commute serve` that has no clock and never waits.

Its tables are at staleness None: a push is applied when it arrives, a pull returns what is there.
Whoever declares a table first makes it. If that client goes before all parts are made, those who
wait for a part ask the directory to name one of them in its place.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from commute import _core
from commute._errors import (
    CommuteError,
    OperationTimeoutError,
    PeerLostError,
    SettingError,
    SlotLostError,
)
from commute.store.links import StoreLinks, seconds
from commute.store.store import Store

if TYPE_CHECKING:
    from commute.store.connection import Connection

__all__ = ["ObserverLinks", "ObserverStore"]

# A maker that is there and does not make its table was interrupted; one that is only slow has sent
# 1 GB in less.
PATIENCE_SECONDS: Final = 60.0


class ObserverLinks(StoreLinks):
    """The endpoint of an observer; `server` is who is at its other end, in words."""

    _CLOSED = "the connection to the server is closed; make a new one with commute.connect"

    def __init__(self, *args: Any, server: str, address: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.me = f"client {self.rank}"
        self.server = server
        self._address = address

    def _failure(self, args: tuple[Any, ...]) -> CommuteError:
        if args[1] == self.rank:
            return PeerLostError(
                f"{self.server} has given up this client, {self.me}: {args[4]}; connect again with"
                f" commute.connect({self._address!r})",
                rank=self.rank,
            )
        return super()._failure(args)

    def _server_lost(self, rank: int, text: str) -> CommuteError:
        return SlotLostError(
            f"{self.server} was lost, and with it its tables: {text}; start it again with `commute"
            f" serve`, then connect again with commute.connect({self._address!r})"
        )


class ObserverStore(Store):
    """A named set of tables on a server of `commute serve`. Made by `Connection.store`.

    As the store of a worker, with all tables at staleness None. Other clients that name the same
    store share its tables, which stay on the server when a client goes.
    """

    def __init__(
        self, connection: Connection, links: ObserverLinks, name: str, timeout: float
    ) -> None:
        super().__init__(
            links,
            name,
            group=None,
            staleness=None,
            deterministic=False,
            on_loss=None,
            timeout=timeout,
        )
        self._connection = connection  # it lives as long as its stores are used
        self._server = links.server

    def __repr__(self) -> str:
        return f"<Store {self.name!r} on {self._server}, {len(self._tables)} tables>"

    def _check_rounds(self, staleness: int | None, reduce: str, deterministic: Any) -> None:
        asked = [f"staleness={staleness}"] * (staleness is not None)
        asked += [f"reduce={reduce!r}"] * (reduce == "mean")
        asked += ["deterministic=True"] * bool(deterministic)
        if asked:
            raise SettingError(
                f"{' and '.join(asked)} cannot be on a connection: clients come and go, so there"
                " are no rounds, and every push is applied when it arrives (staleness None); leave"
                " it out, or train in a job, with commute.init() and world.store()"
            )

    def _say_left(self, limit: float) -> None:
        """Nobody counts an observer, so nobody has to be told."""

    def _declare(
        self, name: str, spec: _core.TableSpec, declaration: str, first: Any, timeout: float | None
    ) -> int:
        deadline = time.monotonic() + (self.timeout if timeout is None else seconds(timeout))
        full_name, instead_of = f"{self.name}/{name}", -1
        while True:
            number = self._place(full_name, spec, declaration, deadline, instead_of)
            if name in self._tables:
                return number
            try:
                self._make(full_name, spec, first, deadline, PATIENCE_SECONDS)
                return number
            except PeerLostError as error:
                if error.rank == self._links.rank:
                    raise
                instead_of = error.rank
            except OperationTimeoutError:
                if time.monotonic() >= deadline:
                    raise
                instead_of = self._links.endpoint.maker_of(full_name)
