# SPDX-License-Identifier: Apache-2.0
"""How much CPU others took while we measured.

Stolen: time the hypervisor ran somebody else on our cores (`steal` in /proc/stat). Foreign: time of
every process that is not ours, where ours are this process, its descendants and the ranks that
reported to it. Kernel threads are nobody's: the work of ksoftirqd between two network namespaces is
caused by what we measure.

/proc counts in ticks of 10 ms, so a span should last a second or so for a bound of 2% to mean
anything. A process that came and went within the span is seen in its parent's time of waited-for
children; what that parent got from children already counted at the start is taken off again.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

LIMIT = 0.02
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h


@dataclass(frozen=True)
class Process:
    parent: int
    own_ticks: int
    children_ticks: int  # of children that ended and were waited for


@dataclass(frozen=True)
class Snapshot:
    at: float
    stolen_ticks: int
    processes: dict[tuple[int, int], Process]  # by pid and start time: pids are used again


@dataclass(frozen=True)
class Noise:
    """Shares of the CPU time of all cores, between 0 and 1."""

    stolen: float
    foreign: float

    @property
    def too_much(self) -> bool:
        return self.stolen + self.foreign > LIMIT


def snapshot() -> Snapshot:
    return Snapshot(time.monotonic(), _stolen_ticks(), dict(_processes()))


def between(before: Snapshot, after: Snapshot, *, ours: Iterable[int] = ()) -> Noise:
    """Pids in `ours`, and all their descendants, are not foreign; this process is always ours."""
    core_ticks = (after.at - before.at) * _TICKS_PER_SECOND * (os.cpu_count() or 1)
    everyone = {**before.processes, **after.processes}
    own = _with_descendants({os.getpid(), *ours}, everyone)
    ticks = 0
    for key, now in after.processes.items():
        if key[0] not in own:
            ticks += _ticks_used(key, now, before, after)
    stolen = after.stolen_ticks - before.stolen_ticks
    return Noise(stolen / core_ticks, ticks / core_ticks)


def _ticks_used(key: tuple[int, int], now: Process, before: Snapshot, after: Snapshot) -> int:
    then = before.processes.get(key, Process(now.parent, 0, 0))
    counted_at_start = sum(
        child.own_ticks + child.children_ticks
        for child_key, child in before.processes.items()
        if child.parent == key[0] and child_key not in after.processes
    )
    from_children = now.children_ticks - then.children_ticks - counted_at_start
    return now.own_ticks - then.own_ticks + max(0, from_children)


def _with_descendants(roots: set[int], processes: dict[tuple[int, int], Process]) -> set[int]:
    found = set(roots)
    while True:
        more = {pid for (pid, _), p in processes.items() if p.parent in found} - found
        if not more:
            return found
        found |= more


def _stolen_ticks() -> int:
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8])


def _processes() -> Iterable[tuple[tuple[int, int], Process]]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # A process may end between the listing and the reading.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The command, in parentheses, may hold anything; numbers begin after the last one.
                fields = file.read().rpartition(")")[2].split()
            if int(fields[6]) & _KERNEL_THREAD:
                continue
            own = int(fields[11]) + int(fields[12])
            children = int(fields[13]) + int(fields[14])
            yield (int(name), int(fields[19])), Process(int(fields[1]), own, children)
