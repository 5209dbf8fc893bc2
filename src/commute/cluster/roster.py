# SPDX-License-Identifier: Apache-2.0
"""What people read while a world forms: who is there, who is missing, who does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commute.cluster.addresses import is_loopback
from commute.cluster.control import Hello

__all__ = ["misfit", "place", "waiting"]


def waiting(name: str, size: int, hellos: Sequence[Hello], gone: Mapping[int, str]) -> str:
    """Who is missing and who is there: "waiting for ranks 2, 3 of world 'w' (joined: ...)".

    Args:
        hellos: of those who are there, sorted by rank.
        gone: ranks that joined and went away again, and from where.
    """
    there = {hello.rank for hello in hellos}
    missing = [rank for rank in range(size) if rank not in there]
    noun = "rank" if len(missing) == 1 else "ranks"
    left = "".join(
        f"; rank {rank} joined from {where} and went away" for rank, where in gone.items()
    )
    return (
        f"waiting for {noun} {', '.join(_spans(missing))} of world {name!r}"
        f" (joined: {_by_host(hellos)}{left})"
    )


def misfit(name: str, hellos: Sequence[Hello]) -> str | None:
    """Why these processes cannot form one world, as a message; None if they can."""
    first = hellos[0]
    other = next((hello for hello in hellos if hello.size != first.size), None)
    if other is not None:
        return (
            f"the ranks of world {name!r} disagree on its size: rank {first.rank} on {first.host}"
            f" says {first.size}, rank {other.rank} on {other.host} says {other.size}; start all"
            " of them with the same size"
        )
    return _different_versions(name, hellos) or _unreachable(hellos)


def _different_versions(name: str, hellos: Sequence[Hello]) -> str | None:
    versions: dict[str, list[Hello]] = {}
    for hello in hellos:
        versions.setdefault(hello.commute_version, []).append(hello)
    if len(versions) < 2:
        return None
    rows = [
        f"\n  commute {version}, Python {_list(sorted({h.python_version for h in same}))}:"
        f" {'rank' if len(same) == 1 else 'ranks'} {_by_host(same)}"
        for version, same in sorted(versions.items())
    ]
    return (
        f"the members of world {name!r} run different versions of commute; install the same one"
        f" everywhere:{''.join(rows)}"
    )


def _unreachable(hellos: Sequence[Hello]) -> str | None:
    for hello in hellos:
        remote = next((other for other in hellos if other.host != hello.host), None)
        if remote is not None and all(is_loopback(host) for host, _ in hello.addresses):
            return (
                f"rank {hello.rank} on {hello.host} can be reached from its own host only"
                f" ({hello.addresses[0][0] if hello.addresses else 'no address'}), but rank"
                f" {remote.rank} is on {remote.host}; give it the coordinator by an address of the"
                " network, or pass advertise="
            )
    return None


def place(hello: Hello) -> str:
    """Where a process is."""
    return f"{hello.host} (pid {hello.pid})"


def _by_host(hellos: Sequence[Hello]) -> str:
    hosts: dict[str, list[int]] = {}
    for hello in hellos:
        hosts.setdefault(hello.host, []).append(hello.rank)
    return "; ".join(f"{_list(_spans(ranks))} on {host}" for host, ranks in hosts.items())


def _spans(ranks: Sequence[int]) -> list[str]:
    """Sorted ranks, with runs of three and more written as "4-7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return [
        text
        for span in spans
        for text in ([f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span))
    ]


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
