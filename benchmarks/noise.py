# SPDX-License-Identifier: Apache-2.0
"""How much CPU others took while we measured.

Stolen: time the hypervisor ran somebody else on our cores (`steal` in /proc/stat). Foreign: time of
every process that is not ours, where ours are this process, its descendants and the ranks that
reported to it. Kernel threads are nobody's: the work of ksoftirqd between two network namespaces is
caused by what we measure.

/proc counts in ticks of 10 ms, so a span should last a second or so for a bound of 2% to mean
anything. A process that came and went within the span is seen in its parent's time of waited-for
children; what that parent inherited from descendants seen at the start is taken off again.
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
    inherited = _inherited_ticks(before, after)
    ticks = sum(
        _ticks_used(now, before.processes.get(key), inherited.get(key[0], 0))
        for key, now in after.processes.items()
        if key[0] not in own
    )
    stolen = after.stolen_ticks - before.stolen_ticks
    return Noise(stolen / core_ticks, ticks / core_ticks)


def _ticks_used(now: Process, then: Process | None, inherited: int) -> int:
    own_before, children_before = (then.own_ticks, then.children_ticks) if then else (0, 0)
    from_children = now.children_ticks - children_before - inherited
    return now.own_ticks - own_before + max(0, from_children)


def _inherited_ticks(before: Snapshot, after: Snapshot) -> dict[int, int]:
    """By pid: the time that a process had from ended descendants, used before the span began."""
    by_pid = {key[0]: (key, p) for key, p in before.processes.items()}
    inherited: dict[int, int] = {}
    for key, process in before.processes.items():
        if key in after.processes:
            continue
        heir = process.parent
        while heir in by_pid and by_pid[heir][0] not in after.processes:
            heir = by_pid[heir][1].parent
        ticks = process.own_ticks + process.children_ticks
        inherited[heir] = inherited.get(heir, 0) + ticks
    return inherited


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
