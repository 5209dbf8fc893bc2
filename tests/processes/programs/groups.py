# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_groups.py do: the first argument says which part."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time

import numpy as np
from saying import leave_file, say, wait_for_file

import commute

SOAK = 2000


def everything(group):
    """Every kind of call, small and large, against NumPy."""
    parts = np.stack([np.arange(7.0) + 10 * rank for rank in range(group.size)])
    mine = parts[group.rank]
    for _ in range(3):  # the compiled calls take over from the second on
        np.testing.assert_array_equal(group.allreduce(mine.copy()), parts.sum(0))
        np.testing.assert_array_equal(group.broadcast(mine.copy(), group.size - 1), parts[-1])
        group.barrier()
    np.testing.assert_array_equal(group.allgather(mine), parts)
    np.testing.assert_array_equal(group.reduce_scatter(parts), group.size * mine)
    total = sum(range(group.size))
    for length in (100_000, 1_000_001):
        got = group.allreduce(np.full(length, float(group.rank)))
        np.testing.assert_array_equal(got, total)
    if group.size > 1:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent = group.send_async(np.full(200_000, group.rank), to=right)
        np.testing.assert_array_equal(group.recv(np.zeros(200_000, int), source=left), left)
        sent.wait()


def places(world):
    """Groups of all sizes, groups of groups, and splits; each says where it works."""
    found = {}
    for chosen in ([0], [3, 1], [2, 3, 0], [3, 2, 1, 0]):
        group = world.group(chosen)
        inner = group.group(range(group.size - 1, -1, -2))
        for each in (group, inner):
            if world.rank in each:
                everything(each)
                found[str(each.ranks)] = each._wiring.place
    halves = world.split(world.rank // 2)
    everything(halves)
    found["half"] = halves._wiring.place
    everything(world)
    return {"places": found}


def in_threads(works):
    errors = []

    def body(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def soak(world):
    """Groups that share ranks, each driven by its own thread on every member, and the world."""

    def use(group, salt):
        choices = np.random.default_rng(salt)  # the same on all members
        for number in range(SOAK):
            length = int(2 ** choices.uniform(0, 13)) - 1
            value = salt * number
            got = group.allreduce(np.full(length, value + group.rank))
            expected = group.size * value + sum(range(group.size))
            np.testing.assert_array_equal(got, expected)
            if number % 16 == 0:
                root = number // 16 % group.size
                assert group.broadcast(np.array([salt, group.rank]), root).tolist() == [salt, root]
                peer = group.rank ^ 1
                if peer < group.size:
                    sent = group.send_async(np.array([value, group.rank]), to=peer)
                    assert group.recv(np.zeros(2, int), source=peer).tolist() == [value, peer]
                    sent.wait()

    teams = [world.group([0, 1, 2]), world.group([2, 1]), world.group([0, 1, 2])]
    in_threads(
        [
            lambda team=team, salt=salt: use(team, salt)
            for salt, team in enumerate(teams, 3)
            if world.rank in team
        ]
        + [lambda: use(world, 17)]
    )


def any_order(world):
    """Groups are first used in another order on each rank, or before the others have made them."""
    teams = [world.group([0, 1]), world.group([1, 0])]
    order = teams if world.rank else teams[::-1]
    handles = {id(team): team.allreduce_async(np.ones(3)) for team in order}
    assert all(handle.wait()[0] == 2 for handle in handles.values())
    # Rank 1 makes this group only after it has heard from rank 0, which has used it by then.
    if world.rank == 0:
        late = world.group([0, 1])
        waiting = late.recv_async(np.zeros(1), source=1)
        summed = late.allreduce_async(np.ones(2))
        world.send(np.ones(1), to=1)
        assert waiting.wait()[0] == 7 and summed.wait()[0] == 2
    else:
        world.recv(np.zeros(1), source=0)
        late = world.group([0, 1])
        late.send(np.full(1, 7.0), to=0)
        assert late.allreduce(np.ones(2))[0] == 2


def raised(call, *args, **options):
    """What the call raises, as the test wants to see it."""
    try:
        call(*args, **options)
    except commute.CommuteError as error:
        return {
            "kind": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "pid": getattr(error, "pid", None),
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
        }
    return None


def lost(world):
    """Rank 2 is killed by the test while the others wait; groups without it go on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends us only after we have spoken
    used, unused, whole = world.group([3, 2, 1]), world.group([2, 0, 3]), world.group([3, 0, 1])
    if world.rank in used:
        everything(used)
    if world.rank in whole:
        everything(whole)
    world.barrier()
    say(me=world.rank, ready=os.getpid())
    if world.rank == 2:
        time.sleep(60)
    found = {"world": raised(world.barrier)}
    if world.rank in used:
        found["used"] = raised(used.allreduce, np.ones(3))
    if world.rank in unused:
        found["unused"] = raised(unused.allreduce, np.ones(3))
    everything(whole)
    survivors = world.group([0, 1, 3])
    everything(survivors)
    return found


def left(world):
    """Members close a group, one of them by an exception; the others use it once more."""
    well, badly, unused = (world.group([2, 0, 1]) for _ in range(3))
    for group in (well, badly):
        everything(group)
    world.barrier()  # whoever fails ends what the others have under way
    if world.rank == 2:
        well.close()
        unused.close()
        try:
            with badly:
                raise RuntimeError("boom")
        except RuntimeError:
            pass
        found = {"closed": raised(well.barrier)}
    else:
        found = {
            "well": raised(well.allreduce, np.ones(3)),
            "badly": raised(badly.allreduce, np.ones(3)),
            "unused": raised(unused.allreduce, np.ones(3)),
        }
    everything(world)
    return found


def broken(world):
    """What breaks a group is told to all its members, also before they have used it."""
    group, other = world.group([0, 1, 2]), world.group([0, 1, 2])
    if world.rank == 2:
        wait_for_file("broken")
        found = raised(group.allreduce, np.ones(3))
    else:
        found = raised(group.allreduce, np.ones(3 + world.rank))
        if world.rank == 0:
            leave_file("broken", "")
    everything(other)
    everything(world)
    return {"error": found}


def come_and_go(world):
    """Groups that are used, closed and let go leave no descriptor and no thread behind."""

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    counts = []
    for _ in range(20):
        with world.group([1, 0]) as group:
            everything(group)
            group.barrier_async().wait()
        del group
        world.barrier()
        counts.append(held())
    return {"counts": counts}


def no_memory(world):
    """Rank 1 cannot have memory for a group; both are told, and the world goes on."""
    group = world.group([1, 0])
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    world.barrier()
    found = raised(group.allreduce, np.ones(3))
    world.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    everything(world)
    return {"error": found}


def at_exit(world):
    """Nobody closes anything: the process ends with groups in use."""
    everything(world.group([1, 0]))
    everything(world.group([0, 1]))


def main():
    what = globals()[sys.argv[1]]
    if what is at_exit:
        world = commute.init()
        at_exit(world)
        say(me=world.rank, fine=True)
        return
    with commute.init(timeout=40) as world:
        found = what(world)
        say(me=world.rank, fine=True, **(found or {}))


if __name__ == "__main__":
    main()
