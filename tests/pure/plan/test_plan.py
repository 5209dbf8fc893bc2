# SPDX-License-Identifier: Apache-2.0
"""Plans as objects: identity, peers, lowering, and how they are asked for."""

import dataclasses

import numpy as np
import pytest

from commute.plan import Collective, Op, PlanError, algorithms, build, pipelined, verify

ALL = [(collective, name) for collective in Collective for name in algorithms(collective)]


def test_hash_covers_header_and_programs() -> None:
    """Equal plans have equal hashes; any difference that would be executed changes it."""
    plan = build("allreduce", "tree", 4)
    same = dataclasses.replace(plan, programs=tuple(p.copy() for p in plan.programs))
    changed = [p.copy() for p in plan.programs]
    changed[3]["src"][0] = 1
    hashes = {
        plan.hash,
        dataclasses.replace(plan, programs=tuple(changed)).hash,
        dataclasses.replace(plan, chunks=2).hash,
        dataclasses.replace(plan, root=1).hash,
        dataclasses.replace(plan, algorithm="bush").hash,
        dataclasses.replace(plan, blocks=(0, 1, 1, 0)).hash,
        dataclasses.replace(plan, direct=True).hash,
    }

    assert same.hash == plan.hash
    assert 0 <= plan.hash < 1 << 64
    assert len(hashes) == 7


def test_hash_is_stable() -> None:
    """The hash is the same in every process, version and machine that writes the same plan."""
    plan = build("broadcast", "binomial", 2)
    programs = [[tuple(int(v) for v in row) for row in program] for program in plan.programs]

    assert programs == [
        [(0, 0, 0, 255, 0, 1, -1, 1, 255, 1, 0, 0, 0)],
        [(1, 0, 0, 255, 0, 0, -1, 255, 1, 1, 0, 0, 0)],
    ]
    assert plan.hash == 0xE95FADEE7208E5D5


def test_programs_cannot_be_changed() -> None:
    """A plan that has been proved stays as it is."""
    plan = build("allreduce", "ring", 3)

    with pytest.raises(ValueError, match="read-only"):
        plan.programs[0]["src"][0] = 1


def test_peers_are_those_of_messages() -> None:
    """A ring has two peers, a star one or all, and a plan on shared memory none."""
    assert build("allreduce", "ring", 5).peers(0) == (1, 4)
    assert build("allreduce", "gather-to-root", 4).peers(0) == (1, 2, 3)
    assert build("allreduce", "gather-to-root", 4).peers(2) == (0,)
    assert build("allreduce", "tree", 4).peers(2) == (0, 3)
    assert build("allreduce", "one-shot", 4).peers(1) == ()
    assert build("allreduce", "ring", 1).peers(0) == ()


def test_links_count_chunks_by_direction() -> None:
    """What goes from a to b is counted once, passing on included."""
    links = build("allreduce", "tree", 4).links()

    assert links == {(1, 0): 1, (3, 2): 1, (2, 0): 1, (0, 1): 1, (0, 2): 1, (2, 3): 1}


def test_lowering_duplicates_consecutively() -> None:
    """Step s of wave w becomes step s * waves + w, chunk c of wave w chunk w * chunks + c."""
    plan = build("allreduce", "halving-doubling", 4)
    lowered = pipelined(plan, 3)
    old, new = plan.programs[1], lowered.programs[1]

    assert lowered.chunks == 12
    assert lowered.waves == 3
    assert len(new) == 3 * len(old)
    for index, row in enumerate(new):
        step, wave = divmod(index, 3)
        before = old[step]
        assert row["op"] == before["op"]
        used = before["src_space"] != 255
        assert row["src"] == (wave * 4 + before["src"] if used else 0)
        if before["dep_lane"] != 255:
            assert row["dep_step"] == before["dep_step"] * 3 + wave


def test_lowering_keeps_blocks_apart() -> None:
    """Waves lie inside their block."""
    lowered = build("allgather", "ring", 3)
    copies = lowered.programs[2][lowered.programs[2]["op"] == Op.COPY]

    assert lowered.chunks == 2
    assert copies["src"].tolist() == [0, 1]
    assert copies["dst"].tolist() == [4, 5]


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_lowered_plans_are_right_too(collective: Collective, name: str) -> None:
    """Lowering a good plan gives a good plan with the same chain of messages."""
    for ranks in (1, 2, 3, 5, 6):
        plan = build(collective, name, ranks)
        if max(int(p["count"].max(initial=0)) for p in plan.programs) > plan.chunks:
            with pytest.raises(ValueError, match="several blocks as one message"):
                pipelined(plan, 3)
            continue
        lowered = pipelined(plan, 3)
        if ranks in (3, 5) and (collective, name) == (Collective.REDUCE_SCATTER, "ring"):
            # It is cut in halves already, and leaves SCRATCH to the next tile half by half.
            with pytest.raises(PlanError, match=r"race: .* 1 tile later"):
                verify(lowered)
            continue

        assert verify(lowered).steps == verify(plan).steps


def test_one_wave_is_the_plan_itself() -> None:
    """There is nothing to do for one wave."""
    plan = build("allreduce", "tree", 3)

    assert pipelined(plan, 1) is plan


def test_build_keeps_plans() -> None:
    """Asking twice gives the same object."""
    assert build("allreduce", "ring", 4) is build("allreduce", "ring", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allreduce", "rink", 4), "no algorithm 'rink'; known are ring, tree, halving-doubling"),
        (("gathering", "ring", 4), "'gathering' has no plans"),
        (("allreduce", "ring", 0), "at least 1 rank, got 0"),
        (("broadcast", "binomial", 4, 4), "from 0 to 3, got 4"),
        (("allreduce", "ring", 4, 1), "allreduce has no root"),
    ],
)
def test_build_refuses_with_a_sentence(arguments: tuple[str, str, int], message: str) -> None:
    """Each wrong argument is named."""
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_lanes_without_instructions_do_not_exist() -> None:
    """A leaf of a tree uses lanes 0 and 1, not 0 and 2."""
    for program in build("allreduce", "tree", 6).programs:
        assert np.unique(program["lane"]).tolist() == list(range(program["lane"].max() + 1))
