# SPDX-License-Identifier: Apache-2.0
"""The bytes and codes that Python and C++ share."""

import pytest

from commute.plan import INSTRUCTION, Collective, Flag, Op, Space, build
from commute.plan.instructions import FORMS, describe


def test_instruction_is_32_packed_bytes() -> None:
    """The fields lie where the executor reads them."""
    fields = INSTRUCTION.fields
    assert fields is not None
    offsets = {name: field[1] for name, field in fields.items()}

    assert INSTRUCTION.itemsize == 32
    assert offsets == {
        "op": 0, "lane": 1, "flags": 2, "dep_lane": 3, "dep_step": 4, "peer": 8, "peer2": 12,
        "src_space": 16, "dst_space": 17, "count": 18, "src": 20, "dst": 24, "arg": 28,
    }  # fmt: skip


def test_codes() -> None:
    """The numbers are those of the executor."""
    names = "SEND RECV RECV_REDUCE RECV_REDUCE_SEND COPY REDUCE_MANY PUT SIGNAL WAIT".split()

    assert [op.name for op in Op] == names
    assert [int(op) for op in Op] == list(range(9))
    assert {space.name: int(space) for space in Space} == {
        "IN": 0, "OUT": 1, "SCRATCH": 2, "OUTBOX": 3, "NONE": 255,
    }  # fmt: skip
    assert [flag.name for flag in Flag] == ["BACK", "KEEP", "STREAMING", "FIRST"]
    assert [int(flag) for flag in Flag] == [1, 2, 4, 8]
    labels = ["barrier", "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter"]
    numbers = dict(zip(labels, range(6), strict=True)) | {"gather": 8, "scatter": 9, "alltoall": 10}
    assert {collective.label: int(collective) for collective in Collective} == numbers
    assert set(FORMS) == set(Op)


def test_describe_names_every_operand() -> None:
    """An instruction in words says what goes where."""
    tree = build("allreduce", "tree", 4).programs[2]
    shot = build("allreduce", "one-shot", 2).programs[1]
    words = [describe(row) for row in (*tree, *shot)]

    assert words[0] == "recv_reduce_send OUT[0] <- 3 -> 0"
    assert words[1:3] == ["recv OUT[0] <- 0", "send OUT[0] -> 3"]
    assert words[3] == "wait for signal 1 #1 of 0, 2 tiles ago"
    assert words[4] == "put OUTBOX[0] = OUT[0]"
    assert "reduce_many OUT[0] = OUT[0] + OUTBOX[0] of all others" in words
    chain = build("reduce", "chain", 3, root=2).programs
    assert describe(chain[1][0]) == "recv_reduce_send SCRATCH[0] = <- 0 + IN[0] -> 2"


def test_describe_says_which_operand_is_the_first() -> None:
    """Partners that exchange sums form the same one: what comes from below is added to."""
    lower, upper = (
        [describe(row) for row in program]
        for program in build("allreduce", "recursive-doubling", 2).programs
    )

    assert "recv_reduce SCRATCH[0] = OUT[0] + <- 1" in lower
    assert "recv_reduce SCRATCH[0] = <- 0 + OUT[0]" in upper


def test_unknown_collective_lists_the_known_ones() -> None:
    """A wrong name is answered with the right ones."""
    with pytest.raises(ValueError, match="'allsum' has no plans; known are barrier, broadcast"):
        Collective.named("allsum")
