# SPDX-License-Identifier: Apache-2.0
"""Groups of a world: made without talking, used side by side, refused to whoever is not in them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import commute
from commute import (
    AbandonedError,
    ClosedError,
    CommuteError,
    Group,
    MismatchError,
    OperationTimeoutError,
)


def test_a_group_is_an_ordered_set_of_ranks(ranks):
    """Order, size, place, set operations and comparing: on one rank, without any other."""
    world = ranks(6).groups[2]
    team, other = world.group([4, 2, 0]), world.group([0, 1, 2])

    assert team.ranks == (4, 2, 0) and (team.rank, team.size, len(team)) == (1, 3, 3)
    assert (team.local_rank, team.local_size, team.host) == (1, 3, "memory")
    assert [rank in team for rank in range(6)] == [True, False, True, False, True, False]
    assert (team | other).ranks == (4, 2, 0, 1)
    assert (other | team).ranks == (0, 1, 2, 4)
    assert (team & other).ranks == (2, 0)
    assert (team - other).ranks == (4,) and (other - team).ranks == (1,)
    assert team == world.group([4, 2, 0]) != world.group([0, 2, 4])
    assert world.group(range(6)) == world and len({team, world.group([4, 2, 0])}) == 1
    assert team != "team"
    assert len(team - team) == 0 and not team - team
    assert repr(team) == "<Group rank 1 of 3 on memory, ranks [4, 2, 0] of the world>"
    assert repr(other - team) == "<Group no rank of 1 on memory, ranks [1] of the world>"


def test_making_groups_costs_nothing_until_they_are_used(ranks):
    """A thousand groups that nobody uses have no engine, and are forgotten when they are let go."""
    world = ranks(3).groups[0]
    kept = [world.group([0, 1]) for _ in range(1000)]
    family = world._family

    assert not any("engine" in vars(group._runner) for group in kept)
    assert len(family._unused) == 1000
    assert [group._identity.number for group in kept] == list(range(1000))
    assert len({group._identity.id for group in kept}) == 1000
    kept.clear()
    gc.collect()
    assert not family._unused and not family._used


def test_members_agree_about_identities(ranks):
    """The id follows from parent, ranks and number, whatever else a rank has made before."""
    worlds = ranks(3).groups
    for world in worlds:
        for _ in range(world.rank):
            world.group([world.rank])
    ids = [
        (
            world.group([0, 1])._identity.id,
            world.group([1, 0])._identity.id,
            world.group([0, 1])._identity.id,
            world.group([2, 0, 1]).group([1, 2])._identity.id,
            (world.group([0]) | world.group([1]))._identity.id,
        )
        for world in worlds
    ]

    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 5 and all(0 < each < 1 << 64 for each in ids[0])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([0, 3], ValueError, r"group expected ranks= from 0 to 2, got 3"),
        ([-1], ValueError, r"got -1"),
        ([1, 1], ValueError, r"group expected each rank once, got \[1, 1\]"),
        (["0"], TypeError, r"'str' object cannot be interpreted as an integer"),
    ],
)
def test_ranks_that_cannot_be(ranks, bad, error, message):
    with pytest.raises(error, match=message):
        ranks(3).groups[0].group(bad)


def test_groups_of_two_worlds_do_not_mix(ranks):
    """Nor does a group mix with anything else."""
    one, two = ranks(2).groups[0], ranks(2).groups[0]

    assert one.group([0]) != two.group([0])
    with pytest.raises(ValueError, match="expected two groups of one world"):
        _ = one.group([0]) | two.group([0])
    with pytest.raises(TypeError, match="expected another group, got 3"):
        _ = one - 3  # type: ignore[operator]


def everything(group: Group) -> None:
    """All collectives and messages, against NumPy."""
    mine = np.arange(5.0) + 10 * group.rank
    whole = np.stack([np.arange(5.0) + 10 * rank for rank in range(group.size)])
    last = group.size - 1
    np.testing.assert_array_equal(group.allreduce(mine.copy()), whole.sum(0))
    np.testing.assert_array_equal(group.allreduce_async(mine.copy(), "max").wait(), whole[-1])
    np.testing.assert_array_equal(group.allgather(mine), whole)
    np.testing.assert_array_equal(group.broadcast(mine.copy(), root=last), whole[last])
    np.testing.assert_array_equal(
        group.reduce(mine.copy(), root=last), whole.sum(0) if group.rank == last else mine
    )
    np.testing.assert_array_equal(group.reduce_scatter(whole), group.size * whole[group.rank])
    large = group.allreduce(np.full(100_000, float(group.rank)), algorithm="ring")
    np.testing.assert_array_equal(large, sum(range(group.size)))
    group.barrier()
    if group.size > 1:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent = group.send_async(np.array([group.rank]), to=right)
        assert group.recv(np.array([-1]), source=left)[0] == left
        sent.wait()


def test_everything_in_groups(ranks):
    """In groups of 1 to 5 ranks, in another order than the world's, and in groups of groups."""

    def work(world: Group) -> int:
        used = 0
        for chosen in ([2], [4, 1], [3, 0, 2], [1, 2, 3, 4], [4, 3, 2, 1, 0]):
            group = world.group(chosen)
            inner = group.group(range(group.size - 1, -1, -2))
            for each in (group, inner):
                if world.rank in each:
                    everything(each)
                    assert each.ranks[each.rank] == world.rank
                    used += 1
        everything(world)
        return used

    assert sum(ranks(5).values(work)) == (1 + 2 + 3 + 4 + 5) + (1 + 1 + 2 + 2 + 3)


def test_split(ranks):
    """By color, in the order of the key; None takes no part; splitting what was split."""

    def work(world: Group) -> Any:
        halves = world.split(world.rank % 2, key=-world.rank)
        everything(halves)
        some = world.split(7 if world.rank in (1, 4) else None)
        assert (some is None) == (world.rank not in (1, 4))
        if some is not None:
            everything(some)
        inner = halves.split(np.int64(-(1 << 63)) if halves.rank else 5)
        everything(inner)
        return halves.ranks, halves.rank, inner.ranks

    assert ranks(5).values(work) == [
        ((4, 2, 0), 2, (2, 0)),
        ((3, 1), 1, (1,)),
        ((4, 2, 0), 1, (2, 0)),
        ((3, 1), 0, (3,)),
        ((4, 2, 0), 0, (4,)),
    ]


def test_split_refuses_what_is_no_color(ranks):
    world = ranks(1).groups[0]

    with pytest.raises(ValueError, match="split expected color= and key= of 64 bits"):
        world.split(1 << 63)
    with pytest.raises(TypeError, match="integer"):
        world.split("red")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.allreduce(np.ones(2)),
        lambda group: group.allreduce_async(np.ones(2)),
        lambda group: group.broadcast(np.ones(2), root=1),
        lambda group: group.reduce(np.ones(2)),
        lambda group: group.allgather(np.ones(2)),
        lambda group: group.reduce_scatter(np.ones((2, 2))),
        lambda group: group.barrier(),
        lambda group: group.send(np.ones(2), to=1),
        lambda group: group.recv_async(np.ones(2), source=0),
        lambda group: group.split(0),
        lambda group: group.store(),
        lambda group: group.records(),
        lambda group: group.group([1]).barrier(),
    ],
)
def test_who_is_not_in_a_group_cannot_use_it(ranks, call):
    """It may be held, combined and closed; calling it names the rank and the group's ranks."""
    group = ranks(4).groups[3].group([0, 2])

    assert group.rank == group.local_rank == -1 and group.size == group.local_size == 2
    with pytest.raises(CommuteError, match=r"rank 3 is not in the group of ranks (0, 2|2),"):
        call(group)
    group.close()


def test_a_store_is_the_worlds(ranks):
    with pytest.raises(CommuteError, match="a store belongs to the world, and rank 1 asked for"):
        ranks(2).groups[1].group([0, 1]).store()


def in_threads(works: list[Callable[[], None]]) -> None:
    """Each in a thread of its own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def body(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_groups_work_at_once_without_mixing(ranks, algorithm):
    """Three groups that share ranks, two of them the same ranks, a thread each on every member."""
    count = 1000 if algorithm is None else 300

    def use(group: Group, salt: int) -> None:
        for number in range(count):
            value = salt * number + group.rank
            expected = group.size * salt * number + sum(range(group.size))
            got = group.allreduce(np.full(1 + number % 40, value), algorithm=algorithm)
            np.testing.assert_array_equal(got, expected)
            if number % 10 == 0:
                root = number // 10 % group.size
                assert group.broadcast(np.array([salt, group.rank]), root).tolist() == [salt, root]

    def work(world: Group) -> None:
        teams = [world.group([0, 1]), world.group([1, 2, 0]), world.group([0, 1])]
        works = [
            lambda team=team, salt=salt: use(team, salt)
            for salt, team in enumerate(teams, 3)
            if world.rank in team
        ]
        in_threads([*works, lambda: use(world, 11)])

    ranks(3).values(work)


def test_groups_may_be_used_first_in_any_order(ranks):
    """Asynchronous calls on two groups, in another order on each rank, before either was used."""

    def work(world: Group) -> list[float]:
        teams = [world.group([0, 1]), world.group([1, 0])]
        order = teams if world.rank else teams[::-1]
        handles = {id(team): team.allreduce_async(np.ones(3)) for team in order}
        return [float(handles[id(team)].wait()[0]) for team in teams]

    assert ranks(2).values(work) == [[2.0, 2.0]] * 2


def test_what_breaks_a_group_breaks_no_other(ranks):
    """Mismatched calls and a timeout: told to its members alone; world and others go on."""

    def work(world: Group) -> tuple[type, type]:
        first, second, third = world.group([0, 1]), world.group([0, 1]), world.group([0, 1, 2])
        kinds: list[type] = []
        if world.rank < 2:
            with pytest.raises(MismatchError) as mismatched:
                first.allreduce(np.ones(3 + world.rank))
            assert "the group of ranks 0, 1 of the world" in mismatched.value.__notes__[0]
            with pytest.raises((OperationTimeoutError, AbandonedError)) as late:
                if world.rank == 0:
                    second.recv_async(np.ones(1), source=1, timeout=0.2).wait()
                else:
                    second.barrier()
            kinds = [type(mismatched.value), type(late.value)]
            with pytest.raises(MismatchError):
                first.barrier()
        everything(third)
        everything(world)
        return tuple(kinds)

    ended = ranks(3).values(work)

    assert ended == [
        (MismatchError, OperationTimeoutError),
        (MismatchError, AbandonedError),
        (),
    ]


def test_closing_the_world_closes_its_groups(ranks):
    """Used or not; a group can be closed before, which leaves the world alone."""

    def work(world: Group) -> None:
        used, unused, early = (world.group([0, 1]) for _ in range(3))
        everything(used)
        with early:
            everything(early)
        with pytest.raises(ClosedError):
            early.barrier()
        everything(world)
        world.close()
        for group in (used, unused, early):
            assert repr(group).endswith(", closed>")
            with pytest.raises(ClosedError, match="the group is closed"):
                group.allreduce(np.ones(1))
        with pytest.raises(ClosedError):
            world.group([0])

    ranks(2).values(work)


def test_a_group_that_is_let_go_finishes_what_it_began(ranks):
    """The array of an asynchronous call lives until the call is done, whoever has forgotten it."""

    def work(world: Group) -> float:
        x = np.ones(50_000)
        handle = world.group([0, 1]).allreduce_async(x)
        return float(handle.wait()[-1])

    assert ranks(2).values(work) == [2.0, 2.0]


def test_a_world_of_one_has_groups():
    with commute.init() as world:
        team = world.group([0])
        everything(team)
        everything(team.split(3))
        assert world.split(None) is None and len(team - world) == 0
