# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks of a group, and what is made of them.

Each pair of ranks has a link of its own for them; messages from one rank to another arrive in the
order in which they were sent, whatever collectives run beside them. `sendrecv` posts both its
messages before it waits for either, so that a ring of ranks that all call it cannot wait for
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commute import _core
from commute._arrays import Buffer, copy_into, empty_like, overlap, reading, writing
from commute._handle import Handle
from commute.group.calls import Calls
from commute.group.scatter_gather import deal, scatter_gather

if TYPE_CHECKING:
    from commute.group.neighbors import Neighbors


class Messages(Calls):
    """What Group inherits: send, recv, sendrecv and their twins."""

    def send(self, x: Any, to: int, *, timeout: float | None = None) -> None:
        """Send x to a rank, which must `recv` an array of the same dtype and length.

        Returns when x may be reused; the message may still be on its way.
        """
        self._runner.finish(self._send(x, to, timeout, background=False))

    def send_async(self, x: Any, to: int, *, timeout: float | None = None) -> Handle:
        """As `send`, returning at once."""
        return Handle(self._runner, self._send(x, to, timeout, background=True), None)

    def recv(self, out: Any, source: int, *, timeout: float | None = None) -> Any:
        """Receive the next message of a rank into out; returns out.

        A timeout before anything arrived leaves the group sound and the message to the next recv.
        """
        operation = self._recv(out, source, timeout, background=False)
        try:
            self._runner.finish(operation, self._timeout if timeout is None else timeout)
        except TimeoutError:
            if not self._runner.withdraw(operation):  # it has begun to arrive: see it through
                self._runner.finish(operation)
                return out
            raise
        return out

    def recv_async(self, out: Any, source: int, *, timeout: float | None = None) -> Handle:
        """As `recv`, returning at once; its timeout gives the operation up and breaks the group."""
        return Handle(self._runner, self._recv(out, source, timeout, background=True), out)

    def sendrecv(
        self,
        x: Any,
        to: int | None,
        source: int | None,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Send x to one rank and receive from another, or the same, at once; returns what came.

        No order of ranks can make it wait for itself: a whole ring may call it.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        ...     world.sendrecv(numpy.arange(3), to=right, source=left)
        array([0, 1, 2])

        Args:
            to, source: None is nobody, for the ends of a line of ranks. Without a source nothing
                arrives, and out is returned as it was. Both may be this rank: then x is copied.
            out: where the message goes; by default a new array like x. It must not overlap x.
            timeout: seconds after which the operation is given up and the group is broken.
        """
        operations, out = self._sendrecv(x, to, source, out, timeout, background=False)
        for operation in operations:
            self._runner.finish(operation)
        return out

    def sendrecv_async(
        self,
        x: Any,
        to: int | None,
        source: int | None,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `sendrecv`, returning at once."""
        operations, out = self._sendrecv(x, to, source, out, timeout, background=True)
        return Handle(self._runner, operations, out)

    def scatter_gather(
        self,
        x: Any,
        sources: Sequence[int],
        destinations: Sequence[int],
        unit: int,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Deal the arrays of some ranks out to others, unit by unit: the general primitive.

        Each source cuts its x along the leading axis into units of `unit` rows. With one unit,
        every destination gets it; with as many units as destinations, each gets the one at its
        place in the list; with a multiple, they are dealt out in turn. A destination returns what
        it gets, source by source, along the leading axis; all other ranks return None.

        With n rows in x, p ranks and `everyone = range(p)`:

            broadcast  sources [root],    destinations everyone,  unit n
            scatter    sources [root],    destinations everyone,  unit n / p
            gather     sources everyone,  destinations [root],    unit n
            allgather  sources everyone,  destinations everyone,  unit n
            alltoall   sources everyone,  destinations everyone,  unit n / p

        It is made of plain messages, for patterns that have no call of their own; the calls of
        those five are quicker.

        >>> import commute, numpy
        >>> with commute.init() as world:
        ...     everyone = range(world.size)
        ...     world.scatter_gather(numpy.arange(3), everyone, everyone, unit=3)
        array([0, 1, 2])

        Args:
            x: the same shape and dtype on all sources. A destination that is none passes an array
                like it, whose values are not read, or None and `out`.
            out: of a destination, where it all goes; it must not overlap x.
        """
        dealt = deal(self, sources, destinations, unit)
        operations, got = scatter_gather(self, x, dealt, out, timeout, background=False)
        return Handle(self._runner, operations, got).wait()

    def scatter_gather_async(
        self,
        x: Any,
        sources: Sequence[int],
        destinations: Sequence[int],
        unit: int,
        *,
        out: Any = None,
        timeout: float | None = None,
    ) -> Handle:
        """As `scatter_gather`, returning at once."""
        dealt = deal(self, sources, destinations, unit)
        operations, got = scatter_gather(self, x, dealt, out, timeout, background=True)
        return Handle(self._runner, operations, got)

    def neighbors(self, shape: Sequence[int], periodic: bool | Sequence[bool] = False) -> Neighbors:
        """This group as a grid of 1, 2 or 3 axes, for the exchange of halos; local and cheap.

        >>> import commute
        >>> with commute.init() as world:
        ...     world.neighbors((1, 1))
        <Neighbors of (0, 0) in a grid of (1, 1)>

        Args:
            shape: how many ranks along each axis; their product is the group's size.
            periodic: whether the ends of an axis are neighbours; for all axes, or one for each.
        """
        from commute.group.neighbors import Neighbors

        return Neighbors(self, shape, periodic)

    def _send(self, x: Any, to: int, timeout: float | None, *, background: bool) -> _core.Operation:
        buffer = reading(x, "send")
        return self._post(buffer, to, timeout, call="send", sends=True, background=background)

    def _recv(
        self, out: Any, source: int, timeout: float | None, *, background: bool
    ) -> _core.Operation:
        buffer = writing(out, "recv")
        return self._post(buffer, source, timeout, call="recv", sends=False, background=background)

    def _sendrecv(
        self,
        x: Any,
        to: int | None,
        source: int | None,
        out: Any,
        timeout: float | None,
        *,
        background: bool,
    ) -> tuple[list[_core.Operation], Any]:
        """Posts both messages; the operations, and what is returned in the end."""
        sent = reading(x, "sendrecv")
        if out is None and source is not None:
            out = empty_like(x, sent.shape)
        received = None if source is None else writing(out, "sendrecv")
        if received is not None and overlap(sent, received):
            raise ValueError("sendrecv got an out= that overlaps x; pass separate memory")
        for peer, role in ((to, "to"), (source, "source")):
            if peer is not None:
                self._check_rank(peer, role, "sendrecv")
        if self.rank in (to, source):
            self._runner.check()
            self._copy_to_myself(sent, to, source, received)
            return [], out
        options: Any = {"call": "sendrecv", "background": background}
        operations = []
        if source is not None and received is not None:
            operations.append(self._post(received, source, timeout, sends=False, **options))
        if to is not None:
            operations.append(self._post(sent, to, timeout, sends=True, **options))
        return operations, out

    def _copy_to_myself(
        self, sent: Buffer, to: int | None, source: int | None, received: Buffer | None
    ) -> None:
        if to != source or received is None:
            raise ValueError(
                f"sendrecv on rank {self.rank} got to={to} and source={source}; whoever sends to"
                " itself must receive from itself, or nobody takes the message"
            )
        if sent.dtype != received.dtype or sent.elements != received.elements:
            raise ValueError(
                f"sendrecv from rank {self.rank} to itself expected out= of {sent.elements}"
                f" elements and the dtype of x, got {received.elements}; allocate it like x"
            )
        copy_into(received, sent)

    def _post(
        self,
        buffer: Buffer,
        peer: int,
        timeout: float | None,
        *,
        call: str,
        sends: bool,
        background: bool,
    ) -> _core.Operation:
        self._runner.check()
        role = "to" if sends else "source"
        self._check_rank(peer, role, call)
        if peer == self.rank:
            raise ValueError(f"{call} needs another rank, got {role}={peer}, which is this one")
        limit = self._timeout if timeout is None else timeout
        self._wiring.pair(peer, limit, self._runner.check)
        # A blocking recv keeps its own time, so that it can be taken back.
        deadline = float("inf") if call == "recv" and not background else limit
        return self._runner.start(
            lambda: self._runner.engine.post(
                sends, peer, buffer.address, buffer.elements, buffer.dtype, deadline, background
            ),
            keep=buffer,
        )
